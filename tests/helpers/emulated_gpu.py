"""A GPU that is not there: CUDA kernels on CPU tensors, their compiled code run by the emulator.

All of CudaKernel and CudaViews is the product's: how they plan, what they allocate, the arguments
they pack. In place of the driver, `launch` runs the PTX that NVRTC makes, on exactly the memory of
each tensor, so that an access beyond one is an error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from ctypes import Structure
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from emulator import emulator
from torch import Tensor

from fastaug.kernels.cuda import CudaKernel
from fastaug.toolchain.cuda_driver import Argument, Device
from fastaug.toolchain.nvrtc import Program, compile_kernels
from fastaug.views.cuda import CudaViews
from fastaug.views.packed_plan import Pictures
from fastaug.views.plan import ViewPlans
from fastaug.views.render_spec import RenderSpec

ARCHITECTURES = ("compute_80", "compute_90", "compute_100", "compute_120")
SHARED_LIMIT = 232448
"""Bytes a block may ask for on compute capability 9.0 and 10.0."""


_compiled: dict[tuple[str, str], Any] = {}
IMAGES = 1000
"""The first of the emulator's windows of memory that images are put into."""


def compiled(architecture: str, program: Program, kernel: str) -> Any:
    if (architecture, kernel) not in _compiled:
        image = compile_kernels(program, architecture, only=kernel).image
        _compiled[architecture, kernel] = emulator().Module(image)
    return _compiled[architecture, kernel]


class EmulatedDevice(Device):
    """options: the emulator's. Every launch fails on a race, and leaves its statistics behind."""

    def __init__(
        self,
        architecture: str,
        shared_limit: int = SHARED_LIMIT,
        processors: int = 132,
        **options: Any,
    ) -> None:
        self.architecture = architecture
        self.shared_limit = shared_limit
        self.processors = processors
        self.options = {"approx_ulp": 1, "race_mode": "strict"} | options
        self.launches: list[Any] = []
        self.kernels: list[str] = []
        """Names of the launched kernels."""
        self.pictures: Pictures | None = None
        """Images that kernels find through pointers in memory."""

    def load(self, program: Program, kernel: str) -> Any:
        return compiled(self.architecture, program, kernel)

    def launch(
        self,
        program: Program,
        kernel: str,
        blocks: int,
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
    ) -> None:
        module = self.load(program, kernel)
        show_images(module, self.pictures)
        statistics = module.launch(
            kernel,
            grid=(blocks,),
            block=(threads,),
            args=[_as_emulated(argument) for argument in arguments],
            shared_bytes=shared_bytes,
            shared_limit=self.shared_limit,
            **self.options,
        )
        assert statistics["global_races"] == []
        assert statistics["shared"]["uninit_reads"] == 0
        assert statistics["warnings"] == {}
        self.launches.append(statistics)
        self.kernels.append(kernel)


class EmulatedKernel(CudaKernel):
    """Takes CPU tensors to the device that it is given."""

    def __init__(self, architecture: str = "compute_80", **options: Any) -> None:
        super().__init__()
        self.device = EmulatedDevice(architecture, **options)

    def _device(self, logits: Tensor) -> Device:
        return self.device


class EmulatedViews(CudaViews):
    """Takes images in the memory of the CPU; there are no streams."""

    def __init__(self, architecture: str = "compute_80", **options: Any) -> None:
        super().__init__(torch.device("cpu"))
        self.gpu = EmulatedDevice(architecture, **options)

    def start(self, pictures: Pictures, plans: ViewPlans, spec: RenderSpec, **more: Any) -> Any:
        self.gpu.pictures = pictures
        started = super().start(shown(pictures), plans, spec, **more)
        started._done = None
        return started

    _gpu = property(lambda self: self.gpu)  # type: ignore[assignment]
    _side = SimpleNamespace(keep=lambda owner: None, release=lambda: None)  # type: ignore[assignment]

    def _on_own_stream(self, wait: bool) -> Any:
        return nullcontext()

    def _uploaded(self, content: np.ndarray) -> Tensor:
        return torch.from_numpy(content)


def show_images(module: Any, pictures: Pictures | None) -> None:
    """Puts each image into a window of its own, which ends where the image does."""
    windows = module.mbufs
    for window in [window for window in windows if window >= IMAGES]:
        del windows[window]
    if pictures is None:
        return
    for number, (address, row, (height, width)) in enumerate(zip(*pictures, strict=True)):
        length = int((height - 1) * row + 3 * width)
        content = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(int(address)))
        base = emulator().slot_base(IMAGES + number)
        windows[IMAGES + number] = emulator().Buffer(content, base, f"image {number}")


def shown(pictures: Pictures) -> Pictures:
    """As the emulator's code finds them."""
    bases = [emulator().slot_base(IMAGES + number) for number in range(len(pictures.pointers))]
    return pictures._replace(pointers=np.array(bases, np.uint64))


def _as_emulated(argument: Argument) -> Any:
    if isinstance(argument, Tensor):
        return pointer(argument)
    return bytes(argument) if isinstance(argument, Structure) else argument


def pointer(tensor: Tensor) -> Any:
    """The tensor's storage, with an offset to its first element."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return emulator().Ptr(storage, tensor.storage_offset() * tensor.element_size())
