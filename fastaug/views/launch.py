"""How the view kernel is launched on a GPU: where the memory of a block lies, and how many live."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_longlong
from typing import NamedTuple

import numpy as np

from fastaug.views.packed_plan import LAYER, NEEDS_ROOM, VIEW
from fastaug.views.render_spec import BORDERS, RenderSpec

WARP = 32
MOST_WARPS = 12
NUMBERS_PER_THREAD = 32
"""Of a view, at the least: of a small one, threads would mostly wait for one another."""
REGISTERS = 80
"""Of a thread, at the most: what __launch_bounds__ in views.cu leaves."""
REGISTERS_OF_SM = 65536
MOST_BLOCKS = 16
"""On an SM, of compute capability 7.5 and up."""
RESERVED = 1024
"""Bytes of shared memory that the system takes of each block, on compute capability 8.0 and up."""
MOST_ROWS = 8
"""Of a strip: threads meet twice a strip, and after 8 rows each had some hundred sums."""
MOST_SCRATCH = 2**30
"""Bytes of global memory for all blocks; one that needs more than that is alone."""
_TABLES = 3 * 256 + 3 * 256 // 4
"""Numbers that operations need in place of the strip."""


class Form(Structure):
    """`Form` of cuda/views.h."""

    _fields_ = (
        *((name, c_int) for name in ("size", "layers", "border", "cubic", "antialias")),
        ("mean", c_float * 3),
        ("factor", c_float * 3),
    )


class Places(Structure):
    """`Places` of cuda/views.cu."""

    _fields_ = (
        *((name, c_longlong) for name in ("tables", "first", "second", "box", "piece")),
        ("in_shared", c_int),
        ("strip_rows", c_int),
    )


def form_structure(form: RenderSpec, size: int, layers: int) -> Form:
    border, cubic = BORDERS.index(form.border), form.interpolation == "bicubic"
    means, factors = (c_float * 3)(*form.mean), (c_float * 3)(*form.factor)
    return Form(size, layers, border, cubic, form.antialias, means, factors)


class Needs(NamedTuple):
    """What the views of a launch need: `Layout` and `Room` of cuda/views.h."""

    fixed: np.ndarray
    """[views]: numbers of the tables without the strip."""
    row: np.ndarray
    """[views]: numbers of a row of the strip."""
    first: int
    second: int
    box: int
    """Bytes that any view needs at the most."""

    def tables(self, strip_rows: int) -> int:
        """Bytes."""
        return 4 * int((self.fixed + np.maximum(strip_rows * self.row, _TABLES)).max())


def needs_of(views: np.ndarray, layers: np.ndarray, form: RenderSpec, size: int) -> Needs:
    """Of VIEW and LAYER records, one view at least."""
    assert views.dtype == VIEW
    assert layers.dtype == LAYER
    height, width = views["box_height"].astype(np.int64), views["box_width"].astype(np.int64)
    across, down = (_taps(side, size, form) for side in (width, height))
    levels = 3 * size * size + 1
    top, left = views["top"], views["left"]
    is_inside = (top >= 0) & (left >= 0)
    is_inside &= (top + height <= views["height"]) & (left + width <= views["width"])
    is_folded = (height == size) & (width == size) & (views["width"] <= size)
    is_copied = ~is_inside & ~(is_folded & (form.border != "fill"))
    return Needs(
        fixed=3 * size * (3 + across) + size * (1 + down),
        row=3 * width,
        first=levels if len(layers) else 0,
        second=levels if np.isin(layers["operation"], NEEDS_ROOM).any() else 0,
        box=int(np.where(is_copied, 3 * height * width, 0).max()),
    )


def _taps(source: np.ndarray, size: int, form: RenderSpec) -> np.ndarray:
    """Of `Side` in cuda/resample.h."""
    scale = source / size
    widen = np.maximum(scale, 1) if form.antialias else np.ones_like(scale)
    radius = (2 if form.interpolation == "bicubic" else 1) * widen
    reach = np.where(source == size, 1, np.ceil(2 * radius).astype(np.int64))
    return np.minimum(reach, source)


class Launch(NamedTuple):
    blocks: int
    threads: int
    shared_bytes: int
    on_sm: int
    """Blocks that live on an SM at a time."""
    places: Places

    @property
    def scratch_bytes(self) -> int:
        """Of global memory, for all blocks."""
        return self.blocks * self.places.piece


def plan_launch(needs: Needs, count: int, size: int, shared_limit: int, processors: int) -> Launch:
    """For a number of views on a GPU: its shared memory for a block, in bytes, and its SMs.

    Shared memory takes what fits, in this order: the tables, the view that operations work on, the
    other one, the box. What does not fit is in global memory, mostly in the L2 cache: a piece for
    each block that lives on the GPU at a time, not for each view; such a block makes one view after
    the other.
    """
    warps = min(MOST_WARPS, max(1, 3 * size * size // (WARP * NUMBERS_PER_THREAD)))
    threads = WARP * warps
    rows = _strip_rows(needs, size, shared_limit)
    parts = (needs.tables(rows), needs.first, needs.second, needs.box)
    shared, piece, in_shared, places = 0, 0, 0, []
    for number, length in enumerate(map(_aligned, parts)):
        if shared + length <= shared_limit:
            places.append(shared)
            shared += length
            in_shared |= 1 << number
        else:
            places.append(piece)
            piece += length
    on_sm = min(
        (shared_limit + RESERVED) // (shared + RESERVED),
        REGISTERS_OF_SM // (REGISTERS * threads),
        MOST_BLOCKS,
    )
    blocks = count
    if piece:
        blocks = max(1, min(count, on_sm * processors, MOST_SCRATCH // piece))
    return Launch(blocks, threads, shared, on_sm, Places(*places, piece, in_shared, rows))


def _strip_rows(needs: Needs, size: int, shared_limit: int) -> int:
    """As many as leave what fits beside one row its place; else, so that two blocks have theirs."""
    most = min(MOST_ROWS, size)
    least, beside = _aligned(needs.tables(1)), 0
    for length in map(_aligned, (needs.first, needs.second, needs.box)):
        beside += length if least + beside + length <= shared_limit else 0
    room = shared_limit - beside if beside else (shared_limit + RESERVED) // 2 - RESERVED
    fitting = (rows for rows in range(most, 0, -1) if _aligned(needs.tables(rows)) <= room)
    return next(fitting, most if least > shared_limit else 1)


def _aligned(length: int) -> int:
    return -(-length // 16) * 16
