"""C++ sources as libraries: compiled for this CPU on first use, kept in the cache."""

from __future__ import annotations

import ctypes
import logging
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

from fastaug.errors import KernelUnavailableError
from fastaug.runtime.device import cpp_compiler
from fastaug.toolchain.build import built, digest, headers_of, source_folder

log = logging.getLogger("fastaug")

FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-w"),
    *("-fno-math-errno", "-fno-trapping-math"),  # else comparisons do not become vector masks
)


def build_library(source: str, what: str, flags: tuple[str, ...] = FLAGS) -> Path:
    """The library of a source in cuda/, compiled if it is not in the cache. what: for the log."""
    compiler = cpp_compiler()
    if compiler is None:
        raise KernelUnavailableError("needs a C++ compiler: install g++ or clang++, or set CXX")
    file = source_folder() / source

    def compile_it(library: Path) -> None:
        log.info("compiling %s with %s (only once)", what, Path(compiler).name)
        _run(compiler, *flags, str(file), "-o", str(library))

    # The library depends on the compiler and the CPU, and home folders are often shared between
    # machines: both are part of its name.
    sources = [file, *(source_folder() / name for name in headers_of(source))]
    name = digest(sources, *flags, _run(compiler, "--version"), _cpu())
    return built(f"{file.stem}-{name}.so", compile_it)


def open_library(file: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise KernelUnavailableError(
            f"{file} cannot be loaded ({error}); delete it, and it is compiled again"
        ) from error


def why_not(load: Callable[[], object]) -> str | None:
    """None, or why a library cannot be loaded here."""
    try:
        load()
    except KernelUnavailableError as error:
        return str(error)
    return None


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailableError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise KernelUnavailableError(f"{command[0]} cannot compile it (g++ 12 can): {first}")
    return done.stdout


def _cpu() -> str:
    """The features of this CPU, as -march=native sees them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
