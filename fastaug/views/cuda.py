"""Views on a GPU: cuda/views.cu, compiled for the GPU at hand, beside what the GPU does else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from ctypes import c_longlong, c_void_p
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastaug.errors import KernelUnavailableError
from fastaug.toolchain import cuda_driver, nvrtc
from fastaug.toolchain.cuda_driver import Device
from fastaug.views import launch
from fastaug.views import packed_plan as records
from fastaug.views.launch import form_structure, memory_needs, plan_launch
from fastaug.views.packed_plan import Pictures
from fastaug.views.plan import ViewPlans
from fastaug.views.render_spec import RenderSpec

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
VIEWS = nvrtc.Program(
    "views.cu",
    ("values.h", "levels.h", "resample.h", "block.h", "operations.h", "views.h"),
    {f"views_{dtype}": f"KERNEL({dtype},{ctype})" for dtype, ctype in nvrtc.DTYPES.items()},
    # views, layers, how many views, out, global memory of the blocks, form, places
    (c_void_p, c_void_p, c_longlong, c_void_p, c_void_p, None, None),
    # Sums are rounded one by one, as Pillow rounds them.
    options=("--std=c++17", "--fmad=false"),
)


class StartedViews:
    """Views that are being made on a stream of their own."""

    def __init__(
        self, views: Tensor, done: torch.cuda.Event | None, let_go: Callable[[], None]
    ) -> None:
        self._views, self._done, self._let_go = views, done, let_go

    def finish(self) -> Tensor:
        """[B, K, 3, S, S], stored B, K, S, S, 3. The current stream waits; the caller does not."""
        if self._done is not None:
            current = torch.cuda.current_stream(self._views.device)
            current.wait_event(self._done)
            # The memory is the other stream's: it must not take it back while this one reads it.
            self._views.record_stream(current)
        self._let_go()
        return self._views


class CudaViews:
    """One for each GPU. Its stream waits for what the current one was given before start(), so that
    images are there; then both go on side by side until finish()."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # What views are made of, until an event says that they are made. Whose memory that is may
        # know nothing of streams (DALI's lists), so that letting go of it any sooner, even after
        # finish(), could give it to others while the kernel still reads it.
        self._in_use: deque[tuple[torch.cuda.Event, Any]] = deque()

    def why_not(self) -> str | None:
        if not torch.cuda.is_available():
            return "needs an NVIDIA GPU"
        try:
            self._gpu.load(VIEWS, "views_f32")  # shows that one can be compiled and loaded
        except KernelUnavailableError as error:
            return str(error)
        return None

    def sources(self) -> tuple[Path, ...]:
        modules = (cuda_driver, nvrtc, launch, records)
        python = (__file__, *(str(module.__file__) for module in modules))
        return (*VIEWS.sources(), *map(Path, python))

    def start(
        self, pictures: Pictures, plans: ViewPlans, form: RenderSpec, *, threads: int, kept: Any
    ) -> StartedViews:
        """Begin to make views. threads are for CPUs."""
        self._let_go()
        views, layers = records.encode_views(pictures, plans), records.encode_layers(plans)
        size, (images, per_image, count) = plans.size, plans.operations.shape
        shape = (images, per_image, size, size, 3)
        if not len(views):
            return StartedViews(self._empty(shape, form.dtype), None, self._let_go)
        gpu, needs = self._gpu, memory_needs(views, layers, form, size)
        plan = plan_launch(needs, len(views), size, gpu.shared_limit, gpu.processors)
        with self._beside():
            uploaded = self._uploaded(np.concatenate([_bytes(views), _bytes(layers)]))
            out = self._empty(shape, form.dtype)
            scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=self._device)
            arguments = (
                *(uploaded, uploaded[views.nbytes :], len(views), out, scratch),
                *(form_structure(form, size, count), plan.places),
            )
            kernel = f"views_{DTYPES[form.dtype]}"
            gpu.launch(VIEWS, kernel, plan.blocks, plan.threads, plan.shared_bytes, arguments)
            done = self._stream.record_event()
        self._in_use.append((done, kept))
        return StartedViews(out, done, self._let_go)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # Permuted at once: torch cannot end a process in which a tensor and a view of it are kept.
        return torch.empty(shape, dtype=dtype, device=self._device).permute(0, 1, 4, 2, 3)

    @cached_property
    def _gpu(self) -> Device:
        index = self._device.index
        return Device(torch.cuda.current_device() if index is None else index)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def _beside(self) -> AbstractContextManager:
        """On the stream of its own. Its tensors are of that stream's memory, and may be let go of
        as soon as the kernel is launched."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _uploaded(self, content: np.ndarray) -> Tensor:
        # From pinned memory, which torch keeps until it is copied: the caller does not wait.
        pinned = torch.from_numpy(content).pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def _let_go(self) -> None:
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()


def _bytes(records: np.ndarray) -> np.ndarray:
    return records.view(np.uint8)
