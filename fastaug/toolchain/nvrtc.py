"""NVRTC, NVIDIA's compiler library: from cuda/*.cu to machine code, without nvcc or a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fastaug.errors import KernelUnavailableError, first_line
from fastaug.toolchain.build import built, digest, headers_of, source_folder

log = logging.getLogger("fastaug")

CTYPES = {"f32": "float", "f16": "f16", "bf16": "bf16"}
"""Suffix of a kernel's name -> type in the sources."""


class Program(NamedTuple):
    """A source in cuda/ with kernels that all take the same arguments."""

    source: str
    kernels: dict[str, str]
    """Name of a kernel -> macro that defines it. One kernel compiles much faster than all."""
    arguments: tuple[Any, ...]
    """C types of the arguments; None is a ctypes.Structure by value."""
    options: tuple[str, ...] = ("--std=c++17",)
    carveout: int = -1
    """Percent of an SM's memory for shared memory rather than cache; -1: the driver decides."""

    def sources(self) -> tuple[Path, ...]:
        """The headers, then the source itself."""
        return tuple(source_folder() / name for name in (*headers_of(self.source), self.source))


class Compiled(NamedTuple):
    """Kernels for an architecture, sm_XY (machine code) or compute_XY (PTX, for any later GPU)."""

    image: bytes
    log: str


@cache
def nvrtc_version() -> str:
    return "{}.{}".format(*_checked(_nvrtc().nvrtcVersion()))


def architecture_for(capability: tuple[int, int], known: Iterable[int] | None = None) -> str:
    """sm_XY if NVRTC knows the GPU; otherwise PTX, which the driver compiles for newer GPUs."""
    wanted = 10 * capability[0] + capability[1]
    known = list(_checked(_nvrtc().nvrtcGetSupportedArchs())[0] if known is None else known)
    if wanted in known:
        return f"sm_{wanted}"
    older = [architecture for architecture in known if architecture < wanted]
    if not older:
        raise KernelUnavailableError(
            f"NVRTC {nvrtc_version()} compiles for compute capability {min(known) / 10} and up, "
            f"the GPU has {wanted / 10}"
        )
    return f"compute_{max(older)}"


def image_for(program: Program, kernel: str, architecture: str) -> bytes:
    """One kernel, compiled on first use."""

    def compile_it(file: Path) -> None:
        log.info("compiling %s for %s with NVRTC (only once)", kernel, architecture)
        file.write_bytes(compile_kernels(program, architecture, only=kernel).image)

    content = digest(program.sources(), *program.options)
    name = f"{kernel}-{architecture}-nvrtc{nvrtc_version()}-{content}"
    return built(name, compile_it).read_bytes()


def compile_kernels(
    program: Program, architecture: str, *, only: str | None = None, options: Iterable[str] = ()
) -> Compiled:
    """Compile all kernels of a program, or only one."""
    nvrtc = _nvrtc()
    *headers, source = (file.read_bytes() for file in program.sources())
    options = [f"--gpu-architecture={architecture}", *program.options, *options]
    if only:
        options.append(f"--define-macro=KERNELS={program.kernels[only]}")
    names, name = [file.encode() for file in headers_of(program.source)], program.source.encode()
    (handle,) = _checked(nvrtc.nvrtcCreateProgram(source, name, len(names), headers, names))
    try:
        arguments = [option.encode() for option in options]
        (result,) = nvrtc.nvrtcCompileProgram(handle, len(arguments), arguments)
        output = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, handle)
        messages = output.rstrip(b"\0").decode()
        if result:
            error = next((line for line in messages.splitlines() if "error" in line), result.name)
            raise KernelUnavailableError(f"NVRTC {nvrtc_version()} for {architecture}: {error}")
        if architecture.startswith("sm_"):
            image = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, handle)
        else:
            image = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, handle)
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    return Compiled(image, messages)


def _text(size: Any, get: Any, handle: Any) -> bytes:
    (length,) = _checked(size(handle))
    content = bytearray(length)
    _checked(get(handle, content))
    return bytes(content)


def checked(library: str, result: tuple) -> tuple:
    """Results of a function of NVIDIA's libraries; KernelUnavailableError for its error code."""
    error, *values = result
    if error:
        raise KernelUnavailableError(f"{library}: {error.name}")
    return tuple(values)


def _checked(result: tuple) -> tuple:
    return checked("NVRTC", result)


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc  # type: ignore[import-untyped]

        nvrtc.nvrtcVersion()  # raises if the library is not found
    except ImportError as error:
        raise KernelUnavailableError("needs cuda.bindings: pip install cuda-bindings") from error
    except RuntimeError as error:
        raise KernelUnavailableError(
            f"cannot load NVRTC, which comes with torch: {first_line(error)}"
        ) from error
    return nvrtc
