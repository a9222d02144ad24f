"""Figures read back from their axes, against numbers that the test has made up."""

from __future__ import annotations

import builtins
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from PIL import Image
from run_folders import RunWriter, measures, write_run
from source_imports import imports

from fastaug import cli, figures
from fastaug.config import TrainConfig
from fastaug.experiments.paper_figures import FIGURES, draw_figures
from fastaug.experiments.plotting import Drawn, view_styles
from fastaug.experiments.record import write_record
from fastaug.experiments.results import find_results
from fastaug.experiments.selection import select_families
from fastaug.experiments.tables import TABLES

BASE = TrainConfig.from_flat(
    recipe="cifar100-wrn-16-4", model="wrn-16-4", data="/data/cifar", views=1, batch_size=64, tta=4
)
WITH, WITHOUT = "with the regularizer", "without the regularizer"
Lines = dict[str, tuple[list[float], list[float]]]


@pytest.fixture
def runs(tmp_path: Path) -> RunWriter:
    return RunWriter(tmp_path / "runs", BASE)


def draw_one(runs: RunWriter, kind: str) -> Drawn:
    (drawn,) = draw_figures(runs.select(), [kind])
    return drawn


@pytest.fixture(scope="module")
def grid_folder(tmp_path_factory: pytest.TempPathFactory) -> RunWriter:
    """K = 1, 2, 4 of all objectives; two seeds of one setting; logits miss K=2 regularized."""
    runs = RunWriter(tmp_path_factory.mktemp("grid") / "runs", BASE)
    runs.add(0.60)
    runs.add(0.50, augment="none")
    for views in (2, 4):
        for place, average in enumerate(("losses", "probs", "logits")):
            for weight in (0.0, 1.0):
                if (views, average, weight) != (2, "logits", 1.0):
                    top1 = 0.6 + 0.01 * views + 0.001 * place + 0.05 * weight
                    runs.add(top1, views=views, average=average, kl_weight=weight)
    runs.add(0.66, views=4, average="losses", kl_weight=0.0, seed=1)  # the other has 0.64
    return runs


@pytest.fixture(scope="module")
def grid(grid_folder: RunWriter) -> Callable[[str], Drawn]:
    """The grid's figure of a kind, drawn once."""
    return cache(lambda kind: draw_one(grid_folder, kind))


def axes(drawn: Drawn) -> list[Axes]:
    assert drawn.figure is not None
    return drawn.figure.axes


def lines(ax: Axes) -> Lines:
    return {
        str(line.get_gid()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in ax.get_lines()
    }


def bars(ax: Axes) -> list[tuple[float, float, float]]:
    """x, low, high."""
    spreads = [found for found in ax.collections if found.get_gid() == "spread"]
    assert all(isinstance(found, LineCollection) for found in spreads)
    return [(s[0][0], s[0][1], s[1][1]) for found in spreads for s in found.get_segments()]


def test_accuracy_versus_views(grid: Callable[[str], Drawn]) -> None:
    drawn = grid("accuracy")
    central, tta = axes(drawn)
    found = lines(central)
    assert found[f"losses {WITHOUT}"] == ([1, 2, 4], pytest.approx([60, 62, 65]))
    assert found[f"losses {WITH}"] == ([1, 2, 4], pytest.approx([60, 67, 69]))
    assert found[f"probs {WITHOUT}"] == ([1, 2, 4], pytest.approx([60, 62.1, 64.1]))
    assert found[f"logits {WITH}"][1] == pytest.approx([60, math.nan, 69.2], nan_ok=True)
    assert found["K = 1"] == ([1], [60])
    assert found["no augmentation"] == ([1], [50])
    assert len(found) == 8
    assert bars(central) == [(4, pytest.approx(64), pytest.approx(66))]
    assert lines(tta)[f"losses {WITHOUT}"][1] == pytest.approx([62, 64, 67])
    assert central.get_ylabel() == "top-1 accuracy (%)"
    assert [tick.get_text() for tick in central.get_xticklabels()] == ["1", "2", "4"]
    assert central.get_xscale() == "log"
    assert "TTA with 4 views" in tta.get_title()
    assert list(drawn.notes) == [f"not run at K = 2: average logits {WITH}"]
    assert "1 to 2 seeds" in drawn.caption
    assert drawn.name == "accuracy-wrn-16-4-on-cifar"


def test_objectives_differ_by_more_than_color(grid: Callable[[str], Drawn]) -> None:
    (central, _) = axes(grid("accuracy"))
    by_gid = {str(line.get_gid()): line for line in central.get_lines()}
    of = [by_gid[f"{average} {WITH}"] for average in ("losses", "probs", "logits")]
    assert len({line.get_marker() for line in of}) == len({line.get_color() for line in of}) == 3
    assert {line.get_linestyle() for line in of} == {"-"}
    assert by_gid[f"losses {WITHOUT}"].get_linestyle() == "--"
    assert by_gid["no augmentation"].get_marker() == "+"


def test_invariance_is_in_nats(grid: Callable[[str], Drawn]) -> None:
    (ax,) = axes(grid("invariance"))
    assert lines(ax)[f"losses {WITHOUT}"][1] == pytest.approx([0.4, 0.38, 0.35])
    assert lines(ax)["no augmentation"] == ([1], [0.5])
    assert "nats" in ax.get_ylabel()


def test_extended_has_both_averages_of_views(grid: Callable[[str], Drawn]) -> None:
    panels = {ax.get_title(): lines(ax)[f"probs {WITH}"][1][-1] for ax in axes(grid("extended"))}
    assert panels == {
        "central crop": pytest.approx(69.1),
        "invariance (lower is better)": pytest.approx(0.309),
        "TTA with 4 views, averaged probabilities": pytest.approx(71.1),
        "TTA with 4 views, averaged logits": pytest.approx(70.1),
    }


def test_runs_without_views_at_test_time_leave_a_panel_out(runs: RunWriter) -> None:
    runs.add(0.6, without="tta")
    runs.add(0.7, without="tta", views=2, kl_weight=0.0)
    drawn = draw_one(runs, "accuracy")
    assert [ax.get_title() for ax in axes(drawn)] == ["central crop"]
    assert any("tta_top1" in note for note in drawn.notes)
    assert draw_one(runs, "test-views").figure is None


def test_kl_weight(runs: RunWriter) -> None:
    """probs have only two weights, and K=2 has fewer runs than K=4."""
    for weight in (0.0, 0.5, 2.0):
        runs.add(0.60 + 0.01 * weight, views=4, kl_weight=weight)
        runs.add(0.50, views=2, kl_weight=weight)
    runs.add(0.70, views=4, kl_weight=0.5, seed=1)
    for weight in (0.0, 0.5):
        runs.add(0.6, views=4, kl_weight=weight, average="probs")
    accuracy, invariance = axes(draw_one(runs, "kl-weight"))
    assert lines(accuracy) == {f"losses {WITH}": ([0.0, 0.5, 2.0], pytest.approx([60, 65.25, 62]))}
    assert bars(accuracy) == [(0.5, pytest.approx(60.5), pytest.approx(70))]
    assert lines(invariance)[f"losses {WITH}"][1] == pytest.approx([0.4, 0.3475, 0.38])
    assert accuracy.get_xscale() == "linear"
    assert accuracy.get_xlim()[0] <= 0
    assert "K = 4" in accuracy.figure.get_suptitle()


@pytest.mark.parametrize(
    ("weights", "taken"),
    [
        ([(2, 0.5), (4, 0.5), (4, 1.0)], 1.0),  # the paper's
        ([(2, 0.5), (4, 0.5), (4, 2.0)], 0.5),  # what most have
        ([(4, 0.5), (4, 4.0)], 0.5),  # the nearer to the paper's
        ([(4, 0.1), (4, 1.2)], 1.2),
        ([(4, 0.0)], 1.0),
    ],
)
def test_which_weight_is_the_regularizer(
    runs: RunWriter, weights: list[tuple[int, float]], taken: float
) -> None:
    for views, weight in weights:
        runs.add(0.6, views=views, kl_weight=weight)
    assert runs.select_one().regularizer_weight == taken


def test_views_at_test_time(grid: Callable[[str], Drawn]) -> None:
    panels = {ax.get_title(): ax for ax in axes(grid("test-views"))}
    assert list(panels) == ["average losses", "average probs", "average logits"]
    losses = lines(panels["average losses"])
    assert losses[f"losses {WITHOUT}"] == ([1, 2, 4], pytest.approx([65.1, 65.2, 65.4]))
    assert losses[f"losses {WITH}"] == ([1, 2, 4], pytest.approx([69.1, 69.2, 69.4]))
    assert losses[f"central crop {WITHOUT}"][1] == pytest.approx([65, 65, 65])
    assert losses[f"central crop {WITH}"][1] == pytest.approx([69, 69, 69])
    markers = {
        str(line.get_gid()): (line.get_marker(), line.get_linestyle())
        for line in panels["average losses"].get_lines()
    }
    assert markers[f"central crop {WITH}"] == ("^", "-")
    assert markers[f"central crop {WITHOUT}"] == ("o", "--")


def test_capacity(runs: RunWriter) -> None:
    tops = {"16-4": 0.60, "16-8": 0.62, "16-16": 0.64, "22-4": 0.61, "28-4": 0.65}
    for size, top1 in tops.items():
        settings = {"views": 16, "model": f"wrn-{size}"}
        runs.add(top1, **settings, kl_weight=0.0, recipe=f"cifar100-wrn-{size}")
        if size != "16-8":
            runs.add(top1 + 0.1, **settings, kl_weight=1.0)
    runs.add(0.9, model="wrn-40-4", views=16, data="/data/other")  # other images
    runs.add(0.9, model="wrn-40-4", views=16, weight_decay=0.1)  # trained otherwise
    runs.add(0.9, model="wrn-10-4", views=1)  # another K
    drawn = draw_one(runs, "capacity")
    width, depth, width_invariance, _ = axes(drawn)
    assert lines(width) == {
        f"losses {WITHOUT}": ([4, 8, 16], pytest.approx([60, 62, 64])),
        f"losses {WITH}": ([4, 8, 16], pytest.approx([70, math.nan, 74], nan_ok=True)),
    }
    assert lines(depth)[f"losses {WITHOUT}"] == ([16, 22, 28], pytest.approx([60, 61, 65]))
    assert lines(width_invariance)[f"losses {WITHOUT}"][1] == pytest.approx([0.4, 0.38, 0.36])
    assert width.get_title().startswith("depth 16")
    assert depth.get_title().startswith("width 4")
    gaps = [f"average losses {WITH} has no {name} at width 8" for name in ("top1", "invariance")]
    assert list(drawn.notes) == [*gaps, "not run: average probs, average logits"]


def test_randaugment_has_a_row_for_each_network(runs: RunWriter) -> None:
    for model in ("nf_resnet101", "nfnet_f0"):
        for views in (1, 2):
            top1 = 0.7 + 0.01 * views
            runs.add(top1, model=model, views=views, augment="randaugment", kl_weight=0.0)
    runs.add(0.9, model="nf_resnet101", views=2, augment="randaugment", average="probs")
    runs.add(0.9, views=2)
    drawn = draw_one(runs, "randaugment")
    assert [ax.get_title() for ax in axes(drawn)] == [
        f"{model}, {measure}"
        for model in ("nf_resnet101", "nfnet_f0")
        for measure in ("central crop", "invariance (lower is better)")
    ]
    for ax in axes(drawn)[::2]:
        assert lines(ax) == {
            f"losses {WITHOUT}": ([1, 2], pytest.approx([71, 72])),
            "K = 1": ([1], [pytest.approx(71)]),
        }
    assert drawn.name == "randaugment-cifar"


def test_compute_has_a_point_for_each_budget(tmp_path: Path) -> None:
    runs = RunWriter(tmp_path / "runs", BASE)
    # (K, weight, epochs, lr, held-out, test); a run has 100 steps of 64 views.
    for views, weight, epochs, lr, held_out, top1 in (
        (1, 0.0, 8, 0.1, 0.50, 0.60),
        (1, 0.0, 8, 0.2, 0.49, 0.99),  # better on the test images, and not chosen
        (1, 0.0, 16, 0.1, 0.51, 0.61),
        (4, 0.0, 2, 0.1, 0.50, 0.57),
        (4, 1.0, 2, 0.1, 0.50, 0.58),
        (4, 1.0, 4, 0.1, 0.50, 0.66),
        (4, 5.0, 4, 0.1, 0.50, 0.10),  # neither without nor with the regularizer's weight
    ):
        folder = runs.add(
            top1, held_out=held_out, views=views, kl_weight=weight, epochs=epochs, lr=lr
        )
        summary = json.loads((folder / "summary.json").read_text())
        summary["step"] = 100 * epochs * views
        (folder / "summary.json").write_text(json.dumps(summary))
    drawn = draw_one(runs, "compute")
    central, tta = axes(drawn)
    short, long = 100 * 8 * 64, 100 * 16 * 64
    assert lines(central) == {
        f"K=1 {WITHOUT}": ([short, long], pytest.approx([60, 61])),
        f"K=4 {WITHOUT}": ([short], pytest.approx([57])),
        f"K=4 {WITH}": ([short, long], pytest.approx([58, 66])),
    }
    assert lines(tta)[f"K=4 {WITH}"][1] == pytest.approx([60, 68])
    assert [tick.get_text() for tick in central.get_xticklabels()] == ["51k", "102k"]
    assert "each point has the learning rate with the best" in drawn.caption


def test_a_number_of_views_looks_alike_in_all_figures() -> None:
    few, many = view_styles([1, 4, 8]), view_styles([1, 2, 3, 4, 8, 16])
    assert [few[k] for k in few] == [many[k] for k in few]
    assert list(many) == [1, 2, 3, 4, 8]
    assert len({(style.color, style.marker) for style in many.values()}) == 5


def test_curves_are_means_over_parts_and_seeds(tmp_path: Path) -> None:
    for place, (views, weight, seed) in enumerate(((1, 0.0, 0), (4, 1.0, 0), (4, 1.0, 1))):
        config = BASE.replace(views=views, kl_weight=weight, seed=seed, epochs=24)
        records = [
            {
                "kind": "train",
                "step": epoch,
                "epoch": float(epoch),
                "nll": 1.0 + place + epoch / 100,
                "kl": 0.1 * place,
            }
            for epoch in range(1, 25)
        ]
        write_run(tmp_path / f"run-{place}", config, measures(0.5), lines=records)
    (drawn,) = draw_figures(select_families(find_results([tmp_path])), ["curves"])
    nll, kl = axes(drawn)
    found = lines(nll)
    # Twelve parts of two epochs: the first has 1 and 2, the last one 23 and 24.
    x, y = found[f"K=1 {WITHOUT}"]
    assert (len(x), x[0], x[-1]) == (12, pytest.approx(100 / 12), 100)
    assert (y[0], y[-1]) == (pytest.approx(1.015), pytest.approx(1.235))
    _, y = found[f"K=4 {WITH}"]
    assert (y[0], y[-1]) == (pytest.approx(2.515), pytest.approx(2.735))
    assert bars(nll)[0] == pytest.approx((100 / 12, 2.015, 3.015))
    assert lines(kl) == {f"K=4 {WITH}": (pytest.approx(x), pytest.approx([0.15] * 12))}


def test_curves_of_a_record_are_those_of_its_runs(tmp_path: Path) -> None:
    """29 records: the twelve parts do not end at twelfths of the run."""
    records = [
        {"kind": "train", "step": n, "epoch": 24 * n / 29, "nll": float(n), "kl": 0.0}
        for n in range(1, 30)
    ]
    config = BASE.replace(views=1, epochs=24)
    write_run(tmp_path / "run/first", config, measures(0.5), lines=records)
    write_record(tmp_path / "record", find_results([tmp_path / "run"]).runs)
    for folder in ("run", "record"):
        (drawn,) = draw_figures(select_families(find_results([tmp_path / folder])), ["curves"])
        x, y = lines(axes(drawn)[0])[f"K=1 {WITHOUT}"]
        assert x == pytest.approx([100 * part / 12 for part in range(1, 13)])
        # The first part has records 1 and 2, the second 3 and 4, the third 5, 6 and 7; the last 27
        # to 29.
        assert [*y[:3], y[-1]] == pytest.approx([1.5, 3.5, 6, 28])


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("curves", "metrics.jsonl"),
        ("kl-weight", "3 KL weights"),
        ("capacity", "wrn-D-W"),
        ("compute", "several numbers of epochs"),
        ("randaugment", "--augment"),
    ],
)
def test_a_figure_without_its_runs_names_them(
    grid: Callable[[str], Drawn], kind: str, named: str
) -> None:
    drawn = grid(kind)
    assert drawn.figure is None
    (note,) = drawn.notes
    assert named in note


def test_one_multiplicity_is_no_curve(runs: RunWriter) -> None:
    runs.add(0.6, views=4)
    drawn = draw_one(runs, "accuracy")
    assert drawn.figure is None
    (note,) = drawn.notes
    assert "K = 4" in note


def test_names_are_unique(runs: RunWriter) -> None:
    """Two data sets whose folders have the same name, trained differently."""
    for decay in (0.1, 0.2):
        runs.add(0.6, weight_decay=decay)
        runs.add(0.7, weight_decay=decay, views=2)
        runs.add(0.7, weight_decay=decay, views=2, model="wrn-16-8")
    names = [drawn.name for drawn in draw_figures(runs.select())]
    assert len(set(names)) == len(names)
    assert {"capacity-cifar", "capacity-cifar-2"} <= set(names)


@pytest.mark.parametrize("kind", ["toy", "accuracy", "invariance", "extended", "test-views"])
def test_no_text_is_cut_and_the_legend_covers_no_panel(
    grid: Callable[[str], Drawn], kind: str
) -> None:
    figure = grid(kind).figure
    assert figure is not None
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    shown = figure.get_tightbbox(canvas.get_renderer())
    width, height = figure.get_size_inches()
    assert 0 <= shown.x0 < shown.x1 <= width
    assert 0 <= shown.y0 < shown.y1 <= height
    (legend,) = figure.legends
    below = [legend.get_window_extent(), *(text.get_window_extent() for text in figure.texts)]
    for covered in below:
        for ax in figure.axes:
            assert not covered.overlaps(ax.get_tightbbox())


def test_a_name_with_dollars_is_no_formula_and_renders_the_same_twice(runs: RunWriter) -> None:
    runs.add(0.6, data="/data/$x_{$")
    runs.add(0.7, data="/data/$x_{$", views=2)
    files = [draw_one(runs, "invariance").files() for _ in range(2)]
    assert files[0] == files[1]
    assert [name.rpartition(".")[2] for name in files[0]] == ["png", "svg"]
    assert next(iter(files[0].values())).startswith(b"\x89PNG")


def test_the_command_writes_and_lists(
    grid_folder: RunWriter, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_text(json.dumps(BASE.to_flat()))
    only = ["--only", "invariance", "kl-weight", "results"]
    assert figures.main([str(grid_folder.root), str(half), *only]) == 0
    printed = capsys.readouterr().out.splitlines()
    out = grid_folder.root / "figures"
    stem = "invariance-wrn-16-4-on-cifar"
    names = [f"{stem}.png", f"{stem}.svg", "results.md", "results.tex", "figures.md"]
    assert printed[-len(names) :] == [str(out / name) for name in names]
    assert sorted(file.name for file in out.iterdir()) == sorted(names)
    assert str(half) in printed[0]
    assert any(line.startswith("kl-weight-wrn-16-4-on-cifar: not drawn: ") for line in printed)
    with Image.open(out / f"{stem}.png") as image:
        assert image.width == 660  # 3.3 inches of 200 dpi
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 10
    page = (out / "figures.md").read_text()
    assert f"![]({stem}.png)" in page
    assert "### Results" in page


def test_the_toy_example_needs_no_runs(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    assert figures.main([str(tmp_path), "--only", "toy", "--out", str(out)]) == 0
    assert {file.name for file in out.iterdir()} == {"toy.png", "toy.svg", "figures.md"}


@pytest.mark.parametrize("only", [[], ["--only", "toy", "accuracy"], ["--only", "results"]])
def test_a_folder_without_finished_runs_is_an_error(
    only: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert str(tmp_path) in error_of([str(tmp_path), *only], capsys)
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    (stopped / "config.json").write_text(json.dumps(BASE.to_flat()))
    assert str(stopped) in error_of([str(tmp_path), *only], capsys)
    assert [file.name for file in tmp_path.iterdir()] == ["stopped"], "nothing was written"


def error_of(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.run(figures.main, args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["/nowhere"], "/nowhere"),
        ([], "RUNS"),
        ([".", "--only", "acuracy"], "did you mean accuracy?"),
        ([".", "--select-on", "train"], "--select-on"),
        ([".", "--only", "toy", "--out", __file__], f"--out {__file__}"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named in error_of(args, capsys)


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Any] = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    error = error_of([str(tmp_path), "--only", "toy"], capsys)
    assert "pip install 'fastaug[paper]'" in error


def test_the_help_names_every_figure_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        figures.main(["--help"])
    words = set(capsys.readouterr().out.replace(",", " ").replace(";", " ").split())
    assert {*FIGURES, *TABLES} <= words


def test_importing_needs_no_matplotlib() -> None:
    """Nor does the rest of fastaug; TYPE_CHECKING is not the top level."""
    for file in Path(figures.__file__).parent.glob("experiments/*.py"):
        assert not [n for n, top in imports(file.read_text()) if top and "matplotlib" in n], file
