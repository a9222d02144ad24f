"""Prebuilt libraries for CPUs: how setup.py compiles them, and which of them this CPU runs.

Standard library only: setup.py executes this file where neither torch nor fastaug is installed.
"""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-w"),
    *("-fno-math-errno", "-fno-trapping-math"),  # else comparisons do not become vector masks
)
SOURCES: dict[str, tuple[str, ...]] = {
    "objective.cpp": (),
    # No fused multiply-add: each product and sum is rounded, as in Pillow.
    "views.cpp": ("-ffp-contract=off",),
}
"""Sources in cuda/ of the CPU libraries -> their own compiler flags."""
_WRAPPED = (
    *("pthread_create", "pthread_join", "pthread_detach", "pthread_once"),
    "__pthread_key_create",
)
_PORTABLE = (
    *("-static-libstdc++", "-static-libgcc", "-ffunction-sections", "-fdata-sections", "-s"),
    *("-Wl,--gc-sections", "-Wl,--exclude-libs,ALL"),
    *(f"-Wl,--wrap={name}" for name in _WRAPPED),  # by old_glibc.cpp
    *("-Wl,--no-as-needed", "-l:libpthread.so.0"),  # before glibc 2.34 it has these functions
)
"""Flags of a library that runs on other machines than the one that compiles it."""


class Level(NamedTuple):
    """A set of instructions that libraries are compiled for."""

    name: str
    features: frozenset[str]
    """What it needs, as /proc/cpuinfo calls it."""
    flags: tuple[str, ...]


_V2 = frozenset(("cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"))
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS: dict[str, tuple[Level, ...]] = {
    "x86_64": (
        # Tables of 256 entries in registers: a fifth of the time of RandAugment's views.
        Level("x86-64-v4-vbmi", _V4 | {"avx512vbmi"}, ("-march=x86-64-v4", "-mavx512vbmi")),
        Level("x86-64-v4", _V4, ("-march=x86-64-v4",)),
        Level("x86-64-v3", _V3, ("-march=x86-64-v3",)),
        Level("x86-64-v2", _V2, ("-march=x86-64-v2",)),
    ),
    "aarch64": (Level("armv8-a", frozenset(("fp", "asimd")), ("-march=armv8-a",)),),
}
"""Machine, as platform.machine() calls it on Linux -> levels, fastest first."""

FOLDER = Path(__file__).parents[1] / "prebuilt"
"""In an installed wheel; a source tree and an editable installation do not have it."""
NATIVE_VARIABLE = "FASTAUG_NATIVE"


def library_name(source: str, level: Level) -> str:
    return f"{Path(source).stem}-{level.name}.so"


def compile_command(
    compiler: str, sources: Path, source: str, level: Level, folder: Path
) -> list[str]:
    """The command that compiles a source of the folder `sources` into a library in `folder`."""
    return [
        *(compiler, *FLAGS, *SOURCES[source], *level.flags),
        *(str(sources / name) for name in (source, "old_glibc.cpp")),
        *(*_PORTABLE, "-o", str(folder / library_name(source, level))),
    ]


def is_installed() -> bool:
    """True if this installation has prebuilt libraries."""
    return FOLDER.is_dir()


def compiles_for_this_cpu() -> bool:
    """FASTAUG_NATIVE=1: the user wants libraries that are compiled for this CPU."""
    return os.environ.get(NATIVE_VARIABLE, "") not in ("", "0")


def is_used() -> bool:
    """True if the kernels of this CPU are prebuilt ones."""
    return all(find_library(source) for source in SOURCES)


def find_library(source: str) -> Path | None:
    """The prebuilt library of a source for this CPU; None if it has to be compiled."""
    level = None if compiles_for_this_cpu() else level_of_this_cpu()
    file = FOLDER / library_name(source, level) if level else None
    return file if file and file.is_file() else None


def level_of_this_cpu() -> Level | None:
    levels = LEVELS.get(platform.machine(), ()) if sys.platform == "linux" else ()
    features = set(cpu_features().split())
    return next((level for level in levels if level.features <= features), None)


@cache
def cpu_features() -> str:
    """The features of this CPU that the system supports, as in /proc/cpuinfo; may be empty."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    found = (line for line in lines if line.startswith(("flags", "Features")))
    return next(found, "").partition(":")[2].strip()
