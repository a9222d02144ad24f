"""The CUDA kernel: cuda/objective.cu, one block per image, compiled for the GPU in use."""

from __future__ import annotations

from ctypes import c_float, c_int, c_longlong, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastaug.errors import KernelUnavailableError
from fastaug.kernels.config import Average
from fastaug.kernels.contract import AVERAGES, compiled_averages, is_soft, why_wrong_dtype
from fastaug.toolchain import cuda_driver, nvrtc
from fastaug.toolchain.build import DTYPES
from fastaug.toolchain.cuda_driver import Argument, Device


def kernel_name(average: str, dtype: str, soft: bool = False) -> str:
    return f"objective_{'soft_' if soft else ''}{average}_{dtype}"


_POINTER, _STRIDE = c_void_p, c_longlong
OBJECTIVE = nvrtc.Program(
    "objective.cu",
    {
        kernel_name(average, dtype, macro == "SOFT_KERNEL"): (
            f"{macro}({average},{average.upper()},{dtype},{ctype})"
        )
        for macro, averages in (("KERNEL", (*AVERAGES, "none")), ("SOFT_KERNEL", AVERAGES))
        for average in averages
        for dtype, ctype in nvrtc.CTYPES.items()
    },
    (
        *(_POINTER, _STRIDE, _STRIDE, _POINTER, _POINTER, _POINTER, _POINTER),
        *(c_int, c_int, c_int, c_float, c_float),
    ),
    # Logits are read once: a cache would not help.
    carveout=100,
)

WARP = 32
MOST_WARPS = 16
SCHEDULERS = 4
"""Warp schedulers of an SM: fewer warps leave some idle; four warps each hide the latency."""
RESERVED = 1024
"""Bytes of shared memory that CUDA reserves in each block, on compute capability 8.0 and up."""


class Plan(NamedTuple):
    """Threads of a block, classes that it holds at a time, bytes of shared memory."""

    threads: int
    width: int
    shared_bytes: int


class CudaKernel:
    """Logits that fit into shared memory are read once; others in chunks, three times."""

    name = "cuda"
    soft_targets = True

    def __init__(self) -> None:
        self._devices: dict[int, Device | str] = {}

    def __reduce__(self) -> tuple[Any, tuple]:
        return type(self), ()  # handles belong to their process

    def supports(self, logits: Tensor) -> str | None:
        if reason := why_wrong_dtype(logits):
            return reason
        if not logits.is_cuda:
            return "needs a CUDA device; use native"
        try:
            device = self._device(logits)
            # Shows that a kernel can be compiled and loaded.
            device.load(OBJECTIVE, kernel_name("losses", DTYPES[logits.dtype]))
            _plan(device, logits)
        except KernelUnavailableError as error:
            return str(error)
        return None

    @property
    def averages(self) -> tuple[Average, ...]:
        return compiled_averages()

    def sources(self) -> tuple[Path, ...]:
        """The files that decide what this kernel computes."""
        python = (__file__, cuda_driver.__file__, nvrtc.__file__)
        return (*OBJECTIVE.sources(), *(Path(str(file)) for file in python))

    def value_and_grad(
        self,
        logits: Tensor,
        targets: Tensor | None,
        *,
        average: Average | None,
        kl_weight: float,
        label_smoothing: float,
        need_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if logits.stride(2) != 1:
            logits = logits.contiguous()
        soft = is_soft(targets)
        if targets is not None:
            dtype = torch.float32 if soft else torch.int64
            targets = targets.to(logits.device, dtype, non_blocking=True).contiguous()
        images = len(logits)
        nll = torch.empty(images, dtype=torch.float32, device=logits.device)
        kl = torch.empty_like(nll)
        grad = logits.new_empty(logits.shape) if need_grad else None
        if images:
            device = self._device(logits)
            plan = _plan(device, logits)
            device.launch(
                OBJECTIVE,
                kernel_name(average or "none", DTYPES[logits.dtype], soft),
                images,
                plan.threads,
                plan.shared_bytes,
                arguments(logits, targets, nll, kl, grad, plan.width, kl_weight, label_smoothing),
            )
        return nll, kl, grad

    def _device(self, logits: Tensor) -> Device:
        index = logits.get_device()
        if index not in self._devices:
            try:
                self._devices[index] = Device(index)
            except KernelUnavailableError as error:
                self._devices[index] = str(error)
        device = self._devices[index]
        if isinstance(device, str):
            raise KernelUnavailableError(device)
        return device


def arguments(
    logits: Tensor,
    targets: Tensor | None,
    nll: Tensor,
    kl: Tensor,
    grad: Tensor | None,
    width: int,
    kl_weight: float,
    label_smoothing: float,
) -> tuple[Argument, ...]:
    """Arguments of each kernel of objective.cu; OBJECTIVE has their types."""
    image_stride, view_stride, _ = logits.stride()
    _, views, classes = logits.shape
    tensors = (logits, image_stride, view_stride, targets, nll, kl, grad)
    return (*tensors, views, classes, width, kl_weight, label_smoothing)


@cache
def launch_plan(views: int, classes: int, shared_limit: int) -> Plan | None:
    """A warp per view, and all classes that fit into shared memory; None if not even one fits.

    The whole image, if that lets four warps run on an SM: then nothing is computed twice. Otherwise
    chunks that are small enough for blocks with 16 warps in total on an SM, and for at least two
    blocks: one computes while others load. The second and third reads of the logits mostly hit the
    L2 cache.
    """
    warps = min(views, MOST_WARPS)
    all_blocks = shared_limit + RESERVED

    def widest(limit: int) -> int:
        no_column, one_column = (shared_bytes(views, width, warps) for width in (0, 1))
        return (limit - no_column) // (one_column - no_column)

    width = classes
    if warps * (all_blocks // (shared_bytes(views, width, warps) + RESERVED)) < SCHEDULERS:
        blocks = max(2, 4 * SCHEDULERS // warps)
        width = widest(all_blocks // blocks - RESERVED)
        if width < WARP:  # so many views that a block needs all shared memory
            width = widest(shared_limit)
        width = min(classes, width // WARP * WARP or width)
    if width < 1:
        return None
    return Plan(WARP * warps, width, shared_bytes(views, width, warps))


def shared_bytes(views: int, width: int, warps: int) -> int:
    """Size of `Layout` in objective.h: two tiles, 2 numbers per column, 5 per view and per warp."""
    return 4 * (2 * views * width + 2 * width + 5 * views + 5 * warps)


def _plan(device: Device, logits: Tensor) -> Plan:
    _, views, classes = logits.shape
    plan = launch_plan(views, classes, device.shared_limit)
    if plan is None:
        raise KernelUnavailableError(
            f"{views} views of an image do not fit into the {device.shared_limit} bytes of shared "
            "memory of a block; use reference"
        )
    return plan
