"""python -m fastaug.doctor: its tables, its advice and its exit code."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch

import fastaug
from fastaug import cli, doctor
from fastaug.diagnostics import kernels, machine, packages
from fastaug.diagnostics.fact import Fact
from fastaug.diagnostics.kernels import KernelResult
from fastaug.kernels import native, registry
from fastaug.kernels.reference import ReferenceKernel
from fastaug.toolchain.admission import AdmissionReport
from fastaug.views import native as native_views

CPU = torch.device("cpu")
Run = Callable[..., str]


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of the test's own and a wide terminal."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))
    monkeypatch.setattr(registry, "_found", {})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Run:
    """The command without the checks of packages and machine, which take seconds: its output."""
    monkeypatch.setattr(packages, "package_checks", lambda devices: {})
    monkeypatch.setattr(machine, "machine_checks", dict)

    def run_doctor(*flags: str, code: int = 0) -> str:
        assert cli.run(doctor.main, ["--device", "cpu", *flags]) == code
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run_doctor


def row(shown: str, name: str) -> str:
    """First line of the row of this name."""
    lines = (line.split("│") for line in shown.splitlines() if line.startswith(f"│ {name} "))
    return next(cells[2].strip() for cells in lines)


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


# --- the command ---


def test_the_whole_report(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Everything real: what is installed, all kernels; and the file has what the tables show."""
    fastaug.register_kernel("elsewhere", Elsewhere())
    file = tmp_path / "doctor.json"
    code = cli.run(doctor.main, ["--device", "cpu", "--json", str(file)])
    captured = capsys.readouterr()
    assert captured.err == ""
    report = json.loads(file.read_text())
    assert code == any(item["failed"] for item in report["todo"])
    for name, value in (report["versions"] | report["machine"]).items():
        assert row(captured.out, name) == value
    check_versions(report["versions"])
    known = fastaug.available_kernels()
    assert {line["kernel"]: line["why_not"] for line in report["kernels"]} == known
    loss, _, views = captured.out.partition("loss kernels on cpu")[2].partition("view engines")
    for line in report["kernels"]:
        shown = row(loss, line["kernel"])
        if line["why_not"] is not None:
            assert shown == f"not available: {line['why_not']}"
            assert line["admitted"] is line["speed"] is line["milliseconds"] is None
        else:
            assert line["admitted"]
            assert line["cases"] > 20
            assert line["milliseconds"] > 0
            ratio = "" if line["kernel"] == "reference" else r"[\d.]+x the reference, "
            assert re.fullmatch(rf"admitted, {ratio}\S+ ms", shown)
            assert line["kernel"] != "reference" or line["speed"] == 1
    assert report["auto"] == {"cpu": registry.find_kernel("auto", torch.empty(32, 8, 1000)).name}
    assert re.fullmatch(r"admitted, [\d,]+ views/s", row(views, "fused"))
    assert report["views"]["cpu"]["auto"] == row(views, "auto") == "fused"
    listed = [line for line in captured.out.splitlines() if re.match(r"\d+\. ", line)]
    assert len(listed) == len(report["todo"])
    assert ("nothing to do" in captured.out) is not bool(listed)


def check_versions(shown: dict[str, str]) -> None:
    assert shown.pop("Python").startswith(sys.version.split()[0])
    dali = r"\S+ \(nvidia-dali-\S+\), works on cpu|not installed.*"
    assert re.fullmatch(dali, shown.pop("DALI"))
    cuda = torch.version.cuda
    assert shown["torch"].endswith(f"built for CUDA {cuda}" if cuda else "CPU only")
    assert {"torchvision", "timm", "numpy", "tyro", "tensorboard", "apex"} <= shown.keys()
    installed = {one.metadata["Name"].lower(): one.version for one in distributions()}
    for name, value in shown.items():
        assert value.startswith(installed.get(name, "not installed"))


def test_a_failure_is_the_exit_code_and_comes_first(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = {"y": lambda: Fact("not installed", "pip install y")}
    broken = {"x": lambda: Fact("1.0, cannot be imported", "pip install x", failed=True)}
    file = tmp_path / "found.json"
    monkeypatch.setattr(machine, "machine_checks", lambda: missing)
    assert "1. pip install y" in run("--quick")
    monkeypatch.setattr(machine, "machine_checks", lambda: missing | broken)
    shown = run("--quick", "--json", str(file), code=1)
    assert "1. problem: pip install x\n2. pip install y" in shown
    assert [item["failed"] for item in json.loads(file.read_text())["todo"]] == [True, False]


def test_a_check_that_raises_is_a_row(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> Fact:
        raise RuntimeError("[/opt/dali] stopped\nat a second line")

    checks = {"bad": raises, "CPU": lambda: Fact("one")}
    monkeypatch.setattr(packages, "package_checks", lambda devices: checks)
    shown = run("--quick")
    assert row(shown, "bad").endswith("RuntimeError: [/opt/dali] stopped")
    assert row(shown, "CPU") == "one"


@pytest.mark.parametrize(
    "flags", [["--json", "{}"], ["--json", "{}/no/such.json"], ["--device", "tpu"]]
)
def test_mistakes_end_with_one_line(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    flag, value = flags[0], flags[1].format(tmp_path)
    assert cli.run(doctor.main, [flag, value]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: {flag}")
    assert value in line
    assert captured.out == ""


# --- kernels ---


def test_a_wrong_kernel_is_a_failure_if_it_is_ours(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the user's is refused, too, and the exit code stays 0."""
    fastaug.register_kernel("mine", Wrong())
    shown = run("--quick")
    assert row(shown, "mine").startswith("refused: the gradient ")
    assert "1. kernel mine on cpu is wrong: " in shown
    assert "x the reference" not in shown  # not timed

    def wrong(kernel: object, *args: torch.Tensor, **flags: object) -> tuple:
        return Wrong().value_and_grad(*args, **flags)

    monkeypatch.setenv("FASTAUG_CACHE", str(tmp_path))  # where no kernel is admitted yet
    monkeypatch.setattr(registry, "_found", {})
    monkeypatch.setattr(native.NativeKernel, "supports", lambda kernel, logits: None)
    monkeypatch.setattr(native.NativeKernel, "value_and_grad", wrong)
    _, facts = kernels.check_kernels(CPU, timed=False)
    assert facts["native"].value.startswith("refused: the gradient ")
    assert facts["native"].todo.startswith("kernel native on cpu is wrong: use --kernel reference")
    assert facts["native"].failed
    assert facts["auto"] == Fact("reference")


def test_a_cached_admission_is_not_used(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Wrong()
    fastaug.register_kernel("mine", kernel)
    with monkeypatch.context() as patch:
        patch.setattr(Wrong, "factor", 1)
        assert registry.check_admission(kernel, CPU).admitted
    assert registry.check_admission(kernel, CPU).admitted  # from the cache
    assert kernels.check_kernel("mine", None, CPU).admitted is False


def test_a_kernel_that_raises_leaves_the_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the admission check, outside of it, or when it is timed; always in one line."""
    fastaug.register_kernel("fails-large", FailsLarge())
    shown = run()
    expected = "refused: B=32 K=8 C=1000: RuntimeError: out of [/room]"
    assert row(shown, "fails-large") == expected
    assert row(shown, "reference").startswith("admitted, ")

    def raises(*args: object, **flags: object) -> tuple:
        raise ValueError("no idea\nand a second line")

    with monkeypatch.context() as patch:
        patch.setattr(FailsLarge, "value_and_grad", raises)
        result = kernels.check_kernel("fails-large", None, CPU)
        assert kernels.describe(result).value.endswith("ValueError: no idea")
    monkeypatch.setattr(fastaug, "check_kernel", raises)
    assert kernels.check_kernel("fails-large", None, CPU).worst == "ValueError: no idea"


def test_kernels_that_cannot_be_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(logits: torch.Tensor) -> dict:
        raise OSError("gone")

    monkeypatch.setattr(fastaug, "available_kernels", raises)
    shown = run("--quick", code=1)
    assert row(shown, "kernels") == "OSError: gone"
    assert "1. problem: the loss kernels on cpu " in shown


def test_advice_for_a_kernel_that_the_device_could_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel, device, ours, compiler, advised in (
        ("native", "cpu", True, "g++", True),
        ("native", "cpu", True, None, False),  # the row of the compiler has the advice
        ("triton", "cpu", True, "g++", False),
        ("triton", "cuda:1", True, "g++", True),
        ("triton", "cuda:1", False, "g++", False),
    ):
        monkeypatch.setattr(kernels, "cpp_compiler", lambda compiler=compiler: compiler)
        fact = kernels.describe(KernelResult(kernel, device, ours, why_not="needs this"))
        todo = f"kernel {kernel} on {device}: needs this" if advised else ""
        assert fact == Fact("not available: needs this", todo)
    result = kernels.check_kernel("reference", "needs this\nand more", CPU)
    assert result.why_not == "needs this"


def test_speed_is_the_median_of_ratios_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine gets slower and slower; a kernel takes a quarter of the reference's time."""
    fastaug.register_kernel("mine", Elsewhere())
    drift = itertools.count(2)

    def seconds(call: Any, device: torch.device) -> float:
        turn = next(drift) // 2
        return turn if isinstance(call.func.__self__, Elsewhere) else 4 * turn

    monkeypatch.setattr(kernels, "_seconds", seconds)
    results = [KernelResult(name, "cpu", False, None, True) for name in ("reference", "mine")]
    _, mine = kernels.time_kernels(results, CPU)
    assert mine.speed == 4
    assert kernels.describe(mine).value.startswith("admitted, 4.0x the reference, ")


# --- views ---


def test_views_that_are_wrong_or_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    report = AdmissionReport("native", "cpu", False, 2, "off by 9 x the tolerance\nand more")
    monkeypatch.setattr(kernels, "check_admission", lambda *_, again: report)
    found = kernels.check_views(CPU, timed=True)
    assert found["fused"].value == "refused\nworst of 2 cases: off by 9 x the tolerance"
    assert found["fused"].failed
    assert "--views-engine dali" in found["fused"].todo
    assert found["auto"] == Fact("dali")
    monkeypatch.setattr(native_views, "_why_not", lambda: "g++ cannot compile it")
    for compiler in (None, "g++"):
        monkeypatch.setattr(kernels, "cpp_compiler", lambda compiler=compiler: compiler)
        todo = "fused views on cpu: g++ cannot compile it" if compiler else ""
        found = kernels.check_views(CPU, timed=True)
        assert found["fused"] == Fact("not available: g++ cannot compile it", todo)
        assert found["auto"] == Fact("dali")
