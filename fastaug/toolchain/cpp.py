"""C++ sources as libraries: prebuilt in a wheel, or compiled for this CPU on first use."""

from __future__ import annotations

import ctypes
import logging
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

from fastaug.errors import KernelUnavailableError
from fastaug.runtime.device import cpp_compiler
from fastaug.toolchain import prebuilt
from fastaug.toolchain.build import built, digest, headers_of, source_folder

log = logging.getLogger("fastaug")

FLAGS = (*prebuilt.FLAGS, "-march=native")
"""Flags of all libraries that are compiled here."""


def find_library(source: str, what: str) -> Path:
    """The library of a source in cuda/. what: for the log.

    The prebuilt one, unless FASTAUG_NATIVE is set: it starts at once. Without one, compiled.
    """
    return prebuilt.find_library(source) or _build_library(source, what)


def _build_library(source: str, what: str) -> Path:
    """The library, compiled for this CPU if it is not in the cache."""
    compiler, flags = cpp_compiler(), (*FLAGS, *prebuilt.SOURCES[source])
    if compiler is None:
        raise KernelUnavailableError(
            f"needs a C++ compiler{_why_not_prebuilt()}: install g++ or clang++, or set CXX"
        )
    file = source_folder() / source

    def compile_it(library: Path) -> None:
        log.info("compiling %s with %s (only once)", what, Path(compiler).name)
        _run(compiler, *flags, str(file), "-o", str(library))

    # The library depends on the compiler and the CPU, and home folders are often shared between
    # machines: both are part of its name.
    sources = [file, *(source_folder() / name for name in headers_of(source))]
    name = digest(sources, *flags, _run(compiler, "--version"), _cpu())
    return built(f"{file.stem}-{name}.so", compile_it)


def _why_not_prebuilt() -> str:
    if prebuilt.compiles_for_this_cpu():
        return f" because {prebuilt.NATIVE_VARIABLE} is set"
    if prebuilt.is_installed():
        return " because this CPU is not one of those with a prebuilt kernel"
    return ""


def open_library(file: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        todo = "delete it, and it is compiled again"
        if file.parent == prebuilt.FOLDER:
            todo = f"set {prebuilt.NATIVE_VARIABLE}=1, and it is compiled here"
        raise KernelUnavailableError(f"{file} cannot be loaded ({error}); {todo}") from error


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
    return prebuilt.cpu_features() or platform.processor()
