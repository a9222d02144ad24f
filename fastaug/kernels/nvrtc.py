"""NVRTC, NVIDIA's compiler as a library: objective.cu to machine code, without nvcc or a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fastaug.errors import KernelUnavailable
from fastaug.kernels.build import built, digest, source_folder

log = logging.getLogger("fastaug")

AVERAGES = ("losses", "probs", "logits", "none")
DTYPES = {"f32": "float", "f16": "f16", "bf16": "bf16"}
"""As kernels are named, and as objective.cu calls the type."""
HEADERS = ("values.h", "block.h", "objective.h")
OPTIONS = ("--std=c++17",)


class Program(NamedTuple):
    """Kernels for an architecture, sm_XY (machine code) or compute_XY (PTX, for any later GPU)."""

    image: bytes
    log: str


def kernel_name(average: str, dtype: str) -> str:
    return f"objective_{average}_{dtype}"


def kernel_sources() -> tuple[Path, ...]:
    return tuple(source_folder() / name for name in (*HEADERS, "objective.cu"))


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
        raise KernelUnavailable(
            f"NVRTC {nvrtc_version()} compiles for compute capability {min(known) / 10} and up, "
            f"the GPU has {wanted / 10}; use triton or reference"
        )
    return f"compute_{max(older)}"


def image_for(average: str, dtype: str, architecture: str) -> bytes:
    """One kernel, compiled when it is first asked for."""
    name = kernel_name(average, dtype)

    def compile_it(file: Path) -> None:
        log.info("compiling %s for %s with NVRTC, once", name, architecture)
        file.write_bytes(compile_kernels(architecture, only=(average, dtype)).image)

    content = digest(kernel_sources(), *OPTIONS)
    return built(f"{name}-{architecture}-nvrtc{nvrtc_version()}-{content}", compile_it).read_bytes()


def compile_kernels(
    architecture: str, *, only: tuple[str, str] | None = None, options: Iterable[str] = ()
) -> Program:
    """All kernels, or the one of an average and a dtype, which takes a tenth of the time."""
    nvrtc = _nvrtc()
    *headers, source = (file.read_bytes() for file in kernel_sources())
    options = [f"--gpu-architecture={architecture}", *OPTIONS, *options]
    if only:
        average, dtype = only
        macro = f"KERNEL({average},{average.upper()},{dtype},{DTYPES[dtype]})"
        options.append(f"--define-macro=KERNELS={macro}")
    names = [name.encode() for name in HEADERS]
    (program,) = _checked(
        nvrtc.nvrtcCreateProgram(source, b"objective.cu", len(names), headers, names)
    )
    try:
        arguments = [option.encode() for option in options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        said = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        messages = said.rstrip(b"\0").decode()
        if result:
            error = next((line for line in messages.splitlines() if "error" in line), result.name)
            raise KernelUnavailable(f"NVRTC {nvrtc_version()} for {architecture}: {error}")
        if architecture.startswith("sm_"):
            image = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        else:
            image = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Program(image, messages)


def _text(size: Any, get: Any, program: Any) -> bytes:
    (length,) = _checked(size(program))
    room = bytearray(length)
    _checked(get(program, room))
    return bytes(room)


def checked(library: str, result: tuple) -> tuple:
    """What a function of NVIDIA's libraries returned besides its error, which must be none."""
    error, *values = result
    if error:
        raise KernelUnavailable(f"{library}: {error.name}")
    return tuple(values)


def _checked(result: tuple) -> tuple:
    return checked("NVRTC", result)


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc  # type: ignore[import-untyped]

        nvrtc.nvrtcVersion()  # finds the library, or does not
    except ImportError as error:
        raise KernelUnavailable("needs cuda.bindings: pip install cuda-bindings") from error
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise KernelUnavailable(f"cannot load NVRTC, which comes with torch: {reason}") from error
    return nvrtc
