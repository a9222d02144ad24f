"""Views on a CPU: cuda/views.cpp, compiled for this CPU when it is first used."""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastaug.toolchain.cpp import FLAGS, build_library, open_library, why_not
from fastaug.views import packed_plan as records
from fastaug.views.packed_plan import Pictures
from fastaug.views.plan import ViewPlans
from fastaug.views.render_spec import BORDERS, RenderSpec

_HEADERS = ("values.h", "levels.h", "resample.h", "block.h", "operations.h", "views.h")
# Sums are rounded one by one, as Pillow rounds them.
_FLAGS = (*FLAGS, "-ffp-contract=off")
_CPU = torch.device("cpu")
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# `Arguments` of views.cpp
_pack = struct.Struct("@PPq5i6fiPi").pack


class StartedViews:
    """Views that are being made, beside the caller. Holds all that they are made of."""

    def __init__(self, views: Tensor, arguments: bytes, *kept: Any) -> None:
        library = _library()
        self._views, self._kept = views, kept
        self._wait = library.fastaug_views_finish
        self._job: int | None = library.fastaug_views_start(arguments)

    def finish(self) -> Tensor:
        """[B, K, 3, S, S], stored B, K, S, S, 3. The caller works, too, on what is left."""
        assert self._job is not None, "finished twice"
        self._end()
        return self._views

    def _end(self) -> None:
        job, self._job = self._job, None
        self._wait(job)
        self._kept = ()

    def __del__(self) -> None:
        # The memory must stay until the threads are done with it. No more than that: when Python
        # ends, torch cannot make another tensor.
        if self._job is not None:
            self._end()


class NativeViews:
    name = "native"

    def why_not(self) -> str | None:
        return _why_not()

    def sources(self) -> tuple[Path, ...]:
        # The library, too: another CPU or compiler makes another one of the same sources.
        return Path(__file__), Path(records.__file__), _build()

    def start(
        self, pictures: Pictures, plans: ViewPlans, form: RenderSpec, *, threads: int, kept: Any
    ) -> StartedViews:
        """Begin to make views, with so many threads beside the caller."""
        views, layers = records.encode_views(pictures, plans), records.encode_layers(plans)
        size, (images, per_image, count) = plans.size, plans.operations.shape
        shape = (images, per_image, size, size, 3)
        # Permuted at once: torch cannot end a process in which a tensor and a view of it are kept.
        out = torch.empty(shape, dtype=form.dtype, device=_CPU).permute(0, 1, 4, 2, 3)
        arguments = _pack(
            views.ctypes.data,
            layers.ctypes.data,
            len(views),
            size,
            count,
            BORDERS.index(form.border),
            form.interpolation == "bicubic",
            form.antialias,
            *form.mean,
            *form.factor,
            _DTYPES[form.dtype],
            out.data_ptr(),
            threads,
        )
        return StartedViews(out, arguments, views, layers, kept)


@cache
def _why_not() -> str | None:
    return why_not(_library)


def _build() -> Path:
    return build_library("views.cpp", _HEADERS, "the view kernel", _FLAGS)


@cache
def _library() -> ctypes.CDLL:
    return _open(_build())


def _open(file: Path) -> ctypes.CDLL:
    library = open_library(file)
    library.fastaug_views_start.restype = ctypes.c_void_p
    library.fastaug_views_start.argtypes = [ctypes.c_char_p]
    library.fastaug_views_finish.restype = None
    library.fastaug_views_finish.argtypes = [ctypes.c_void_p]
    return library
