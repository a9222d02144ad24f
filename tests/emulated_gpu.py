"""A GPU that is not there: the CUDA kernel on CPU tensors, its compiled code run by the emulator.

All of CudaKernel is the product's: how it plans, what it allocates, the arguments it packs. In
place of the driver, `launch` runs the PTX that NVRTC makes, on exactly the memory of each tensor,
so that an access beyond one is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from emulator import emulator
from torch import Tensor

from fastaug.kernels.cuda import CudaKernel
from fastaug.kernels.cuda_driver import Argument, Device
from fastaug.kernels.nvrtc import compile_kernels, kernel_name

ARCHITECTURES = ("compute_80", "compute_90", "compute_100", "compute_120")
SHARED_LIMIT = 232448
"""Bytes a block may ask for on compute capability 9.0 and 10.0."""


@cache
def compiled(architecture: str, average: str, dtype: str) -> Any:
    return emulator().Module(compile_kernels(architecture, only=(average, dtype)).image)


class EmulatedDevice(Device):
    """options: the emulator's. Every launch fails on a race, and leaves its statistics behind."""

    def __init__(self, architecture: str, shared_limit: int = SHARED_LIMIT, **options: Any) -> None:
        self.architecture = architecture
        self.shared_limit = shared_limit
        self.options = {"approx_ulp": 1, "race_mode": "strict"} | options
        self.launches: list[Any] = []

    def load(self, average: str, dtype: str) -> Any:
        return compiled(self.architecture, average, dtype)

    def launch(
        self,
        kernel: tuple[str, str],
        blocks: int,
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
    ) -> None:
        statistics = self.load(*kernel).launch(
            kernel_name(*kernel),
            grid=(blocks,),
            block=(threads,),
            args=[pointer(a) if isinstance(a, Tensor) else a for a in arguments],
            shared_bytes=shared_bytes,
            shared_limit=self.shared_limit,
            **self.options,
        )
        assert statistics["global_races"] == []
        assert statistics["shared"]["uninit_reads"] == 0
        assert statistics["warnings"] == {}
        self.launches.append(statistics)


class EmulatedKernel(CudaKernel):
    """Takes CPU tensors to the device that it is given."""

    def __init__(self, architecture: str = "compute_80", **options: Any) -> None:
        super().__init__()
        self.device = EmulatedDevice(architecture, **options)

    def _device(self, logits: Tensor) -> Device:
        return self.device


def pointer(tensor: Tensor) -> Any:
    """The tensor's storage, with an offset to its first element."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return emulator().Ptr(storage, tensor.storage_offset() * tensor.element_size())
