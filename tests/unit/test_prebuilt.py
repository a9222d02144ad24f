"""Which prebuilt library a CPU gets, and what happens without one."""

from __future__ import annotations

import logging
import platform
import sys
from pathlib import Path

import pytest
from expect import raises

from fastaug.diagnostics import machine
from fastaug.errors import KernelUnavailableError
from fastaug.kernels.native import NativeKernel
from fastaug.toolchain import cpp, prebuilt

# Lines of /proc/cpuinfo, shortened to what is of interest here.
CORE_2 = "fpu sse sse2 ht lm pni ssse3 cx16 lahf_lm"
NEHALEM = f"{CORE_2} sse4_1 sse4_2 popcnt"
IVY_BRIDGE = f"{NEHALEM} avx f16c xsave rdrand"
HASWELL = f"{IVY_BRIDGE} fma avx2 bmi1 bmi2 abm movbe"
SKYLAKE_X = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ZEN_4 = f"{SKYLAKE_X} avx512vbmi avx512_bf16"
KNIGHTS_LANDING = f"{HASWELL} avx512f avx512cd avx512er avx512pf"
GRACE = "fp asimd evtstrm aes atomics fphp asimdhp sve bf16"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation with a library for each level, which are text files."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    for source in ("objective", "views"):
        for level in ("x86-64-v4-vbmi", "x86-64-v4", "x86-64-v3", "x86-64-v2", "armv8-a"):
            (folder / f"{source}-{level}.so").write_text(level)
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("FASTAUG_NATIVE", raising=False)
    return folder


def use_cpu(monkeypatch: pytest.MonkeyPatch, kind: str, features: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: kind)
    monkeypatch.setattr(prebuilt, "cpu_features", lambda: features)


@pytest.mark.parametrize(
    ("kind", "features", "level"),
    [
        ("x86_64", NEHALEM, "x86-64-v2"),
        ("x86_64", IVY_BRIDGE, "x86-64-v2"),
        ("x86_64", HASWELL, "x86-64-v3"),
        ("x86_64", KNIGHTS_LANDING, "x86-64-v3"),
        ("x86_64", SKYLAKE_X, "x86-64-v4"),
        ("x86_64", ZEN_4, "x86-64-v4-vbmi"),
        ("aarch64", GRACE, "armv8-a"),
    ],
)
def test_the_fastest_one_that_the_cpu_runs(
    installed: Path, monkeypatch: pytest.MonkeyPatch, kind: str, features: str, level: str
) -> None:
    use_cpu(monkeypatch, kind, features)
    for source in ("objective", "views"):
        assert cpp.find_library(f"{source}.cpp", "it") == installed / f"{source}-{level}.so"
    assert machine._cpu_kernels().value == f"prebuilt for {level}"


@pytest.mark.parametrize(
    ("kind", "features"), [("x86_64", CORE_2), ("x86_64", ""), ("riscv64", "rv64imafdc")]
)
def test_other_cpus_need_a_compiler(
    installed: Path, monkeypatch: pytest.MonkeyPatch, kind: str, features: str
) -> None:
    use_cpu(monkeypatch, kind, features)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with raises(KernelUnavailableError, "compiler CPU g++"):
        cpp.find_library("objective.cpp", "it")
    assert "not for this CPU" in machine._cpu_kernels().value
    assert machine._compiler().todo


def test_windows_and_macos_do_not_load_them(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(monkeypatch, "x86_64", ZEN_4)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert prebuilt.find_library("objective.cpp") is None


def test_the_variable_asks_for_this_cpu(
    installed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_cpu(monkeypatch, "x86_64", ZEN_4)
    for value, native in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("FASTAUG_NATIVE", value)
        assert (prebuilt.find_library("views.cpp") is None) == native
    monkeypatch.setenv("FASTAUG_NATIVE", "1")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with raises(KernelUnavailableError, "FASTAUG_NATIVE"):
        cpp.find_library("views.cpp", "it")


def test_without_a_compiler_nothing_is_missing(
    installed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_cpu(monkeypatch, "x86_64", HASWELL)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.INFO, "fastaug"):
        cpp.find_library("views.cpp", "it")
    assert caplog.messages == []
    assert machine._compiler().todo == ""


def test_a_source_tree_has_none() -> None:
    assert not prebuilt.is_installed()
    assert not prebuilt.is_used()


def test_a_library_that_cannot_be_loaded(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with an older glibc: the advice is not to delete a file of the installation."""
    file = installed / "objective-x86-64-v3.so"
    with raises(KernelUnavailableError, f"{file} FASTAUG_NATIVE=1"):
        cpp.open_library(file)


def test_the_library_decides_the_admission(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its report is stored for this file: another level is checked again."""
    use_cpu(monkeypatch, "x86_64", HASWELL)
    assert installed / "objective-x86-64-v3.so" in NativeKernel().sources()
