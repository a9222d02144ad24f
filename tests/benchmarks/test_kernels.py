"""benchmarks/kernels.py: its contenders against the literal loss, and tiny runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import kernels
import numpy as np
import pytest
import torch
from literal import AVERAGES, literal_terms
from parts import losses, results, timing
from PIL import Image

import fastaug
from fastaug import cli
from fastaug.kernels.reference import ReferenceKernel

CPU = torch.device("cpu")
NO_COMPILER = ("linear", "literal", "literal-loop")
BASELINES = ("cross_entropy", "cross_entropy-views", "copy")
TINY = ["--images", "3", "--classes", "7", "--repeats", "2", "--device", "cpu"]
TINY += ["--kernels", "reference", *NO_COMPILER]


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "calibrate", lambda call, device: 1)


def run(out: Path, *flags: str) -> tuple[int, list[dict[str, str]]]:
    """The exit code, and the rows of the file afterwards."""
    code = cli.run(kernels.main, [*TINY, "--out", str(out), *flags])
    return code, results.read(out / "kernels.csv", kernels.COLUMNS)


# --- contenders ---


def draw(views: int, average: str = "losses") -> losses.Inputs:
    return losses.Inputs.draw(losses.Case(3, views, 11), average, torch.float32, CPU)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("views", [1, 2, 5])
@pytest.mark.parametrize("name", ["reference", *NO_COMPILER])
def test_contenders_compute_the_papers_loss(name: str, views: int, average: str) -> None:
    inputs = draw(views, average)
    nll, kl, grad = literal_terms(inputs.logits, inputs.targets, average, 1.0, 0.0)
    loss = (nll + kl).mean().float()
    contender = losses.contenders([name])[name](inputs)
    torch.testing.assert_close(contender.calls[losses.FORWARD](), loss)
    assert contender.leaf.grad is None
    for _ in range(2):  # gradients do not accumulate
        torch.testing.assert_close(contender.calls[losses.BOTH](), loss)
        torch.testing.assert_close(contender.leaf.grad, (grad / 3).float(), rtol=1e-4, atol=1e-6)


def test_the_baselines() -> None:
    inputs = draw(views=4)
    nll, _, grad = literal_terms(inputs.logits, inputs.targets, "losses", 0.0, 0.0)
    for name, shape in (("cross_entropy", (12, 11)), ("cross_entropy-views", (3, 4, 11))):
        contender = losses.contenders(["linear"])[name](inputs)
        torch.testing.assert_close(contender.calls[losses.BOTH](), nll.mean().float())
        torch.testing.assert_close(contender.leaf.grad, (grad / 3).float().reshape(shape))
    copied = losses.copy(inputs).calls[losses.COPY]()
    assert torch.equal(copied, inputs.logits)
    assert copied.data_ptr() != inputs.logits.data_ptr()


def test_all_kernels_and_forms_take_part_unless_named() -> None:
    everyone = {*BASELINES, *fastaug.available_kernels(), *NO_COMPILER, "compiled"}
    assert set(losses.contenders()) == everyone
    assert list(losses.contenders(["linear"])) == [*BASELINES, "linear"]


class Raises(ReferenceKernel):
    name = "raises"

    def value_and_grad(self, *args: object, **flags: object) -> tuple:
        raise ValueError("not today")


class Wrong(ReferenceKernel):
    name = "wrong"

    def value_and_grad(self, *args: torch.Tensor, **flags: object) -> tuple:
        nll, kl, grad = super().value_and_grad(*args, **flags)
        return nll, kl, 1.01 * grad


class Elsewhere(ReferenceKernel):
    name = "elsewhere"

    def supports(self, logits: torch.Tensor) -> str | None:
        return "needs another machine"


raises, wrong, elsewhere = Raises(), Wrong(), Elsewhere()


def test_who_cannot_run_is_a_row_without_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastaug.runtime.device.cpp_compiler", lambda: None)
    names = [f"test_kernels:{name}" for name in ("raises", "wrong", "elsewhere")]
    code, rows = run(tmp_path, "--views", "2", "--kernels", *names, "compiled", "linear")
    assert code == 0
    status = {row["contender"]: row["status"] for row in rows if row["status"] != "ok"}
    assert list(status) == [*names, "compiled"]
    assert "not today" in status[names[0]]
    assert status[names[2]] == "unavailable: needs another machine"
    assert "compiler" in status["compiled"]
    for row in rows:
        if row["status"] != "ok":
            assert not any(row[c] for c in ("median", "p20", "p80", "n", "unit", "to_copy"))
    assert {"linear", "cross_entropy"} <= {r["contender"] for r in rows} - set(status)


def test_a_wrong_gradient_is_unfit() -> None:
    inputs = draw(views=4)
    contender, right = losses.form("linear", inputs), losses.exact(inputs)
    losses.check_result("linear", contender, right)
    with pytest.raises(losses.UnfitError, match=r"gradient .*1\.0e-02"):
        losses.check_result("linear", contender, (right[0], right[1] / 1.01))


@pytest.mark.parametrize(
    ("owner", "name", "value", "unit"),
    [(losses, "LONGEST", 1e-9, " s"), (timing, "free_memory", lambda device: 1e3, "GB")],
    ids=["time", "memory"],
)
def test_what_would_take_too_much_is_skipped(
    owner: object, name: str, value: object, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, value)
    for form in ("literal", "literal-loop"):
        with pytest.raises(losses.UnfitError, match=rf"skipped.*{unit}"):
            losses.check_size(losses.contenders([form])[form], draw(views=4), rounds=2)


# --- runs ---


def test_a_run_writes_the_table_and_the_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = run(tmp_path, "--views", "1", "2", "--average", "probs")
    assert code == 0
    said = capsys.readouterr().out
    assert "B=3 K=1 C=7" in said
    assert "literal-loop" in said
    assert {(row["B"], row["K"], row["C"]) for row in rows} == {("3", "1", "7"), ("3", "2", "7")}
    assert {(row["dtype"], row["average"], row["device"]) for row in rows} == {
        ("fp32", "probs", "cpu")
    }
    quantities = {
        name: {row["quantity"] for row in rows if row["contender"] == name}
        for name in {row["contender"] for row in rows}
    }
    torchs = {"forward", "forward+backward", "memory"}
    assert quantities == {
        "reference": {*torchs, "value_and_grad"},
        "copy": {"copy"},
        **dict.fromkeys(("cross_entropy", "cross_entropy-views", *NO_COMPILER), torchs),
    }
    for row in rows:
        assert row["status"] == "ok"
        assert all(row[column] for column in set(kernels.COLUMNS) - {"gpu"})
        assert (row["unit"], row["n"]) == (
            ("bytes", "1") if row["quantity"] == "memory" else ("ms", "2")
        )
        numbers = [float(row[c]) for c in ("p20", "median", "p80", "to_cross_entropy", "to_copy")]
        assert all(number >= 0 for number in numbers)
        assert numbers[:3] == sorted(numbers[:3])
        if (row["contender"], row["quantity"]) == ("cross_entropy", losses.BOTH):
            assert row["to_cross_entropy"] == "1.0"
    assert is_plot(tmp_path / "kernels.png")
    (tmp_path / "kernels.png").unlink()
    assert run(tmp_path, "--plot-only") == (0, rows)
    assert is_plot(tmp_path / "kernels.png")


def is_plot(path: Path) -> bool:
    """A PNG on which something is drawn in color."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
        return picture.format == "PNG" and bool((np.ptp(pixels, axis=2) > 100).sum() > 100)


def test_interrupted_it_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = itertools.count(1)
    time_calls = timing.time_calls

    def interrupted(*args: object, on_round: object, **flags: object) -> dict:
        def stop_at(done: int) -> None:
            if next(rounds) == 4:  # two whole rounds of the first case, one of the second
                raise KeyboardInterrupt

        return time_calls(*args, on_round=stop_at, **flags)

    monkeypatch.setattr(timing, "time_calls", interrupted)
    code, rows = run(tmp_path, "--views", "2", "3", "4", "--kernels", "linear")
    assert code == 130
    times = {(row["K"], row["n"]) for row in rows if row["unit"] == "ms"}
    assert times == {("2", "2"), ("3", "1")}
    assert {row["K"] for row in rows} == {"2", "3"}
    assert (tmp_path / "kernels.png").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--kernels", "refrence"], "reference"),
        (["--dtype", "fp8"], "fp8"),
        (["--classes", "10", "0"], "--classes"),
        (["--views"], "--views"),
        (["--repeats", "0"], "--repeats"),
        (["--plot-only"], "kernels.csv"),
    ],
)
def test_mistakes_end_with_one_line(
    flags: Sequence[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(kernels.main, [*flags, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert named in error
    assert not list(tmp_path.iterdir())


def test_the_cases() -> None:
    cases = kernels.Options().cases()
    assert cases[-1] == (4, 16, 100)
    assert {(case.classes, case.images) for case in cases[:-1]} == {
        (10, 128),
        (100, 128),
        (1000, 128),
        (21841, 16),
    }
    assert len(cases) == 4 * 5 + 1
    assert kernels.Options(images=4, views=(16,), classes=(100,)).cases() == [(4, 16, 100)]
    # Flags change single values of --quick.
    quick = kernels.command.parse(kernels.QUICK, ["--quick", "--views", "4"], "kernels.py")
    assert quick.repeats < kernels.Options().repeats
    assert quick.cases() == [(128, 4, 1000), (4, 16, 100)]


# --- targets ---


def fake_run(**times: float) -> list[dict[str, str]]:
    """Rows of forward+backward by contender_K, in multiples of cross_entropy."""
    rows = []
    for key, time in times.items():
        name, _, views = key.rpartition("_")
        size = {"B": "128", "C": "1000"} if views in ("8", "16") else {"B": "4", "C": "100"}
        row = dict.fromkeys(kernels.COLUMNS, "") | size
        row |= {"contender": name.replace("_", "-"), "quantity": losses.BOTH}
        row |= {"K": {"paper": "16"}.get(views, views), "median": str(time)}
        row |= {"to_cross_entropy": str(time), "status": "ok", "dtype": "fp32", "device": "cpu"}
        rows.append(row)
    return rows


def test_the_targets() -> None:
    times = {"native_8": 0.5, "literal_8": 14.0, "literal_loop_8": 6.0, "compiled_8": 1.25}
    rows = fake_run(**times, native_16=1.2, native_paper=1.01)
    found = [line.rpartition("forward+backward: ")[2] for line in kernels.conclusions(rows)]
    assert found == [
        "0.50 (target <= 1): met",
        "28.00 (target >= 25): met",
        "12.00",
        "2.50 (target >= 2.5): met",
        "2.40 (target <= 2.2): not met",
        "1.01 (target <= 1): not met",
    ]
    # Without its case, or in another precision, there is no line.
    rows = fake_run(native_4=0.5, literal_8=20.0, native_8=math.nan)
    rows += [row | {"dtype": "bf16"} for row in fake_run(native_8=0.5)]
    assert list(kernels.conclusions(rows)) == []
