"""The driver of the paper's sweeps in small, and the tables and figures of their record."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import paper_small
import pytest
import tables
from parts import paper_tables
from parts.paper_questions import QUESTIONS, Comparison, Question
from parts.paper_record import Point, Record
from parts.paper_tables import cost_of
from run_folders import measures, metrics_lines, write_run

from fastaug import cli
from fastaug.errors import ConfigError
from fastaug.experiments.compute_figure import budgets
from fastaug.experiments.difference import Difference
from fastaug.experiments.record import CONFIGS, CURVES, RUNS, write_record
from fastaug.experiments.results import find_results
from fastaug.recipes import get_recipe

BASE = get_recipe("small-cifar").replace(data="/data/cifar10-16.npz")

# --- the driver ---


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Four classes; the pixels of an image are its number."""
    arrays = {"classes": np.array(["a", "b", "c", "d"])}
    for split, count in (("train", 40), ("test", 8)):
        arrays[f"{split}_labels"] = np.arange(count) % 4
        pixels = np.arange(count, dtype=np.uint8)[:, None, None, None]
        arrays[f"{split}_images"] = np.broadcast_to(pixels, (count, 16, 16, 3)).copy()
    np.savez(tmp_path / "cifar.npz", **arrays)
    return tmp_path / "cifar.npz"


def test_halves_of_the_classes(data: Path, tmp_path: Path) -> None:
    for first, classes in ((True, ["a", "b"]), (False, ["c", "d"])):
        paper_small.write_half(data, tmp_path / "half.npz", first=first)
        with np.load(tmp_path / "half.npz") as half:
            assert list(half["classes"]) == classes
            assert sorted({*half["train_labels"]}) == [0, 1]
            numbers = half["train_images"][:, 0, 0, 0]
            assert list(half["train_labels"]) == [n % 4 - 2 * (not first) for n in numbers]
            assert len(half["test_images"]) == 4


class Commands:
    """Notes the commands that the driver runs, and answers with exit codes."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.codes: dict[str, int] = {}

    def __call__(self, module: Sequence[str]) -> int:
        self.lines.append(" ".join(module))
        return self.codes.get(" ".join(module[:2]), 0)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    made = Commands()
    monkeypatch.setattr(paper_small, "_run", made)
    return made


def flags(data: Path, *more: str) -> list[str]:
    top = data.parent
    return ["--data", str(data), "--out", str(top / "out"), "--record", str(top / "rec"), *more]


def test_the_record_is_written_after_each_sweep(data: Path, commands: Commands) -> None:
    (data.parent / "rec").mkdir()
    assert cli.run(paper_small.main, flags(data, "--sweep-args=--jobs 1")) == 0
    assert all(line.endswith("--jobs 1") for line in commands.lines if "fastaug.sweep" in line)
    sweeps = [line for line in commands.lines if line.startswith("fastaug.sweep")]
    assert [line.split()[1] for line in sweeps] == list(paper_small.SWEEPS)
    out, record = data.parent / "out", data.parent / "rec"
    for name, line in zip(paper_small.SWEEPS, sweeps, strict=True):
        assert f"--out {out / name} --reuse {record} --jobs 1" in line
        following = commands.lines[commands.lines.index(line) + 1]
        assert following.startswith(f"fastaug.report {record} {out / name} --out")
        assert following.endswith(f"--record {record}")
    (tuning,) = [line for line in sweeps if "small-finetune" in line]
    assert f"--data {out}/fine-tuning/target.npz" in tuning
    assert f"--weights {out}/fine-tuning/source/best.safetensors" in tuning
    (source,) = [line for line in commands.lines if line.startswith("fastaug.train")]
    assert f"--data {out}/fine-tuning/source.npz" in source


def test_sweeps_reuse_each_other_s_runs_but_not_the_weights(data: Path, commands: Commands) -> None:
    for name in ("small-views", "fine-tuning"):
        (data.parent / "out" / name).mkdir(parents=True)
    assert cli.run(paper_small.main, flags(data, "--only", "small-lambda")) == 0
    sweep, page = commands.lines
    assert sweep.endswith(f"--reuse {data.parent / 'out/small-views'}")
    assert "fine-tuning" not in page


def test_a_sweep_with_failed_runs_does_not_end_the_others(data: Path, commands: Commands) -> None:
    commands.codes = {"fastaug.sweep small-views": 1}
    assert cli.run(paper_small.main, flags(data)) == 1
    assert sum(line.startswith("fastaug.sweep") for line in commands.lines) > 1


def test_an_interrupted_sweep_ends_the_driver(data: Path, commands: Commands) -> None:
    commands.codes = {"fastaug.sweep small-views": 130}
    assert cli.run(paper_small.main, flags(data)) == 130
    assert len(commands.lines) == 1


@pytest.mark.parametrize(
    ("more", "named"),
    [(["--data", "none.npz"], "none.npz"), (["--only", "small-vews"], "small-views")],
)
def test_mistakes_are_one_line(
    data: Path, commands: Commands, more: list[str], named: str, capsys: pytest.CaptureFixture
) -> None:
    assert cli.run(paper_small.main, flags(data, *more)) == 2
    error = capsys.readouterr().err.strip()
    assert named in error
    assert "\n" not in error
    assert not commands.lines


# --- tables and figures ---


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """small-views with K=1 and K=4 of two seeds, and small-compute with K=1 of two budgets."""
    runs = {
        ("small-views", 4, 1.0, 80): [0.50, 0.52],
        ("small-views", 4, 0.0, 80): [0.47, 0.46],
        ("small-compute", 1, 0.0, 80): [0.40],
        ("small-compute", 1, 0.0, 320): [0.48],
        ("small-compute", 4, 0.0, 80): [0.47],  # the same run as in small-views
    }
    for (sweep, views, weight, epochs), values in runs.items():
        (tmp_path / sweep / "runs").mkdir(parents=True, exist_ok=True)
        (tmp_path / sweep / "sweep.db").touch()
        for seed, top1 in enumerate(values):
            config = BASE.replace(views=views, kl_weight=weight, epochs=epochs, seed=seed)
            found = measures(top1, invariance=0.1 + seed * weight)
            folder = tmp_path / sweep / "runs" / f"{views}-{weight}-{epochs}-{seed}"
            write_run(folder, config, found, measures(0.4), metrics_lines(4, 0.5))
            summary = json.loads((folder / "summary.json").read_text())
            summary["step"] = 16 * epochs * views
            (folder / "summary.json").write_text(json.dumps(summary))
    write_record(tmp_path / "record", find_results([tmp_path]).runs)
    return Record(tmp_path / "record")


def test_a_difference_is_in_the_table(record: Record) -> None:
    lines = paper_tables.comparisons(record)
    kl, invariance = [line for line in lines if "| K=4, losses: λ=1 - λ=0 |" in line]
    # 0.03 and 0.06: 4.5 points with a standard error of 1.5, within the 95% interval of two seeds;
    # the same with views at test time. Invariance: 0 and 1.
    cells = [cell.strip() for cell in kl.split("|")]
    values = ["+4.5 ± 1.5", "+4.5 ± 1.5", "+0.50 ± 0.50", "2", "+0.9", "unclear"]
    assert cells[3:9] == values
    assert invariance.split("|")[3:7] == kl.split("|")[3:7]
    assert invariance.endswith("| negative | unclear |")
    # The measures of these folders have 2 points more with views at test time, for every seed.
    (tta,) = [line for line in lines if "K=4, λ=1: TTA - central crop" in line]
    assert tta.split("|")[3:6] == ["  ", " **+2.0 ± 0.0** ", "  "]
    (absent,) = [line for line in lines if line.startswith("| without the KL, averaged losses")]
    assert absent.endswith("| not run |")
    total = sum(len(question.rows) for question in QUESTIONS)
    assert lines[-1] == f"5 of {total} differences have been run."
    (cost,) = [line for line in lines if "K=4 for 80 epochs, λ=0 - K=1 for 320" in line]
    assert cost.split("|")[3].strip() == "-1.0"
    # 0.47 with four views, 0.40 with one for as many epochs and 0.48 for four times as many.
    gains = paper_tables.gains(record)
    assert "| 1,024 images | not run | not run | +7.0 | -1.0 | 1 |" in gains
    assert "| 4,096 images | not run | not run | not run | not run |  |" in gains


@pytest.mark.parametrize(
    ("claim", "mean", "error", "verdict"),
    [
        # Five seeds: the 95% interval is 2.776 standard errors to each side.
        (1, 0.02, 0.007, "yes"),
        (1, 0.02, 0.0073, "unclear"),
        (1, -0.02, 0.007, "no"),
        (-1, -0.02, 0.007, "yes"),
        # Equal within a point: 0.002 and 2.776 standard errors are 0.0098 and 0.0101.
        (0, 0.002, 0.0028, "yes"),
        (0, 0.002, 0.0029, "unclear"),
        (0, -0.002, 0.0029, "unclear"),
        (0, 0.02, 0.007, "no"),
        (None, 0.02, 0.007, ""),
    ],
)
def test_verdicts(claim: int | None, mean: float, error: float, verdict: str) -> None:
    row = Comparison("", Point("small-views"), Point("small-views"), claim=claim)
    question = Question("", [row])
    assert question.verdict(row, Difference(mean, error, mean, mean, seeds=5)) == verdict
    assert question.verdict(row, Difference(mean, 0.0, mean, mean, seeds=1)) == ""
    # Ten times as much is allowed of invariance, which is in nats.
    question, gap = Question("", [row], "invariance"), Difference(10 * mean, 10 * error, 0, 0, 5)
    assert question.verdict(row, gap) == verdict


def test_a_claim_counts_the_verdicts_of_its_differences(record: Record) -> None:
    lines = {line.split(" | ")[0].strip("| "): line for line in paper_tables.claims(record)}
    assert len(lines) == len(QUESTIONS) + 2
    # TTA: +2.0 with both seeds of both settings; K=1 was not run in this sweep.
    tta = lines["averaging predictions over views at test time helps"]
    assert tta.endswith("| K=4, λ=0: TTA - central crop | **+2.0 ± 0.0** points | 2 | +1.8 | yes |")
    # The first difference that was run stands for the claim.
    kl = lines["the KL (λ = 1) improves accuracy with all objectives"]
    assert kl.endswith("| K=4, losses: λ=1 - λ=0 | +4.5 ± 1.5 points | 2 | +0.9 | unclear |")
    assert lines["both effects hold with RandAugment"].endswith("|  |  |  |  | not run |")


def test_the_verdicts_of_a_claim_are_counted(record: Record) -> None:
    gaps = {"up": 0.02, "down": -0.02, "small": 0.001}

    class Known(Question):
        def gap(self, record: Record, row: Comparison) -> Difference | None:
            mean = gaps.get(row.text)
            return None if mean is None else Difference(mean, 0.001, mean, mean, seeds=5)

    def summary(*names: str) -> str:
        point = Point("small-views")
        return Known("", [Comparison(name, point, point) for name in names]).summary(record)

    assert summary("small", "up", "down", "up", "absent") == "2 yes, 1 no, 1 unclear"
    assert summary("up", "absent", "up") == "yes"
    assert summary("absent") == "not run"


def test_every_comparison_is_of_a_sweep_that_is_run() -> None:
    """A misspelled sweep or a setting outside its grid would stay "not run" for ever."""
    from fastaug.experiments.grids import EXPERIMENTS, expand
    from fastaug.experiments.run import setting_of

    for question in QUESTIONS:
        for point in (point for row in question.rows for point in (row.one, row.other)):
            configs = expand(EXPERIMENTS[point.sweep].grids, [0], {}).values()
            assert point.setting in {
                (s.views, s.average, s.kl_weight)
                for c in configs
                if c.model.model == point.model and point.epochs in (0, c.optim.epochs)
                for s in [setting_of(c)]
            }, point


def test_cost_is_interpolated_over_the_logarithm(record: Record) -> None:
    (one,) = record.of("small-compute")
    found = budgets(one)[1, False]
    short, long = 16 * 80 * 64, 16 * 320 * 64
    assert list(found) == [short, long]
    assert cost_of(found, 0.44) == pytest.approx(2 * short)  # half of the way: twice, of four times
    assert cost_of(found, 0.30) == short
    assert cost_of(found, 0.49) is None
    table = "\n".join(paper_tables.time_to_accuracy(record))
    assert "not reached" in table
    assert "≤" in table, "the shortest runs already have it"


def test_settings_and_the_short_table(record: Record) -> None:
    (row,) = [line for line in paper_tables.settings(record) if "KL weight 1" in line]
    # Means and deviations of 50 and 52%, and the last part of nll = 1.5 - epoch / 4.
    assert "| 2^-8 | 2 | 51.0 ± 1.4 | 53.0 ± 1.4 |" in row
    assert row.endswith("| 0.50 |")
    assert "not run" in " ".join(paper_tables.in_short(record))
    assert record.chosen(Point("small-views", 2)) is None


def test_figures_carry_the_digest_of_their_record(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs/images").mkdir(parents=True)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "RECORD", record.folder)
    names = ["paper-views-curves.png", "paper-compute-compute.png", "paper-compute-curves.png"]
    assert [Path(name).name for name in tables.paper_figures(write=True)] == names
    assert tables.paper_figures(write=False) == []
    runs = record.folder / RUNS
    runs.write_text(runs.read_text().replace(",0.52,", ",0.53,", 1))
    assert [Path(name).name for name in tables.paper_figures(write=False)] == names


# --- the committed record ---


def test_the_committed_record_is_whole() -> None:
    results = find_results([paper_small.RECORD])
    assert not results.skipped
    for run in results.runs:
        assert run.sweeps
        assert run.validation is not None
        assert run.summary["environment"]["commit"]
        assert len(run.records) >= 10, "a training curve"
        assert run.config.eval.tta == 8
    text = "".join((paper_small.RECORD / name).read_text() for name in (RUNS, CONFIGS, CURVES))
    assert not re.search(r"/(work|home|root|tmp)/", text)


def test_wrong_names_of_tables_are_reported() -> None:
    with pytest.raises(ConfigError, match="paper-settings"):
        tables.update("<!-- table paper-setings -->\n<!-- end -->", latest=True)
