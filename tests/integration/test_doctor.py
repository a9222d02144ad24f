"""python -m fastaug.doctor: what it says of kernels, packages and the machine; the exit code."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fastaug
from fastaug import cli, doctor
from fastaug.diagnostics import installed, machine
from fastaug.diagnostics.machine import Fact
from fastaug.kernels import native, registry
from fastaug.kernels.reference import ReferenceKernel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry and a wide terminal of the test's own."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))
    monkeypatch.setattr(registry, "_found", {})


@pytest.fixture
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the probes of packages and of the machine, which take seconds."""
    monkeypatch.setattr(installed, "versions", lambda devices: {})
    monkeypatch.setattr(machine, "hardware", dict)


def row(shown: str, name: str) -> str:
    """What the tables say in the row of this name, without the lines below its first one."""
    lines = (line.split("│") for line in shown.splitlines() if line.startswith(f"│ {name} "))
    return next(cells[2].strip() for cells in lines)


def found(probe: Iterator[Fact]) -> Fact:
    (fact,) = probe
    return fact


class Wrong(ReferenceKernel):
    """A gradient that is off by a hundredth."""

    name = "wrong"
    factor = 1.01

    def value_and_grad(self, *args: torch.Tensor, **flags: object) -> tuple:
        nll, kl, grad = super().value_and_grad(*args, **flags)  # type: ignore[arg-type]
        return nll, kl, None if grad is None else self.factor * grad


class Elsewhere(ReferenceKernel):
    name = "elsewhere"

    def supports(self, logits: torch.Tensor) -> str:
        return "needs another machine"


class FailsLarge(ReferenceKernel):
    """Passes the admission check, whose largest case has 16,000 logits."""

    name = "fails-large"

    def value_and_grad(self, logits: torch.Tensor, *args: object, **flags: object) -> tuple:
        if logits.numel() > 100_000:
            raise RuntimeError("out of [/room]")
        return super().value_and_grad(logits, *args, **flags)  # type: ignore[arg-type]


# --- the whole ---


def test_the_whole_report(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Every kernel is in it, and the file has what the tables show."""
    fastaug.register_kernel("elsewhere", Elsewhere())
    file = tmp_path / "doctor.json"
    code = cli.run(doctor.main, ["--device", "cpu", "--json", str(file)])
    captured = capsys.readouterr()
    assert captured.err == ""
    report = json.loads(file.read_text())
    assert code == any(item["failed"] for item in report["todo"])
    for title in ("versions", "machine"):
        for name, value in report[title].items():
            assert row(captured.out, name) == value
    known = fastaug.available_kernels()
    assert {line["kernel"]: line["why_not"] for line in report["kernels"]} == known
    kernels = captured.out.partition("loss kernels on cpu")[2]
    for line in report["kernels"]:
        shown = row(kernels, line["kernel"])
        if line["why_not"] is not None:
            assert shown == f"not available: {line['why_not']}"
            assert line["admitted"] is line["speed"] is line["milliseconds"] is None
        else:
            assert line["admitted"]
            assert line["cases"] > 20
            assert line["milliseconds"] > 0
            assert shown.startswith("admitted, ")
    logits = torch.empty(32, 8, 1000)
    assert report["auto"] == {"cpu": registry.find_kernel("auto", logits).name}
    speed = {line["kernel"]: line["speed"] for line in report["kernels"]}
    assert speed["reference"] == 1
    if known["native"] is None:
        assert "x the reference, " in row(kernels, "native")
    listed = [line for line in captured.out.splitlines() if re.match(r"\d+\. ", line)]
    assert len(listed) == len(report["todo"])
    assert ("nothing to do" in captured.out) is not bool(listed)


def test_versions_are_those_that_are_installed() -> None:
    probes = installed.versions([])
    del probes["DALI"]  # tried below
    facts = {
        fact.name: fact for name, probe in probes.items() for fact in machine.look(name, probe)
    }
    assert facts["Python"].value.startswith(sys.version.split()[0])
    for name in {*facts} - {"Python", "apex"}:
        fact = facts[name]
        assert not fact.failed, fact
        try:
            # torch.__version__ names its build, too
            expected = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            expected = "not installed"
        assert fact.value.startswith(expected)
    assert facts["torch"].value == f"{torch.__version__}, built for " + (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
    )
    assert {"torchvision", "timm", "numpy", "tyro", "tensorboard"} <= facts.keys()


# --- kernels ---


@pytest.mark.usefixtures("kernels_alone")
class TestKernels:
    def test_a_users_wrong_kernel_is_refused_and_no_failure(
        self, capsys: pytest.CaptureFixture
    ) -> None:
        fastaug.register_kernel("mine", Wrong())
        assert cli.run(doctor.main, ["--quick", "--device", "cpu"]) == 0
        shown = capsys.readouterr().out
        assert re.match(r"refused: the gradient .* the tolerance", row(shown, "mine"))
        assert "1. kernel mine on cpu is wrong: mend it" in shown
        assert "x the reference" not in shown

    @pytest.mark.usefixtures("own_cache")
    def test_a_wrong_kernel_of_ours_is_a_failure(
        self,
        capsys: pytest.CaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        def wrong(kernel: object, *args: torch.Tensor, **flags: object) -> tuple:
            return Wrong().value_and_grad(*args, **flags)

        monkeypatch.setattr(native.NativeKernel, "supports", lambda kernel, logits: None)
        monkeypatch.setattr(native.NativeKernel, "value_and_grad", wrong)
        fastaug.register_kernel("mine", Wrong())
        file = tmp_path / "found.json"
        flags = ["--quick", "--device", "cpu", "--json", str(file)]
        assert cli.run(doctor.main, flags) == 1
        shown = capsys.readouterr().out
        assert row(shown, "native").startswith("refused: the gradient")
        assert row(shown, "auto") == "reference"
        assert "1. problem: kernel native on cpu is wrong: use --kernel reference" in shown
        assert "2. kernel mine" in shown  # problems come first
        assert [item["failed"] for item in json.loads(file.read_text())["todo"]] == [True, False]

    @pytest.mark.usefixtures("own_cache")
    def test_what_is_remembered_of_a_kernel_is_not_asked(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernel = Wrong()
        fastaug.register_kernel("mine", kernel)
        with monkeypatch.context() as patch:
            patch.setattr(Wrong, "factor", 1)
            assert registry.check_admission(kernel, CPU).admitted
        assert registry.check_admission(kernel, CPU).admitted  # it is remembered
        assert doctor.check("mine", None, CPU).admitted is False

    def test_one_that_fails_when_it_is_timed(self, capsys: pytest.CaptureFixture) -> None:
        fastaug.register_kernel("fails-large", FailsLarge())
        assert cli.run(doctor.main, ["--device", "cpu"]) == 0
        shown = capsys.readouterr().out
        expected = "refused: B=32 K=8 C=1000: RuntimeError: out of [/room]"
        assert row(shown, "fails-large") == expected
        assert row(shown, "reference").startswith("admitted, ")

    def test_one_whose_check_raises_leaves_the_others(
        self, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fastaug.register_kernel("mine", Wrong())
        check_kernel = fastaug.check_kernel

        def raises(name: str, device: torch.device) -> object:
            if name == "mine":
                raise ValueError("no idea\nand a second line")
            return check_kernel(name, device)

        monkeypatch.setattr(fastaug, "check_kernel", raises)
        assert cli.run(doctor.main, ["--quick", "--device", "cpu"]) == 0
        shown = capsys.readouterr().out
        assert row(shown, "mine") == "refused: ValueError: no idea"
        assert row(shown, "reference") == "admitted"

    def test_what_a_kernel_says_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def raises(*args: object, **flags: object) -> tuple:
            raise RuntimeError("CUDA error: it is gone\nFor debugging consider")

        monkeypatch.setattr(Wrong, "value_and_grad", raises)
        fastaug.register_kernel("mine", Wrong())
        refused = doctor.describe(doctor.check("mine", None, CPU)).value
        assert refused.endswith("RuntimeError: CUDA error: it is gone")
        unavailable = doctor.check("mine", "needs more\nthan this", CPU)
        assert doctor.describe(unavailable).value == "not available: needs more"

    def test_kernels_that_cannot_be_listed(
        self, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def raises(logits: torch.Tensor) -> dict:
            raise OSError("gone")

        monkeypatch.setattr(fastaug, "available_kernels", raises)
        assert cli.run(doctor.main, ["--quick", "--device", "cpu"]) == 1
        shown = capsys.readouterr().out
        assert row(shown, "kernels") == "OSError: gone"
        assert "1. problem: the loss kernels on cpu cannot be tried: OSError: gone" in shown

    def test_a_kernel_of_ours_that_the_device_could_have(self) -> None:
        """Not on a CPU what needs a GPU; nor what the compiler's own line says."""
        reason = "cannot compile it: error"
        line = doctor.KernelLine("native", "cpu", ours=True, why_not=reason)
        expected = f"kernel native on cpu: {reason}" if machine.cpp_compiler() else ""
        assert doctor.describe(line).todo == expected
        needs_gpu = doctor.KernelLine("triton", "cpu", ours=True, why_not="needs a CUDA device")
        assert doctor.describe(needs_gpu).todo == ""
        missing = doctor.KernelLine("triton", "cuda:1", ours=True, why_not="pip install triton")
        assert doctor.describe(missing).todo == "kernel triton on cuda:1: pip install triton"
        assert not doctor.describe(missing).failed

    def test_speed_is_the_median_of_ratios_within_rounds(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The machine gets slower and slower; a kernel takes a quarter of the reference's time."""
        fastaug.register_kernel("mine", Elsewhere())
        drift = iter(range(1, 1000))
        now = {"reference": 0.0, "mine": 0.0}

        def seconds(call: object, device: torch.device) -> float:
            name = "mine" if isinstance(call.func.__self__, Elsewhere) else "reference"  # type: ignore[attr-defined]
            if name == "reference":
                now["reference"] = 4.0 * next(drift)
                now["mine"] = now["reference"] / 4
            return now[name]

        monkeypatch.setattr(doctor, "_seconds", seconds)
        lines = [
            doctor.KernelLine(name, "cpu", ours=False, admitted=True, cases=85, worst="none")
            for name in ("reference", "mine")
        ]
        timed = {line.kernel: line for line in doctor.time_kernels(lines, CPU)}
        assert timed["mine"].speed == 4
        assert doctor.describe(timed["mine"]).value.startswith("admitted, 4.0x the reference, ")


# --- probes ---


def test_a_probe_that_raises_is_a_line(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises() -> Iterator[Fact]:
        yield Fact("first", "found")
        raise RuntimeError("[/opt/dali] stopped\nat a second line")

    monkeypatch.setattr(installed, "versions", lambda devices: {"bad": raises})
    monkeypatch.setattr(machine, "hardware", lambda: {"CPU": lambda: iter([Fact("CPU", "one")])})
    assert cli.run(doctor.main, ["--quick", "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert row(captured.out, "first") == "found"
    assert row(captured.out, "bad") == "cannot be found out: RuntimeError: [/opt/dali] stopped"
    assert row(captured.out, "CPU") == "one"
    assert "Traceback" not in captured.out + captured.err


@pytest.mark.usefixtures("kernels_alone")
def test_a_failure_is_the_exit_code(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Fact("x", "1.0, cannot be imported", "pip install x", failed=True)
    absent = Fact("y", "not installed", "pip install y")
    for facts, code, said in (([absent], 0, "1. pip"), ([absent, broken], 1, "1. problem: pip")):
        probes = {"all": lambda facts=facts: iter(facts)}
        monkeypatch.setattr(machine, "hardware", lambda probes=probes: probes)
        assert cli.run(doctor.main, ["--quick", "--device", "cpu"]) == code
        assert said in capsys.readouterr().out


class TestPackages:
    def test_a_missing_one_is_to_be_installed(self) -> None:
        fact = found(installed._package("no-such-package", "nowhere", "training needs it"))
        assert (fact.value, fact.failed) == ("not installed", False)
        assert fact.todo == "pip install no-such-package: training needs it"
        assert found(installed._package("no-such-package", "nowhere")).todo == ""

    def test_a_broken_one_is_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "timm", None)
        fact = found(installed._package("timm", "timm", "models need it"))
        assert fact.value.startswith(importlib.metadata.version("timm") + ", cannot be imported: ")
        assert fact.failed
        assert "pip install --force-reinstall timm" in fact.todo

    def test_apex(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "apex", raising=False)
        if importlib.metadata.packages_distributions().get("apex") is None:
            assert found(installed._apex()).value.startswith("not installed")
        (tmp_path / "apex").mkdir()
        (tmp_path / "apex/__init__.py").write_text("raise SystemExit")  # it is not to be imported
        monkeypatch.setattr(sys, "path", list(sys.path))  # forget what was there before
        importlib.invalidate_caches()
        fact = found(installed._apex())
        assert fact.value == "the unrelated package of PyPI"
        assert "pip uninstall apex" in fact.todo
        (tmp_path / "apex/optimizers").mkdir()
        importlib.invalidate_caches()
        assert found(installed._apex()).value.startswith("NVIDIA's, without its CUDA extensions")
        (tmp_path / "apex/__init__.py").write_text("")
        (tmp_path / "apex/optimizers/__init__.py").write_text("")
        (tmp_path / "amp_C.py").write_text("")
        (tmp_path / "apex-0.1.dist-info").mkdir()
        (tmp_path / "apex-0.1.dist-info/METADATA").write_text("Name: apex\nVersion: 0.1\n")
        importlib.invalidate_caches()
        fact = found(installed._apex())
        assert (fact.value, fact.todo) == ("0.1, NVIDIA's", "")
        for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
            monkeypatch.delitem(sys.modules, name)


class TestDali:
    def test_it_makes_a_batch_here(self) -> None:
        pytest.importorskip("nvidia.dali")
        fact = found(installed._dali([CPU]))
        assert re.fullmatch(r"\S+ \(nvidia-dali-\S+\), works on cpu", fact.value)
        assert (fact.todo, fact.failed) == ("", False)

    def test_where_it_fails_it_is_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def make_batch(device: torch.device) -> None:
            if device.type == "cuda":
                raise RuntimeError("CUDA driver is too old\nStacktrace")

        dali = SimpleNamespace(metadata={"Name": "nvidia-dali-cuda120"}, version="9.9")
        monkeypatch.setattr(importlib.metadata, "distributions", lambda: [dali])
        monkeypatch.setattr(installed, "_make_batch", make_batch)
        fact = found(installed._dali([CPU, torch.device("cuda:0")]))
        expected = "works on cpu; fails on cuda:0: RuntimeError: CUDA driver is too old"
        assert fact.value == f"9.9 (nvidia-dali-cuda120), {expected}"
        assert fact.failed

    def test_without_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.metadata, "distributions", list)
        monkeypatch.setattr(sys, "platform", "linux")
        fact = found(installed._dali([CPU]))
        assert fact.todo.startswith("pip install nvidia-dali-cuda120")
        assert not fact.failed
        monkeypatch.setattr(sys, "platform", "darwin")
        assert found(installed._dali([CPU])).todo == ""


class TestGpu:
    @pytest.fixture
    def gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        properties = SimpleNamespace(name="Some GPU", total_memory=80 * 2**30, major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    @pytest.mark.usefixtures("gpus")
    def test_each_is_a_line_and_a_device(self) -> None:
        value = "Some GPU, 80.0 GiB, compute capability 9.0"
        assert list(machine._gpus()) == [Fact("cuda:0", value), Fact("cuda:1", value)]
        assert list(map(str, doctor.find_devices("all"))) == ["cpu", "cuda:0", "cuda:1"]
        assert list(map(str, doctor.find_devices("cuda:1"))) == ["cuda:1"]
        assert list(map(str, doctor.find_devices("cpu"))) == ["cpu"]

    @pytest.mark.parametrize(
        ("driver", "card", "cuda", "visible", "value", "todo", "failed"),
        [
            (None, False, "13.0", None, "none found", "", False),
            (None, False, None, None, "none found", "", False),
            (None, True, "13.0", None, "no driver for it", "install NVIDIA's driver", False),
            ("535.1", True, None, None, "for the CPU alone", "pip install torch", False),
            ("535.1", True, "13.0", "", "hidden by CUDA_VISIBLE_DEVICES", "", False),
            ("535.1", False, "13.0", None, "RuntimeError: too old", "driver for CUDA 13.0", True),
        ],
    )
    def test_without_one(
        self,
        driver: str | None,
        card: bool,
        cuda: str | None,
        visible: str | None,
        value: str,
        todo: str,
        failed: bool,
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
        fact = found(machine._gpus())
        assert value in fact.value
        assert todo in fact.todo
        assert bool(fact.todo) is bool(todo)
        assert fact.failed is failed

    def test_the_driver_is_asked_of_nvidia_smi(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        smi = tmp_path / "nvidia-smi"
        smi.write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert machine.driver_version() == "580.65.06"


class TestMachine:
    def test_without_a_compiler_it_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
        fact = found(machine._compiler())
        assert (fact.value, fact.failed) == ("none found", False)
        assert fact.todo.startswith("install g++ or clang++: the native kernel")

    def test_a_compiler_that_does_not_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "cxx").write_text("#!/bin/sh\nexit 3\n")
        (tmp_path / "cxx").chmod(0o755)
        monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
        fact = found(machine._compiler())
        assert "exit code 3" in fact.value
        assert fact.failed

    def test_the_cache_folder(self, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert found(machine._cache_folder()) == Fact("cache folder", f"{own_cache}, 0 B")
        assert not own_cache.exists()
        (own_cache / "kernels").mkdir(parents=True)
        (own_cache / "kernels/a").write_bytes(bytes(3 * 2**20))
        (own_cache / "kernels/a").chmod(0o755)
        assert found(machine._cache_folder()).value == f"{own_cache}, 3 MiB"
        monkeypatch.setenv("FASTAUG_CACHE", str(own_cache / "kernels/a/b"))  # below a file
        fact = found(machine._cache_folder())
        assert fact.value.endswith("cannot be written")
        assert "FASTAUG_CACHE" in fact.todo

    @pytest.mark.parametrize(
        ("cpuinfo", "value"),
        [
            (
                {"flags": "fpu avx avx2 fma f16c avx512f avx512_bf16 amx_bf16"},
                "AVX2, FMA, F16C, AVX-512, bf16; not AMX",
            ),
            ({"flags": "sse2"}, "none of those; not AVX2, FMA, F16C, AVX-512, bf16, AMX"),
            ({"Features": "fp asimd asimdhp sve bf16"}, "NEON, SVE, fp16, bf16"),
            ({}, "unknown: the system does not say"),
        ],
    )
    def test_cpu_features(self, cpuinfo: dict, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "_cpuinfo", lambda: cpuinfo)
        assert found(machine._cpu_features()).value == value

    def test_threads_beyond_the_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
        monkeypatch.setattr(machine, "core_count", lambda: 2)
        monkeypatch.setenv("OMP_NUM_THREADS", "64")
        fact = found(machine._threads())
        assert fact.value.startswith("64; OMP_NUM_THREADS=64")
        assert fact.todo.startswith("set OMP_NUM_THREADS=2")
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        assert found(machine._threads()).todo == ""


# --- the command ---


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--json", "{}"], "must be a file in a folder that is there"),
        (["--json", "{}/no/such.json"], "must be a file in a folder that is there"),
        (["--device", "tpu"], "--device must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_mistakes_end_with_one_line(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert cli.run(doctor.main, [flag.format(tmp_path) for flag in flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert captured.out == ""
