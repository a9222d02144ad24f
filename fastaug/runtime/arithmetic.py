"""Arithmetic on a GPU: TF32 or fp32, deterministic or fastest algorithms. Process-wide in torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MATMUL: Any = torch.backends.cuda.matmul
_CUDNN: Any = torch.backends.cudnn


def set_arithmetic(device: torch.device, precision: str, *, deterministic: bool = False) -> None:
    """Call before the first operation on the device.

    torch computes fp32 convolutions in TF32 unless told otherwise, and matrix products too if
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE is set, as in NVIDIA's images. Here only --precision tf32 does.
    """
    if deterministic:
        # cuBLAS reads it when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Fills the result of each torch.empty, to find reads before writes.
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
        torch.use_deterministic_algorithms(True)
    if device.type != "cuda":
        return
    # Measured choices differ from run to run.
    _CUDNN.benchmark = not deterministic
    tf32 = precision == "tf32"
    # The older switches first, which Inductor still reads: it fails if they and the settings of
    # each operator disagree.
    _MATMUL.allow_tf32 = _CUDNN.allow_tf32 = tf32
    _MATMUL.fp32_precision = "tf32" if tf32 else "ieee"
    _CUDNN.conv.fp32_precision = _CUDNN.rnn.fp32_precision = "tf32" if tf32 else "ieee"


def arithmetic_in_force(device: torch.device, precision: str) -> str:
    """--precision as the device computes it: a CPU has no TF32."""
    return "fp32" if precision == "tf32" and device.type != "cuda" else precision


@contextmanager
def fp32_matmul() -> Iterator[None]:
    """Matrix products on a GPU in fp32, not TF32. Covers calls, not their backward passes."""
    before = _MATMUL.fp32_precision
    if before == "ieee":
        yield
        return
    _MATMUL.fp32_precision = "ieee"
    try:
        yield
    finally:
        _MATMUL.fp32_precision = before
