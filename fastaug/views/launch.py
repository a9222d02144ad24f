"""Launch plan of the view kernel on a GPU: memory layout of a block and the number of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import Structure, c_int, c_longlong
from typing import Any, NamedTuple

import numpy as np

from fastaug.views.packed_plan import LAYER, VIEW, kernel_codes
from fastaug.views.render_spec import RenderSpec

WARP = 32
MOST_WARPS = 12
NUMBERS_PER_THREAD = 32
"""Minimum share of a view for a thread: with less, threads mostly wait for each other."""
SHARED = ("all", "tables", "none")
"""What is in shared memory, by the names of the kernels: `Shared` of cuda/views.cu."""
REGISTERS = {"all": 80, "tables": 80, "none": 168}
"""Maximum registers of a thread of each kernel, by __launch_bounds__ in views.cu."""
REGISTERS_OF_SM = 65536
MOST_BLOCKS = 16
"""Maximum blocks on an SM, on compute capability 7.5 and up."""
RESERVED = 1024
"""Bytes of shared memory that CUDA reserves in each block, on compute capability 8.0 and up."""
MOST_ROWS = 8
"""Maximum rows of a strip: threads sync twice per strip, and 8 rows are some hundred sums each."""
MOST_SCRATCH = 2**30
"""Bytes of global memory for all blocks; with a block that needs more, only one runs."""
_TABLES = 3 * 256 + 3 * 256 // 4
"""Numbers that operations store in the memory of the strip."""


BOX = 3
"""Number of the box among the parts of `Places`."""


class Places(Structure):
    """`Places` of cuda/views.cu."""

    _fields_ = (
        *((name, c_longlong) for name in ("tables", "first", "second", "box", "piece")),
        ("in_shared", c_int),
        ("strip_rows", c_int),
    )


class MemoryNeeds(NamedTuple):
    """Memory that the views of a launch need: `Layout` and `Room` of cuda/views.h."""

    fixed: np.ndarray
    """[views]: numbers of the tables without the strip."""
    row: np.ndarray
    """[views]: numbers of a row of the strip."""
    first: int
    """Bytes of the buffer that operations work on, for the view that needs most."""
    second: int
    """Bytes of the second buffer, for operations that cannot work in place."""
    box: int
    """Bytes of the largest box that must be copied, because it reaches beyond its image."""

    def tables(self, strip_rows: int) -> int:
        """Bytes of the tables with a strip of this many rows."""
        return 4 * int((self.fixed + np.maximum(strip_rows * self.row, _TABLES)).max())


def memory_needs(views: np.ndarray, layers: np.ndarray, spec: RenderSpec, size: int) -> MemoryNeeds:
    """views, layers: VIEW and LAYER records of at least one view."""
    assert views.dtype == VIEW
    assert layers.dtype == LAYER
    height, width = views["box_height"].astype(np.int64), views["box_width"].astype(np.int64)
    across, down = (_taps(side, size, spec) for side in (width, height))
    buffer = 3 * size * size + 1
    needs_second = np.isin(layers["operation"], kernel_codes().need_second_buffer).any()
    top, left = views["top"], views["left"]
    is_inside = (top >= 0) & (left >= 0)
    is_inside &= (top + height <= views["height"]) & (left + width <= views["width"])
    is_folded = (height == size) & (width == size) & (views["width"] <= size)
    is_copied = ~is_inside & ~(is_folded & (spec.border != "fill"))
    return MemoryNeeds(
        fixed=_rounded_up(3 * size, 4) * (3 + across) + size * (1 + down),
        row=_rounded_up(3 * width, 4),
        first=buffer if len(layers) else 0,
        second=buffer if needs_second else 0,
        box=int(np.where(is_copied, 3 * height * width, 0).max()),
    )


def _taps(source: np.ndarray, size: int, spec: RenderSpec) -> np.ndarray:
    """Source pixels that a pixel of the view is summed from, as `Side` of cuda/resample.h."""
    scale = source / size
    widen = np.maximum(scale, 1) if spec.antialias else np.ones_like(scale)
    radius = (2 if spec.interpolation == "bicubic" else 1) * widen
    reach = np.where(source == size, 1, np.ceil(2 * radius).astype(np.int64))
    return np.minimum(reach, source)


class Limits(NamedTuple):
    """Settings of the admission check, so that small views take the path of large ones, which do
    not fit into shared memory: blocks of many warps, each of which makes several views."""

    shared_bytes: int
    """Maximum of a block; less than a GPU has."""
    blocks: int
    """Maximum, if global memory is needed."""
    warps: int
    """Warps per block."""


_LIMITS: ContextVar[Limits | None] = ContextVar("limits of a launch", default=None)


@contextmanager
def limited(limits: Limits | None) -> Iterator[None]:
    """A context in which launches are planned within these limits."""
    token = _LIMITS.set(limits)
    try:
        yield
    finally:
        _LIMITS.reset(token)


class Launch(NamedTuple):
    blocks: int
    threads: int
    shared_bytes: int
    on_sm: int
    """Blocks that an SM holds at a time."""
    places: Places
    shared: str
    """The entry of SHARED whose kernel this is for."""

    @property
    def scratch_bytes(self) -> int:
        """Global memory of all blocks."""
        return self.blocks * self.places.piece


def plan_launch(
    needs: MemoryNeeds, count: int, size: int, shared_limit: int, processors: int
) -> Launch:
    """count: number of views; shared_limit: bytes of shared memory for a block; processors: SMs.

    Shared memory holds what fits, in this order: the tables, the first buffer, the second one;
    nothing if the tables do not fit. The rest and the box go to global memory, mostly in the L2
    cache: one piece for each block that is on the GPU at a time, not for each view. Such a block
    makes one view after another.
    """
    warps = min(MOST_WARPS, max(1, 3 * size * size // (WARP * NUMBERS_PER_THREAD)))
    most = count
    if limits := _LIMITS.get():
        shared_limit, warps = min(shared_limit, limits.shared_bytes), limits.warps
        most = min(count, limits.blocks)
    threads = WARP * warps
    rows = _strip_rows(needs, size, shared_limit)
    parts = (needs.tables(rows), needs.first, needs.second, needs.box)
    shared, piece, in_shared, places = 0, 0, 0, []
    for number, length in enumerate(map(_aligned, parts)):
        has_tables = number == 0 or in_shared & 1
        if number < BOX and has_tables and shared + length <= shared_limit:
            places.append(shared)
            shared += length
            in_shared |= 1 << number
        else:
            places.append(piece)
            piece += length
    known = "all" if in_shared == 0b111 else "tables" if in_shared else "none"
    on_sm = min(
        (shared_limit + RESERVED) // (shared + RESERVED),
        REGISTERS_OF_SM // (REGISTERS[known] * threads),
        MOST_BLOCKS,
    )
    blocks = count
    if piece:
        blocks = max(1, min(most, on_sm * processors, MOST_SCRATCH // piece))
    places_of_block = Places(*places, piece, in_shared, rows)
    return Launch(blocks, threads, shared, on_sm, places_of_block, known)


def _strip_rows(needs: MemoryNeeds, size: int, shared_limit: int) -> int:
    """The most rows that leave room for every buffer that fits next to one row; if none does, the
    most that let two blocks share an SM."""
    most = min(MOST_ROWS, size)
    least, beside = _aligned(needs.tables(1)), 0
    for length in map(_aligned, (needs.first, needs.second)):
        beside += length if least + beside + length <= shared_limit else 0
    room = shared_limit - beside if beside else (shared_limit + RESERVED) // 2 - RESERVED
    fitting = (rows for rows in range(most, 0, -1) if _aligned(needs.tables(rows)) <= room)
    return next(fitting, most if least > shared_limit else 1)


def _aligned(length: int) -> int:
    return _rounded_up(length, 16)


def _rounded_up(number: Any, unit: int) -> Any:
    return -(-number // unit) * unit
