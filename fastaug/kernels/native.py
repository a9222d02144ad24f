"""The native kernel: cuda/objective.cpp, prebuilt or compiled for this CPU on first use."""

from __future__ import annotations

import ctypes
import os
import struct
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fastaug.kernels.config import Average
from fastaug.kernels.contract import (
    average_code,
    compiled_averages,
    why_wrong_dtype,
    wrong_target,
)
from fastaug.toolchain.build import DTYPES
from fastaug.toolchain.cpp import find_library, open_library, why_not

_CPU = torch.device("cpu")
_DTYPES = {dtype: code for code, dtype in enumerate(DTYPES)}
# `Arguments` of objective.cpp
_pack = struct.Struct("@iiPqqPqiiffPPPPiiP").pack
_IMPORTED_IN = os.getpid()
_NO_MEMORY = -2
# Logits per thread, about 15 us of work: with less, waking the thread takes longer.
_PER_THREAD = 16384


class NativeKernel:
    """Divides the images among torch's threads."""

    name = "native"
    soft_targets = True

    def supports(self, logits: Tensor) -> str | None:
        if logits.device.type != "cpu":
            return f"runs only on the CPU, but the logits are on {logits.device}"
        return why_wrong_dtype(logits) or _why_not()

    @property
    def averages(self) -> tuple[Average, ...]:
        return compiled_averages()

    def sources(self) -> tuple[Path, ...]:
        # Also the library: it differs between CPUs and compilers.
        return Path(__file__), _find()

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
        _, *found = _run_on(logits, targets, average, kl_weight, label_smoothing, need_grad, False)
        return tuple(found)  # type: ignore[return-value]

    def mean_and_grad(
        self,
        logits: Tensor,
        targets: Tensor | None,
        average: Average | None,
        kl_weight: float,
        label_smoothing: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _run_on(logits, targets, average, kl_weight, label_smoothing, True, True)  # type: ignore[return-value]


def _run_on(
    logits: Tensor,
    targets: Tensor | None,
    average: Average | None,
    kl_weight: float,
    label_smoothing: float,
    need_grad: bool,
    need_mean: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """mean, nll, kl, grad. One function, because each Python call counts in a small batch."""
    given, soft = logits.dtype, targets is not None and targets.ndim == 2
    if soft:  # compiled only for fp32
        logits = logits.detach().float()
    images, views, classes = logits.shape
    image_stride, view_stride, class_stride = logits.stride()
    if class_stride != 1:
        logits = logits.contiguous()
        image_stride, view_stride, _ = logits.stride()
    # Explicit, because users may change torch's default dtype and device.
    nll = torch.empty(images, dtype=torch.float32, device=_CPU)
    kl = torch.empty(images, dtype=torch.float32, device=_CPU)
    mean = torch.empty((), dtype=torch.float32, device=_CPU) if need_mean else None
    grad = None
    if need_grad:  # empty_like is faster than new_empty, and keeps the order of strides
        dense = logits.is_contiguous()
        grad = torch.empty_like(logits) if dense else logits.new_empty(logits.shape)
    if targets is not None:
        targets = (targets.float() if soft else targets).contiguous()
    library, openmp = _library()
    wrong = library(
        _pack(
            _DTYPES[logits.dtype],
            average_code(average),
            logits.data_ptr(),
            image_stride,
            view_stride,
            0 if targets is None else targets.data_ptr(),
            images,
            views,
            classes,
            kl_weight,
            label_smoothing,
            nll.data_ptr(),
            kl.data_ptr(),
            0 if mean is None else mean.data_ptr(),
            0 if grad is None else grad.data_ptr(),
            min(torch.get_num_threads(), images, 1 + images * views * classes // _PER_THREAD),
            soft,
            openmp,
        )
    )
    if wrong == _NO_MEMORY:
        raise MemoryError("cannot allocate memory for the loss")
    if wrong >= 0:
        assert targets is not None
        raise wrong_target(wrong, int(targets[wrong]), classes)
    if soft and grad is not None:
        grad = grad.to(given)
    return mean, nll, kl, grad


@cache
def _why_not() -> str | None:
    return why_not(_library)


@cache
def _library() -> tuple[ctypes._NamedFuncPointer, int]:
    """The compiled function, and OpenMP's entry point for it."""
    return _open(_find()), _openmp()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_library.cache_clear)


def _find() -> Path:
    return find_library("objective.cpp", "the native loss kernel")


def _open(file: Path) -> ctypes._NamedFuncPointer:
    function = open_library(file).fastaug_objective
    function.restype = ctypes.c_longlong
    function.argtypes = [ctypes.c_char_p]
    return function


def _openmp() -> int:
    """The OpenMP entry point of torch's threads: other threads would compete for the cores.

    Compilers call it for `#pragma omp parallel`; libgomp has it, as do Intel's and LLVM's
    libraries. Where torch has none of them (0), the kernel starts its own threads. So it does in a
    forked process: OpenMP would wait forever for threads that only the parent has.
    """
    if os.getpid() != _IMPORTED_IN:
        return 0
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0
