"""Records: what is written can be read again, and a stranger's record is an error of one line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import RunWriter, measures, metrics_lines, write_run, write_unfinished

from fastaug import figures, report
from fastaug.config import TrainConfig
from fastaug.errors import ConfigError
from fastaug.experiments.record import CONFIGS, CURVES, POINTS, RUNS, read_record, write_record
from fastaug.experiments.results import find_results
from fastaug.experiments.run import Run
from fastaug.recipes import get_recipe

BASE = get_recipe("small-cifar").replace(
    data="/machine/a/cifar.npz", weights="/machine/a/best.safetensors", kl_weight=0.0
)


def write_sweep(root: Path, name: str, **settings: object) -> Path:
    """A sweep with a run of two seeds."""
    sweep = root / name
    (sweep / "runs").mkdir(parents=True)
    (sweep / "sweep.db").touch()
    for seed in (0, 1):
        config = BASE.replace(seed=seed, **settings)
        found, lines = measures(0.5 + 0.1 * seed), metrics_lines(30, 0.5)
        write_run(sweep / "runs" / f"run-s{seed}", config, found, measures(0.4), lines)
    return sweep


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The record of two sweeps: run-s0 and run-s1 are equal in both but for a path."""
    write_sweep(tmp_path / "a", "first")
    write_sweep(tmp_path / "a", "second", data="/machine/b/cifar.npz", workers=7)
    write_sweep(tmp_path / "a", "third", views=2, lr=0.1, epochs=3, crop_area=(0.5, 1.0))
    write_unfinished(tmp_path / "a/first/runs/half", BASE)
    runs = find_results([tmp_path / "a"]).runs
    assert len(runs) == 7
    assert write_record(tmp_path / "record", runs) == 4
    return tmp_path / "record"


def by_name(runs: list[Run]) -> dict[str, Run]:
    return {run.folder.name: run for run in runs}


def test_what_is_written_can_be_read(recorded: Path) -> None:
    runs = by_name(read_record(recorded))
    assert runs.keys() == {"run-s0", "run-s1", "run-s0-2", "run-s1-2"}
    one, other = runs["run-s1"], runs["run-s1-2"]
    assert one.sweeps == ("first", "second")
    assert other.sweeps == ("third",)
    assert one.measures == pytest.approx(measures(0.6))
    assert one.validation == pytest.approx(measures(0.4))
    assert one.state == "finished"
    assert one.summary["parameters"] == 77_981
    assert one.summary["timing"]["views_per_s"] == 1600
    expected = BASE.replace(seed=1, data="cifar.npz", weights="best.safetensors")
    assert not one.config.differences(expected)
    changed = {"views": 2, "lr": 0.1, "epochs": 3, "crop_area": (0.5, 1.0)}
    assert not other.config.differences(expected.replace(**changed))


def test_a_record_has_no_path_of_a_machine(recorded: Path) -> None:
    text = "".join((recorded / name).read_text() for name in (RUNS, CONFIGS, CURVES))
    assert "machine" not in text
    assert str(recorded.parent) not in text


def test_a_curve_has_means_of_equal_parts(recorded: Path) -> None:
    points = by_name(read_record(recorded))["run-s0"].records
    assert len(points) == POINTS
    # 30 records with nll = 1.5 - epoch / 30: the first part has the epochs 1 and 2, the last one
    # 28 to 30.
    assert points[0]["nll"] == pytest.approx(1.45, abs=0.005)
    assert points[-1]["nll"] == pytest.approx(1.5 - 29 / 30, abs=0.005)
    assert (points[-1]["step"], points[-1]["epoch"]) == (750, 30)
    # Without the regularizer the loss is the nll.
    assert [p["loss"] for p in points] == [p["nll"] for p in points]


def test_a_record_of_a_record_is_the_same(recorded: Path, tmp_path: Path) -> None:
    write_record(tmp_path / "again", [*read_record(recorded), *read_record(recorded)])
    for name in (RUNS, CONFIGS, CURVES):
        assert (tmp_path / "again" / name).read_text() == (recorded / name).read_text()


def test_families_of_a_record_are_those_of_its_runs(recorded: Path) -> None:
    from_runs, from_record = (
        {
            (family.title, run.config.view.views, run.config.run.seed, run.measures["top1"])
            for family in find_results([root]).families
            for run in family.runs
        }
        for root in (recorded.parent / "a", recorded)
    )
    assert from_record == from_runs
    titles = {title for title, *_ in from_record}
    assert {title.partition(", ")[2].split(" --")[0] for title in titles} == {
        "sweep first",
        "sweep second",
        "sweep third",
    }


def test_report_and_figures_take_a_record(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "page.html"
    assert report.main([str(recorded), "--out", str(out), "--record", str(tmp_path / "new")]) == 0
    assert "run-s0" in out.read_text()
    printed = capsys.readouterr().out
    assert "record of 4 finished runs" in printed
    assert (tmp_path / "new" / RUNS).read_text() == (recorded / RUNS).read_text()
    assert figures.main([str(recorded), "--out", str(tmp_path / "f"), "--only", "chosen"]) == 0


def test_a_record_that_cannot_be_written_is_one_line(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    flags = [str(recorded), "--out", str(tmp_path / "p.html"), "--record", str(tmp_path / "file")]
    with pytest.raises(ConfigError, match="--record"):
        report.main(flags)


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def _with(name: str, value: str) -> Callable[[str], str]:
    """Changes a column of the first row."""

    def change(text: str) -> str:
        rows = _rows(text)
        rows[0][name] = value
        lines = [list(rows[0]), *(row.values() for row in rows)]
        return "\n".join(",".join(f'"{v}"' for v in line) for line in lines)

    return change


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        (RUNS, _with("lr", "[1"), "line 2"),
        (RUNS, _with("lr", "-1"), "--lr"),
        (RUNS, _with("views", "true"), "--views"),
        (RUNS, _with("recipe", "none"), "no recipe 'none'"),
        (RUNS, _with("run", "../../etc"), "cannot be the name"),
        (RUNS, _with("top1", "nan"), "finite"),
        (RUNS, _with("top1", ""), "no top1"),
        (RUNS, _with("validation_top1", ""), "no validation_top1"),
        (RUNS, lambda text: text + "a,b\n", "wrong number of columns"),
        (RUNS, lambda text: text + '"', "runs.csv"),
        (CURVES, _with("nll", "x"), "curves.csv, line 2"),
        (CURVES, lambda text: text.replace("epoch", "age"), "epoch"),
        (CONFIGS, lambda text: "[" * 100_000, "configs.json"),
        (CONFIGS, lambda text: json.dumps({"small-cifar": {"views": "x"}}), "--views"),
        (CONFIGS, lambda text: "{}", "no recipe"),
    ],
)
def test_a_wrong_record_is_skipped_with_the_reason(
    recorded: Path, file: str, change: Callable[[str], str], reason: str
) -> None:
    path = recorded / file
    path.write_text(change(path.read_text()))
    results = find_results([recorded])
    assert not results.runs
    (skipped,) = results.skipped
    assert reason in skipped.reason
    assert "\n" not in skipped.reason
    assert len(skipped.reason) < 500


def test_a_run_without_a_curve_has_none(runs_without_curves: Path) -> None:
    (run,) = read_record(runs_without_curves)
    assert run.records == []


@pytest.fixture
def runs_without_curves(tmp_path: Path) -> Path:
    runs = RunWriter(tmp_path / "runs", TrainConfig.from_flat(data="/d/set"))
    runs.add(0.5)
    write_record(tmp_path / "record", find_results([runs.root]).runs)
    (tmp_path / "record" / CURVES).unlink()
    return tmp_path / "record"
