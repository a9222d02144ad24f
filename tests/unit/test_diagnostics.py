"""Checks of packages and machine: what they find, and what they advise."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastaug.diagnostics import machine, packages
from fastaug.diagnostics.fact import Fact

CPU = torch.device("cpu")


def test_a_missing_package_and_a_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fact = packages._package("no-such-package", "nowhere", "training needs it")
    assert fact == Fact("not installed", "pip install no-such-package: training needs it")
    assert packages._package("no-such-package", "nowhere").todo == ""
    monkeypatch.setitem(sys.modules, "timm", None)
    fact = packages._package("timm", "timm", "models need it")
    assert fact.value.startswith(importlib.metadata.version("timm") + ", cannot be imported: ")
    assert fact.failed
    assert "pip install --force-reinstall timm" in fact.todo


def test_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex", raising=False)

    def found(*files: str) -> Fact:
        for name in files:
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("raise SystemExit" if path.parent.name == "apex" else "")
        monkeypatch.setattr(sys, "path", list(sys.path))  # forget what was there before
        importlib.invalidate_caches()
        return packages._apex()

    if importlib.metadata.packages_distributions().get("apex") is None:
        assert found().value.startswith("not installed")
    fact = found("apex/__init__.py")  # not to be imported
    assert "pip uninstall apex" in fact.todo
    (tmp_path / "apex/optimizers").mkdir()
    fact = found("apex/optimizers/__init__.py")
    assert "CUDA extensions" in fact.todo
    (tmp_path / "apex/__init__.py").write_text("")
    (tmp_path / "apex-0.1.dist-info").mkdir()
    (tmp_path / "apex-0.1.dist-info/METADATA").write_text("Name: apex\nVersion: 0.1\n")
    assert found("amp_C.py") == Fact("0.1, NVIDIA's")
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]  # monkeypatch would bring it back for later tests


def test_dali_that_fails_or_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_batch(device: torch.device) -> None:
        if device.type == "cuda":
            raise RuntimeError("CUDA driver is too old\nStacktrace")

    def installed(*names: str) -> None:
        found = [SimpleNamespace(metadata={"Name": name}, version="9.9") for name in names]
        monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)

    monkeypatch.setattr(packages, "_make_batch", make_batch)
    installed("nvidia-dali-cuda120")
    fact = packages._dali([CPU, torch.device("cuda:0")])
    expected = "works on cpu; fails on cuda:0: RuntimeError: CUDA driver is too old"
    assert fact.value == f"9.9 (nvidia-dali-cuda120), {expected}"
    assert fact.failed
    installed("nvidia-dali-cuda120", "nvidia-dali-cuda130")
    fact = packages._dali([CPU])
    assert "nvidia-dali-cuda130" in fact.todo
    assert not fact.failed
    installed()
    monkeypatch.setattr(sys, "platform", "linux")
    fact = packages._dali([CPU])
    assert fact.todo.startswith("pip install nvidia-dali-cuda120")
    assert not fact.failed
    monkeypatch.setattr(sys, "platform", "darwin")
    assert packages._dali([CPU]).todo == ""


def test_each_gpu_is_a_row_and_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="Some GPU", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    checks = machine.machine_checks()
    for name in ("cuda:0", "cuda:1"):
        assert checks[name]() == Fact("Some GPU, 80.0 GiB, compute capability 9.0")
    assert "GPU" not in checks
    assert list(map(str, machine.list_devices())) == ["cpu", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("driver", "card", "cuda", "visible", "expected"),
    [
        (None, False, "13.0", None, ("none found", "", False)),
        (None, False, None, None, ("none found", "", False)),
        (None, True, "13.0", None, ("no driver", "install NVIDIA's driver", False)),
        ("535.1", True, None, None, ("built for CPU only", "pip install torch", False)),
        ("535.1", True, "13.0", "", ("hidden by CUDA_VISIBLE_DEVICES", "", False)),
        ("535.1", False, "13.0", None, ("RuntimeError: too old", "driver for CUDA 13.0", True)),
    ],
)
def test_without_a_gpu(
    driver: str | None,
    card: bool,
    cuda: str | None,
    visible: str | None,
    expected: tuple[str, str, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init() -> None:
        raise RuntimeError("too old")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(machine, "driver_version", lambda: driver)
    monkeypatch.setattr(machine, "_has_nvidia_card", lambda: card)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    fact = machine.machine_checks()["GPU"]()
    value, todo, failed = expected
    assert value in fact.value
    assert todo in fact.todo
    assert bool(fact.todo) is bool(todo)
    assert fact.failed is failed


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_driver_is_asked_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "nvidia-smi", "echo 580.65.06\necho 580.65.06")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine.driver_version() == "580.65.06"


def test_a_missing_compiler_and_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", "exit 3"))
    fact = machine._compiler()
    assert "exit code 3" in fact.value
    assert fact.failed
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    fact = machine._compiler()
    assert (fact.value, fact.failed) == ("none found", False)
    assert fact.todo.startswith("install g++ or clang++")


def test_the_cache_folder(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine._cache_folder() == Fact(f"{own_cache}, 0 B")
    assert not own_cache.exists()
    (own_cache / "kernels").mkdir(parents=True)
    (own_cache / "kernels/a").write_bytes(bytes(3 * 2**20))
    (own_cache / "kernels/a").chmod(0o755)
    assert machine._cache_folder().value == f"{own_cache}, 3 MiB"
    monkeypatch.setenv("FASTAUG_CACHE", str(own_cache / "kernels/a/b"))  # below a file
    fact = machine._cache_folder()
    assert fact.value.endswith("cannot be written")
    assert "FASTAUG_CACHE" in fact.todo


@pytest.mark.parametrize(
    ("cpuinfo", "value"),
    [
        (
            {"flags": "fpu avx avx2 fma f16c avx512f avx512_bf16 amx_bf16"},
            "AVX2, FMA, F16C, AVX-512, bf16; not AMX",
        ),
        ({"flags": "sse2"}, "none; not AVX2, FMA, F16C, AVX-512, bf16, AMX"),
        ({"Features": "fp asimd asimdhp sve bf16"}, "NEON, SVE, fp16, bf16"),
        ({}, "unknown: /proc/cpuinfo does not list them"),
    ],
)
def test_cpu_features(cpuinfo: dict, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cpuinfo", lambda: cpuinfo)
    assert machine._cpu_features() == Fact(value)


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(machine, "core_count", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    fact = machine._threads()
    assert fact.value.startswith("64; OMP_NUM_THREADS=64")
    assert fact.todo.startswith("set OMP_NUM_THREADS=2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert machine._threads().todo == ""
