"""NVRTC, NVIDIA's compiler as a library: cuda/*.cu to machine code, without nvcc or a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fastaug.errors import KernelUnavailableError, first_line
from fastaug.toolchain.build import built, digest, source_folder

log = logging.getLogger("fastaug")

DTYPES = {"f32": "float", "f16": "f16", "bf16": "bf16"}
"""As kernels are named, and as their sources call the type."""


class Program(NamedTuple):
    """A source with kernels that all take the same arguments."""

    source: str
    headers: tuple[str, ...]
    """Files in cuda/, as the source is."""
    kernels: dict[str, str]
    """By name, the macro that makes one of them: alone, it compiles in a fraction of the time."""
    arguments: tuple[Any, ...]
    """Their C types; None is a ctypes.Structure, by value."""
    options: tuple[str, ...] = ("--std=c++17",)
    carveout: int = -1
    """Percent of an SM's memory that is to be shared memory rather than cache; -1: the driver's
    choice."""

    def sources(self) -> tuple[Path, ...]:
        return tuple(source_folder() / name for name in (*self.headers, self.source))


class Compiled(NamedTuple):
    """Kernels for an architecture, sm_XY (machine code) or compute_XY (PTX, for any later GPU)."""

    image: bytes
    log: str


@cache
def nvrtc_version() -> str:
    return "{}.{}".format(*_checked(_nvrtc().nvrtcVersion()))


def architecture_for(capability: tuple[int, int], known: Iterable[int] | None = None) -> str:
    """sm_XY where NVRTC knows the GPU; else PTX, which the driver compiles for a newer one."""
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
    """One kernel, compiled when it is first asked for."""

    def compile_it(file: Path) -> None:
        log.info("compiling %s for %s with NVRTC, once", kernel, architecture)
        file.write_bytes(compile_kernels(program, architecture, only=kernel).image)

    content = digest(program.sources(), *program.options)
    name = f"{kernel}-{architecture}-nvrtc{nvrtc_version()}-{content}"
    return built(name, compile_it).read_bytes()


def compile_kernels(
    program: Program, architecture: str, *, only: str | None = None, options: Iterable[str] = ()
) -> Compiled:
    """All kernels, or one of them."""
    nvrtc = _nvrtc()
    *headers, source = (file.read_bytes() for file in program.sources())
    options = [f"--gpu-architecture={architecture}", *program.options, *options]
    if only:
        options.append(f"--define-macro=KERNELS={program.kernels[only]}")
    names, name = [header.encode() for header in program.headers], program.source.encode()
    (handle,) = _checked(nvrtc.nvrtcCreateProgram(source, name, len(names), headers, names))
    try:
        arguments = [option.encode() for option in options]
        (result,) = nvrtc.nvrtcCompileProgram(handle, len(arguments), arguments)
        said = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, handle)
        messages = said.rstrip(b"\0").decode()
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
    room = bytearray(length)
    _checked(get(handle, room))
    return bytes(room)


def checked(library: str, result: tuple) -> tuple:
    """What a function of NVIDIA's libraries returned besides its error, which must be none."""
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

        nvrtc.nvrtcVersion()  # finds the library, or does not
    except ImportError as error:
        raise KernelUnavailableError("needs cuda.bindings: pip install cuda-bindings") from error
    except RuntimeError as error:
        raise KernelUnavailableError(
            f"cannot load NVRTC, which comes with torch: {first_line(error)}"
        ) from error
    return nvrtc
