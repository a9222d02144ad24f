"""NVIDIA's driver: loads compiled kernels on a GPU and launches them on torch's stream."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from typing import Any

import torch
from torch import Tensor

from fastaug.errors import KernelUnavailableError, first_line
from fastaug.toolchain.nvrtc import Program, architecture_for, checked, image_for

OLDEST = (7, 5)
Argument = Tensor | Structure | int | float | None
"""A tensor is passed as the pointer to its first element, None as a null pointer."""


class Device:
    """A GPU in torch's primary context. Driver errors raise KernelUnavailableError."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._functions: dict[str, Any] = {}
        capability = torch.cuda.get_device_capability(index)
        if capability < OLDEST:
            needs, has = (".".join(map(str, version)) for version in (OLDEST, capability))
            raise KernelUnavailableError(
                f"needs compute capability {needs} or later, {torch.cuda.get_device_name(index)} "
                f"has {has}"
            )
        self.architecture = architecture_for(capability)
        self._driver = driver = _driver()
        (handle,) = _checked(driver.cuDeviceGet(index))
        (self._context,) = _checked(driver.cuDevicePrimaryCtxRetain(handle))
        attribute = driver.CUdevice_attribute
        limit = attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        (self.shared_limit,) = _checked(driver.cuDeviceGetAttribute(limit, handle))
        count = attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        (self.processors,) = _checked(driver.cuDeviceGetAttribute(count, handle))

    def load(self, program: Program, kernel: str) -> Any:
        """The handle of a kernel, which is compiled and loaded on first use."""
        if found := self._functions.get(kernel):
            return found
        image = image_for(program, kernel, self.architecture)
        driver, attribute = self._driver, self._driver.CUfunction_attribute
        with torch.cuda.device(self.index):
            _checked(driver.cuCtxSetCurrent(self._context))
            (module,) = _checked(driver.cuModuleLoadData(image))
            (function,) = _checked(driver.cuModuleGetFunction(module, kernel.encode()))
            # More than 48 KB of shared memory in a block must be requested.
            most = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(function, most, self.shared_limit))
            share = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            _checked(driver.cuFuncSetAttribute(function, share, program.carveout))
        self._functions[kernel] = function
        return function

    def launch(
        self,
        program: Program,
        kernel: str,
        blocks: int,
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
    ) -> None:
        """Launch on torch's current stream of this GPU, without waiting."""
        function = self.load(program, kernel)
        values = [a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments]
        with torch.cuda.device(self.index):
            # A thread that has not called the CUDA runtime has no context.
            _checked(self._driver.cuCtxSetCurrent(self._context))
            stream = torch.cuda.current_stream(self.index).cuda_stream
            _checked(
                self._driver.cuLaunchKernel(
                    *(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream),
                    *((tuple(values), program.arguments), 0),
                )
            )


def _driver() -> Any:
    try:
        from cuda.bindings import driver  # type: ignore[import-untyped]

        _checked(driver.cuInit(0))  # raises if the library is not found
    except ImportError as error:
        raise KernelUnavailableError("needs cuda.bindings: pip install cuda-bindings") from error
    except RuntimeError as error:
        raise KernelUnavailableError(f"cannot load NVIDIA's driver: {first_line(error)}") from error
    return driver


def _checked(result: tuple) -> tuple:
    return checked("CUDA driver", result)
