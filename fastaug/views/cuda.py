"""Views on a GPU: cuda/views.cu, compiled for the GPU in use, on its own stream."""

from __future__ import annotations

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
from fastaug.runtime.streams import SideStream
from fastaug.toolchain import cuda_driver, nvrtc
from fastaug.toolchain.build import DTYPES
from fastaug.toolchain.cuda_driver import Device
from fastaug.views import launch, packed_plan, randaugment
from fastaug.views.buffer_pool import BufferPool
from fastaug.views.launch import SHARED, memory_needs, plan_launch
from fastaug.views.packed_plan import Pictures, encode_layers, encode_views, form_structure
from fastaug.views.plan import ViewPlans
from fastaug.views.render_spec import RenderSpec

VIEWS = nvrtc.Program(
    "views.cu",
    {
        f"views_{dtype}_{shared}": f"KERNEL({dtype},{ctype},{shared},{shared.upper()})"
        for dtype, ctype in nvrtc.CTYPES.items()
        for shared in SHARED
    },
    # views, layers, number of views, out, global memory of the blocks, form, places
    (c_void_p, c_void_p, c_longlong, c_void_p, c_void_p, None, None),
    # No fused multiply-add: each product and sum is rounded, as in Pillow.
    options=("--std=c++17", "--fmad=false"),
)


class StartedViews:
    """Views that are being made on another stream."""

    def __init__(
        self, views: Tensor, done: torch.cuda.Event | None, release: Callable[[], None]
    ) -> None:
        self._views, self._done, self._release = views, done, release

    def finish(self) -> Tensor:
        """[B, K, 3, S, S], stored B, K, S, S, 3. The current stream waits, not the caller."""
        if self._done is not None:
            current = torch.cuda.current_stream(self._views.device)
            current.wait_event(self._done)
            # The other stream must not reuse the memory while this one reads it.
            self._views.record_stream(current)
        self._release()
        return self._views


class CudaViews:
    """The engine of one GPU. It works on its own stream, concurrently with the current one until
    finish()."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._side.stream

    def __reduce__(self) -> tuple[Any, tuple[torch.device]]:
        return type(self), (self._device,)  # handles belong to their process

    def why_not(self) -> str | None:
        if not torch.cuda.is_available():
            return "needs an NVIDIA GPU"
        try:
            self._gpu.load(VIEWS, "views_f32_all")  # shows that a kernel can be compiled and loaded
        except KernelUnavailableError as error:
            return str(error)
        return None

    def sources(self) -> tuple[Path, ...]:
        modules = (cuda_driver, nvrtc, launch, packed_plan, randaugment)
        python = (__file__, *(str(module.__file__) for module in modules))
        return (*VIEWS.sources(), *map(Path, python))

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
        """Start making views. threads, pool: not used; torch itself reuses GPU memory."""
        self._side.release()
        views, layers = encode_views(pictures, plans), encode_layers(plans)
        size, (images, per_image, count) = plans.size, plans.operations.shape
        shape = (images, per_image, size, size, 3)
        if not len(views):
            return StartedViews(self._empty(shape, spec.dtype), None, self._side.release)
        gpu, needs = self._gpu, memory_needs(views, layers, spec, size)
        plan = plan_launch(needs, len(views), size, gpu.shared_limit, gpu.processors)
        with self._on_own_stream(wait):
            uploaded = self._uploaded(np.concatenate([_bytes(views), _bytes(layers)]))
            out = self._empty(shape, spec.dtype)
            scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=self._device)
            arguments = (
                *(uploaded, uploaded[views.nbytes :], len(views), out, scratch),
                *(form_structure(spec, size, count), plan.places),
            )
            kernel = f"views_{DTYPES[spec.dtype]}_{plan.shared}"
            gpu.launch(VIEWS, kernel, plan.blocks, plan.threads, plan.shared_bytes, arguments)
        return StartedViews(out, self._side.keep(kept), self._side.release)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # Permuted here: torch cannot exit cleanly if a tensor and a view of it are both kept.
        return torch.empty(shape, dtype=dtype, device=self._device).permute(0, 1, 4, 2, 3)

    @cached_property
    def _gpu(self) -> Device:
        index = self._device.index
        return Device(torch.cuda.current_device() if index is None else index)

    @cached_property
    def _side(self) -> SideStream:
        return SideStream(self._device)

    def _on_own_stream(self, wait: bool) -> AbstractContextManager:
        """A context with this engine's stream. Its tensors belong to that stream's memory, so they
        may be released as soon as the kernel is launched."""
        if wait:
            self.stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self.stream)

    def _uploaded(self, content: np.ndarray) -> Tensor:
        # From pinned memory, which torch keeps until the copy is done: the caller does not wait.
        pinned = torch.from_numpy(content).pin_memory()
        return pinned.to(self._device, non_blocking=True)


def _bytes(records: np.ndarray) -> np.ndarray:
    return records.view(np.uint8)
