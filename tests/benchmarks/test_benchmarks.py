"""The benchmarks' parts against oracles, and tiny runs. No test looks at how long a thing takes."""

from __future__ import annotations

import csv
import itertools
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from literal import AVERAGES, literal_terms
from PIL import Image

import fastaug
from fastaug import cli
from fastaug.errors import ConfigError
from fastaug.kernels.reference import ReferenceKernel

# The scripts import each other as siblings, as Python lets them when it runs one.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import contenders
import kernel_report
import kernels
import records
import timing

CPU = torch.device("cpu")
TINY = ["--images", "3", "--classes", "7", "--repeats", "2", "--device", "cpu"]
NO_COMPILER = ("linear", "literal", "literal-loop")
TINY += ["--kernels", "reference", *NO_COMPILER]


def run(out: Path, *flags: str) -> tuple[int, list[dict[str, str]]]:
    """The exit code, and the rows of the file afterwards."""
    code = cli.run(kernels.main, [*TINY, "--out", str(out), *flags])
    return code, records.read(out / "kernels.csv", kernels.COLUMNS)


# --- timing ---


@pytest.mark.parametrize("n", [1, 2, 3, 10, 21])
def test_quantiles_are_numpys(n: int) -> None:
    samples = [random.Random(n).gauss(5, 2) for _ in range(n)]
    expected = [*np.quantile(samples, [0.5, 0.2, 0.8]), n]
    np.testing.assert_allclose(timing.quantiles(samples), expected, rtol=1e-12)


def test_ratios_are_of_the_same_round() -> None:
    drift = [1.0, 7.0, 2.0, 30.0]
    assert timing.median_ratio([3 * d for d in drift], drift) == 3


def test_a_sample_has_enough_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "seconds_of", lambda call, loops, device: loops * 3e-5)
    loops = timing.calibrate(lambda: None, CPU, least=0.005)
    assert 0.005 <= loops * 3e-5 < 0.011


def test_contenders_take_turns() -> None:
    made: list[str] = []
    samples: dict[str, list[float]] = {}
    calls = {name: lambda name=name: made.append(name) for name in "abc"}
    starts: list[int] = []
    assert not timing.take_turns(
        calls, samples, rounds=3, device=CPU, on_round=lambda done: starts.append(len(made))
    )
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3, "c": 3}
    for start, end in itertools.pairwise([*starts, len(made)]):
        blocks = [name for name, _ in itertools.groupby(made[start:end])]
        assert sorted(blocks) == ["a", "b", "c"]


def test_one_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made = itertools.count()

    def fails_later() -> None:
        if next(made) == 4:
            raise RuntimeError("no more\nand a second line")

    def fails_at_once() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(timing, "calibrate", lambda call, device: call() or 1)
    samples: dict[str, list[float]] = {}
    calls = {"good": lambda: None, "later": fails_later, "at once": fails_at_once}
    failed = timing.take_turns(calls, samples, rounds=6, device=CPU)
    assert {name: timing.why(error) for name, error in failed.items()} == {
        "at once": "out of memory: CUDA out of memory",
        "later": "failed: no more",
    }
    assert list(samples) == ["good"]
    assert len(samples["good"]) == 6


def test_interrupted_rounds_are_not_counted() -> None:
    samples: dict[str, list[float]] = {}
    started: list[int] = []

    def interrupted() -> None:
        if len(started) == 3:
            raise KeyboardInterrupt

    calls = {"other": lambda: None, "interrupted": interrupted}
    with pytest.raises(KeyboardInterrupt):
        timing.take_turns(calls, samples, rounds=9, device=CPU, on_round=started.append)
    assert {name: len(values) for name, values in samples.items()} == {"other": 2, "interrupted": 2}


def test_peak_memory_is_what_is_alive_at_once() -> None:
    def one_by_one() -> None:
        for _ in range(3):
            torch.empty(250_000)

    def together() -> None:
        first = torch.empty(250_000)
        first + torch.empty(250_000)

    assert timing.peak_memory(one_by_one, CPU) == 1_000_000
    assert timing.peak_memory(together, CPU) == 3_000_000


def test_resident_memory_counts_other_allocators() -> None:
    def outside_torch() -> None:
        np.ones(4_000_000)

    if not (peak := timing.peak_resident_memory(outside_torch)):
        pytest.skip("the system does not say")
    assert timing.peak_memory(outside_torch, CPU) == 0
    assert 0.9 < peak[0] / 32e6 < 1.3


# --- records ---


def test_rows_are_added(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.csv"
    records.Records(path, ("date", "a", "b")).append([{"date": 1, "a": 'x, "y"', "b": 0.5}])
    first = path.read_text()
    path.write_text(first.rstrip("\n"))  # as some editors leave it
    records.Records(path, ("date", "a", "b")).append([{"date": 2, "b": 7}, {"date": 2, "a": "z"}])
    assert path.read_text().startswith(first)
    rows = records.read(path, ("date", "a", "b"))
    assert rows == [
        {"date": "1", "a": 'x, "y"', "b": "0.5"},
        {"date": "2", "a": "", "b": "7"},
        {"date": "2", "a": "z", "b": ""},
    ]
    assert records.run(rows) == rows[1:]
    assert records.run(rows, "1") == rows[:1]
    assert records.run([]) == []


def test_a_file_with_other_columns_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,c\n1,2\n")
    for refused, hint in ((records.Records, "move it away"), (records.read, "give a CSV file")):
        with pytest.raises(ConfigError, match=rf"x\.csv has other columns .*\(b, c\); {hint}"):
            refused(path, ("a", "b"))
    assert path.read_text() == "a,c\n1,2\n"


def test_the_commit_is_unknown_outside_git(tmp_path: Path) -> None:
    assert records.commit(tmp_path) == "unknown"


# --- contenders ---


def draw(views: int, average: str = "losses") -> contenders.Inputs:
    return contenders.Inputs.draw(contenders.Case(3, views, 11), average, torch.float32, CPU)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("views", [1, 2, 5])
@pytest.mark.parametrize("name", ["reference", *NO_COMPILER])
def test_contenders_compute_the_papers_loss(name: str, views: int, average: str) -> None:
    inputs = draw(views, average)
    nll, kl, grad = literal_terms(inputs.logits, inputs.targets, average, 1.0, 0.0)
    loss = (nll + kl).mean().float()
    contender = contenders.contenders([name])[name](inputs)
    torch.testing.assert_close(contender.calls[contenders.FORWARD](), loss)
    assert contender.leaf.grad is None
    for _ in range(2):  # gradients do not add up
        torch.testing.assert_close(contender.calls[contenders.BOTH](), loss)
        torch.testing.assert_close(contender.leaf.grad, (grad / 3).float(), rtol=1e-4, atol=1e-6)


def test_the_baselines() -> None:
    inputs = draw(views=4)
    nll, _, grad = literal_terms(inputs.logits, inputs.targets, "losses", 0.0, 0.0)
    contender = contenders.cross_entropy(inputs)
    torch.testing.assert_close(contender.calls[contenders.BOTH](), nll.mean().float())
    torch.testing.assert_close(contender.leaf.grad, (grad / 3).float().flatten(0, 1))
    copied = contenders.copy(inputs).calls[contenders.COPY]()
    assert torch.equal(copied, inputs.logits)
    assert copied.data_ptr() != inputs.logits.data_ptr()


def test_all_kernels_and_forms_take_part_unless_named() -> None:
    known = {
        "cross_entropy",
        "cross_entropy-views",
        "copy",
        *fastaug.available_kernels(),
        *NO_COMPILER,
        "compiled",
    }
    assert set(contenders.contenders()) == known
    assert list(contenders.contenders(["linear"])) == [
        *("cross_entropy", "cross_entropy-views", "copy", "linear")
    ]


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


def test_who_cannot_run_is_a_row_without_numbers(tmp_path: Path) -> None:
    names = [f"test_benchmarks:{name}" for name in ("raises", "wrong", "elsewhere")]
    code, rows = run(tmp_path, "--views", "2", "--kernels", *names, "reference", "linear")
    assert code == 0
    status = {row["contender"]: row["status"] for row in rows if row["status"] != "ok"}
    assert list(status) == names
    assert "not today" in status[names[0]]
    assert status[names[2]] == "unavailable: needs another machine"
    for row in rows:
        if row["status"] != "ok":
            assert not any(row[c] for c in ("median", "p20", "p80", "n", "unit", "to_copy"))
    assert {"reference", "linear", "cross_entropy"} <= {r["contender"] for r in rows} - set(status)


def test_a_wrong_gradient_is_no_contender() -> None:
    inputs = draw(views=4)
    contender = contenders.form("linear", inputs)
    right = contenders.exact(inputs)
    contenders.check_result("linear", contender, right)
    with pytest.raises(contenders.Unfit, match=r"wrong: gradient off by 1\.0e-02"):
        contenders.check_result("linear", contender, (right[0], right[1] / 1.01))


def test_without_a_compiler_a_row_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastaug.runtime.device.cpp_compiler", lambda: None)
    _, rows = run(tmp_path, "--views", "2", "--kernels", "compiled")
    (row,) = (row for row in rows if row["contender"] == "compiled")
    assert row["status"].startswith("unavailable: torch.compile needs a C++ compiler")


def test_what_would_take_too_long_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "LONGEST", 1e-9)
    _, rows = run(tmp_path, "--views", "2")
    skipped = {r["contender"] for r in rows if r["status"].startswith("skipped: would take about")}
    assert skipped == {"literal", "literal-loop"}


def test_what_would_take_too_much_memory_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "free_memory", lambda device: 1000.0)
    _, rows = run(tmp_path, "--views", "2")
    skipped = {r["contender"] for r in rows if r["status"].startswith("skipped: would need")}
    assert skipped == {"literal", "literal-loop"}


# --- runs ---


def test_a_run_writes_the_table_and_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = run(tmp_path, "--views", "1", "2", "--average", "probs")
    assert code == 0
    said = capsys.readouterr().out
    assert "B=3 K=1 C=7" in said
    assert "literal-loop" in said
    with (tmp_path / "kernels.csv").open(newline="") as file:
        assert next(csv.reader(file)) == list(kernels.COLUMNS)
    assert {(row["B"], row["K"], row["C"]) for row in rows} == {("3", "1", "7"), ("3", "2", "7")}
    assert {(row["dtype"], row["average"], row["device"]) for row in rows} == {
        ("fp32", "probs", "cpu")
    }
    quantities = {
        name: {row["quantity"] for row in rows if row["contender"] == name} - {kernels.RESIDENT}
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
        if row["quantity"] == kernels.RESIDENT:  # whole pages: of so little there may be none
            continue
        assert all(row[column] for column in set(kernels.COLUMNS) - {"gpu"})
        assert row["unit"] == ("bytes" if "memory" in row["quantity"] else "ms")
        numbers = [float(row[c]) for c in ("p20", "median", "p80", "to_cross_entropy", "to_copy")]
        assert all(number >= 0 for number in numbers)
        assert numbers[:3] == sorted(numbers[:3])
        if row["unit"] == "ms":
            assert row["n"] == "2"
        if (row["contender"], row["quantity"]) == ("cross_entropy", contenders.BOTH):
            assert row["to_cross_entropy"] == "1.0"
    assert is_picture(tmp_path / "kernels.png")

    first = (tmp_path / "kernels.csv").read_text()
    (tmp_path / "kernels.png").unlink()
    code, again = run(tmp_path, "--plot-only")
    assert (code, again) == (0, rows)
    assert is_picture(tmp_path / "kernels.png")
    code, more = run(tmp_path, "--views", "2")
    assert (tmp_path / "kernels.csv").read_text().startswith(first)
    assert len(records.run(more)) == len(more) - len(rows) > 0


def is_picture(path: Path) -> bool:
    """A PNG on which something is drawn in color."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
        return picture.format == "PNG" and bool((np.ptp(pixels, axis=2) > 100).sum() > 100)


def test_interrupted_it_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = itertools.count(1)
    take_turns = timing.take_turns

    def interrupted(*args: object, on_round: object, **flags: object) -> dict:
        def stop_at(done: int) -> None:
            if next(rounds) == 4:  # two whole rounds of the first case, one of the second
                raise KeyboardInterrupt

        return take_turns(*args, on_round=stop_at, **flags)

    monkeypatch.setattr(timing, "take_turns", interrupted)
    code, rows = run(tmp_path, "--views", "2", "3", "4")
    assert code == 130
    times = {(row["K"], row["n"]) for row in rows if row["unit"] == "ms"}
    assert times == {("2", "2"), ("3", "1")}
    assert {row["K"] for row in rows} == {"2", "3"}
    assert is_picture(tmp_path / "kernels.png")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kernels", "refrence"], "no kernel 'refrence': did you mean reference"),
        (["--dtype", "fp8"], "invalid choice 'fp8' for argument '--dtype'"),
        (["--classes", "10", "0"], "--classes must be at least 1, got 0"),
        (["--views"], "--views needs at least one number"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--plot-only"], "cannot be read"),
    ],
)
def test_mistakes_end_with_one_line(
    flags: Sequence[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(kernels.main, [*flags, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert said in error
    assert not list(tmp_path.iterdir())


def test_another_header_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kernels.csv").write_text("date,commit\n")
    assert cli.run(kernels.main, [*TINY, "--out", str(tmp_path)]) == 2
    assert "has other columns" in capsys.readouterr().err


def test_flags_change_single_values_of_quick() -> None:
    quick, full = kernels.parse(["--quick", "--views", "4"]), kernels.parse([])
    assert quick.repeats < full.repeats
    assert quick.cases() == [contenders.Case(128, 4, 1000), kernel_report.PAPER_STEP]
    assert kernels.parse(["--quick"]).cases()[:-1] == [(128, 2, 1000), (128, 8, 1000)]


def test_the_cases() -> None:
    cases = kernels.parse([]).cases()
    assert cases[-1] == (4, 16, 100)
    assert {(case.classes, case.images) for case in cases[:-1]} == {
        (10, 128),
        (100, 128),
        (1000, 128),
        (21841, 16),
    }
    assert len(cases) == 4 * 5 + 1
    flags = ["--images", "4", "--views", "16", "--classes", "100"]
    assert kernels.parse(flags).cases() == [(4, 16, 100)]


# --- verdicts ---


def fake_run(**times: float) -> list[dict[str, str]]:
    """Rows of forward+backward by contender_K, in multiples of cross_entropy."""
    rows = []
    for key, time in times.items():
        name, _, views = key.rpartition("_")
        size = {"B": "128", "C": "1000"} if views in ("8", "16") else {"B": "4", "C": "100"}
        row = dict.fromkeys(kernels.COLUMNS, "") | size
        row |= {"contender": name.replace("_", "-"), "quantity": contenders.BOTH}
        row |= {"K": {"paper": "16"}.get(views, views), "median": str(time)}
        row |= {"to_cross_entropy": str(time), "status": "ok", "dtype": "fp32", "device": "cpu"}
        rows.append(row)
    return rows


def test_verdicts_on_the_targets() -> None:
    times = {"native_8": 0.5, "literal_8": 14.0, "literal_loop_8": 6.0, "compiled_8": 1.25}
    rows = fake_run(**times, native_16=1.2, native_paper=1.01)
    assert list(kernel_report.verdicts(rows)) == [
        "native / cross_entropy, B=128 K=8 C=1000, forward+backward: 0.50 (target <= 1): met",
        "literal / native, B=128 K=8 C=1000, forward+backward: 28.00 (target >= 25): met",
        "literal-loop / native, B=128 K=8 C=1000, forward+backward: 12.00",
        "compiled / native, B=128 K=8 C=1000, forward+backward: 2.50 (target >= 2.5): met",
        "native, K=16 / K=8, B=128 C=1000, forward+backward: 2.40 (target <= 2.2): not met",
        "native / cross_entropy, B=4 K=16 C=100, forward+backward: 1.01 (target <= 1): not met",
    ]
    (direct,) = fake_run(native_8=1.0)
    direct["quantity"] = contenders.DIRECT
    assert list(kernel_report.verdicts([direct])) == [
        "native / cross_entropy, B=128 K=8 C=1000, value_and_grad: 1.00 (target <= 1): met"
    ]


def test_no_verdict_without_its_case() -> None:
    rows = fake_run(native_4=0.5, literal_8=20.0, native_8=math.nan)
    assert list(kernel_report.verdicts(rows)) == []
    half = [row | {"dtype": "bf16"} for row in fake_run(native_8=0.5)]
    assert list(kernel_report.verdicts(half)) == []
