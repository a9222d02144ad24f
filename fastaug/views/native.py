"""Views on a CPU: cuda/views.cpp, prebuilt or compiled for this CPU on first use."""

from __future__ import annotations

import ctypes
import struct
from ctypes import sizeof
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastaug.toolchain.build import DTYPES
from fastaug.toolchain.cpp import find_library, open_library, why_not
from fastaug.views import packed_plan, randaugment
from fastaug.views.buffer_pool import BufferPool
from fastaug.views.packed_plan import (
    Form,
    Pictures,
    encode_layers,
    encode_views,
    form_structure,
)
from fastaug.views.plan import ViewPlans
from fastaug.views.render_spec import RenderSpec

# `Arguments` of views.cpp: views, layers, how many views, form, dtype, out, threads
_pack = struct.Struct(f"@PPq{sizeof(Form)}siPi").pack


class StartedViews:
    """Views that are being made by other threads. Keeps their inputs alive."""

    def __init__(self, views: Tensor, arguments: bytes, *kept: Any) -> None:
        library = _library()
        self._views, self._kept = views, kept
        self._wait = library.fastaug_views_finish
        self._job: int | None = library.fastaug_views_start(arguments)
        if self._job is None:
            raise _no_memory()

    def finish(self) -> Tensor:
        """[B, K, 3, S, S], stored B, K, S, S, 3. The calling thread helps with the rest."""
        assert self._job is not None, "finished twice"
        if not self._end():
            raise _no_memory()
        return self._views

    def _end(self) -> int:
        job, self._job = self._job, None
        is_complete = self._wait(job)
        self._kept = ()
        return is_complete

    def __del__(self) -> None:
        # The memory must stay until the threads are done with it. Do nothing else here: when Python
        # exits, torch cannot create a tensor.
        if self._job is not None:
            self._end()


def _no_memory() -> MemoryError:
    return MemoryError("cannot allocate memory to make views")


class NativeViews:
    """The engine of the CPU."""

    name = "native"

    def why_not(self) -> str | None:
        return _why_not()

    def sources(self) -> tuple[Path, ...]:
        # Also the library: it differs between CPUs and compilers.
        modules = (packed_plan, randaugment)
        return Path(__file__), *(Path(str(module.__file__)) for module in modules), _find()

    stream = None

    def start(
        self,
        pictures: Pictures,
        plans: ViewPlans,
        spec: RenderSpec,
        *,
        threads: int,
        kept: Any,
        wait: bool = True,
        pool: BufferPool | None = None,
    ) -> StartedViews:
        """Start making views. threads: number of threads besides the calling one."""
        views, layers = encode_views(pictures, plans), encode_layers(plans)
        size, (images, per_image, count) = plans.size, plans.operations.shape
        shape = (images, per_image, size, size, 3)
        # Permuted here: torch cannot exit cleanly if a tensor and a view of it are both kept.
        out = (pool.empty if pool else _empty)(shape, spec.dtype).permute(0, 1, 4, 2, 3)
        arguments = _pack(
            views.ctypes.data,
            layers.ctypes.data,
            len(views),
            bytes(form_structure(spec, size, count)),
            list(DTYPES).index(spec.dtype),
            out.data_ptr(),
            threads,
        )
        return StartedViews(out, arguments, views, layers, kept)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


@cache
def _why_not() -> str | None:
    return why_not(_library)


def _find() -> Path:
    return find_library("views.cpp", "the view kernel")


@cache
def _library() -> ctypes.CDLL:
    return _open(_find())


def _open(file: Path) -> ctypes.CDLL:
    library = open_library(file)
    library.fastaug_views_start.restype = ctypes.c_void_p
    library.fastaug_views_start.argtypes = [ctypes.c_char_p]
    library.fastaug_views_finish.restype = ctypes.c_int
    library.fastaug_views_finish.argtypes = [ctypes.c_void_p]
    return library
