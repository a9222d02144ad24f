"""Tables and figures of docs/paper.md, from the record in benchmarks/results/paper-small."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from statistics import fmean, median, stdev

from fastaug.experiments.compute_figure import Budgets, budgets
from fastaug.experiments.difference import Difference, difference
from fastaug.experiments.paper_figures import draw_figures
from fastaug.experiments.plotting import Drawn, render
from fastaug.experiments.selection import Chosen, select
from parts.paper_questions import (
    NORM_LONGER,
    NOT_RUN,
    QUESTIONS,
    STRONG_LONGER,
    Comparison,
    Question,
)
from parts.paper_record import Point, Record
from parts.results import Table

_TARGETS = (45, 46, 47, 48, 49, 50)
"""Accuracies in percent for the time table."""
_EPOCHS = 80
"""Length of most runs: the compute of one view for as long is 1 x."""


# --- tables ---


def claims(record: Record) -> list[str]:
    """Every claim with its main difference and what all of its differences say."""
    lines = []
    for question in QUESTIONS:
        row = next((r for r in question.rows if question.gap(record, r)), None)
        gap = question.gap(record, row) if row else None
        found = _text(gap, question.measure)
        unit = f"{found} {_UNITS[question.measure]}" if found else ""
        seeds = str(gap.seeds) if gap else ""
        cells = [row.text, unit, seeds, row.paper] if row else ["", "", "", ""]
        lines.append([question.text, *cells, question.summary(record)])
    head = ["claim", "difference", "here", "seeds", "in the paper", "seen"]
    return Table(head, lines).markdown()


def comparisons(record: Record) -> list[str]:
    """Every difference that was run with its standard error; those that count are bold."""
    lines, done = [], 0
    for question in QUESTIONS:
        found = [cells for row in question.rows if (cells := _comparison(record, question, row))]
        done += len(found)
        found = found or [["", "", "", "", "", "", NOT_RUN]]
        lines += [[question.text * (place == 0), *cells] for place, cells in enumerate(found)]
    head = ["claim", "difference", "top-1, points", "TTA, points", "invariance, nats", "seeds"]
    table = Table([*head, "in the paper", "seen"], lines).markdown()
    total = sum(len(question.rows) for question in QUESTIONS)
    return [*table, "", f"{done} of {total} differences have been run."]


def _comparison(record: Record, question: Question, row: Comparison) -> list[str]:
    """The cells of a row; empty if it was not run."""
    gap = question.gap(record, row)
    if gap is None:
        return []
    if question.minus:  # two measures of one setting
        texts = ["", _text(gap, question.measure), ""]
    else:
        one, other = record.chosen(row.one), record.chosen(row.other)
        assert one is not None
        assert other is not None
        texts = [_text(difference(one, other, name), name) for name, _ in _MEASURES]
    return [row.text, *texts, str(gap.seeds), row.paper, question.verdict(row, gap)]


def _text(gap: Difference | None, measure: str) -> str:
    if gap is None:
        return ""
    scale = dict(_MEASURES)[measure]
    digits = 1 if scale > 1 else 2
    mean = f"{scale * gap.mean:+.{digits}f}"
    if gap.seeds == 1:
        return mean
    text = f"{mean} ± {scale * gap.error:.{digits}f}"
    return f"**{text}**" if gap.is_clear else text


def settings(record: Record) -> list[str]:
    """Every setting with its chosen rate and its measures."""
    lines = []
    for (sweep, model), one in record.selected.items():
        chosen = select(one.family.runs, one.on, with_epochs=True)
        for setting, own in chosen.items():
            rate = f"2^{math.log2(own.lr):g}"
            cells = [_mean(own, name, scale) for name, scale in _MEASURES]
            nll = [run.records[-1]["nll"] for run in own.runs if run.records]
            fitted = f"{fmean(nll):.2f}" if nll else ""
            first = [sweep.removeprefix("small-"), model, setting.label]
            lines.append([*first, rate, str(len(own.runs)), *cells, fitted])
    head = ["sweep", "network", "setting", "rate", "seeds", "top-1 %", "TTA %", "invariance"]
    return Table([*head, "training nll"], lines).markdown()


_MEASURES = (("top1", 100.0), ("tta_top1", 100.0), ("invariance", 1.0))
_UNITS = {"top1": "points", "tta_top1": "points", "invariance": "nats"}


def _mean(chosen: Chosen, name: str, scale: float) -> str:
    values = [scale * value for value in chosen.values(name)]
    digits = 1 if scale > 1 else 2
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def time_to_accuracy(record: Record) -> list[str]:
    """Views and minutes to an accuracy, between the budgets that were run."""
    (one,) = record.of("small-compute") or [None]
    if one is None:
        return [NOT_RUN]
    found = budgets(one)
    if len(found) < 2:
        return [NOT_RUN]  # nothing to compare with
    speed = median(
        run.summary["timing"]["views_per_s"]
        for points in found.values()
        for chosen in points.values()
        for run in chosen.runs
    )
    lines = []
    for target in _TARGETS:
        costs = [cost_of(points, target / 100) for points in found.values()]
        if any(cost is not None for cost in costs):
            cells = (
                _cost_text(cost, speed, at_most=cost == min(points))
                for cost, points in zip(costs, found.values(), strict=True)
            )
            lines.append([f"{target}%", *cells])
    names = [f"K={k}" + (", λ=1" if how else ", λ=0" * (k > 1)) for k, how in found]
    return Table(["top-1", *names], lines).markdown()


def cost_of(points: Budgets, target: float) -> float | None:
    """Views to a mean top-1, interpolated over the logarithm of the views; None if no budget has
    it, and the smallest budget if that already has."""
    means = [(cost, chosen.mean("top1") or 0.0) for cost, chosen in points.items()]
    if means[0][1] >= target:
        return means[0][0]
    for (low, before), (high, after) in pairwise(means):
        if after >= target:
            share = (target - before) / (after - before)
            return low * (high / low) ** share
    return None


def _cost_text(cost: float | None, speed: float, *, at_most: bool) -> str:
    """at_most: the shortest runs reach it, and shorter ones may."""
    if cost is None:
        return "not reached"
    return f"{'≤ ' * at_most}{cost / 1e3:,.0f}k views, {cost / speed / 60:.1f} min"


def in_short(record: Record) -> list[str]:
    """Settings with averaged losses by their cost."""
    views, cost = partial(Point, "small-views"), partial(Point, "small-compute")
    points = {
        "K=1, 80 epochs": views(1),
        "K=2 + KL, 80 epochs": cost(2, kl_weight=1.0, epochs=80),
        "K=1, 160 epochs": cost(1, epochs=160),
        "K=4 + KL, 80 epochs": views(4, kl_weight=1.0),
        "K=4, 80 epochs": views(4),
        "K=1, 320 epochs": cost(1, epochs=320),
        "K=8 + KL, 80 epochs": views(8, kl_weight=1.0),
        "K=1, 640 epochs": cost(1, epochs=640),
        "K=4 + KL, 320 epochs": cost(4, kl_weight=1.0, epochs=320),
        "K=4, 320 epochs": cost(4, epochs=320),
        "K=1, 1,280 epochs": cost(1, epochs=1280),
    }
    measures = (*_MEASURES, ("nll", 1.0))
    lines = []
    for name, point in points.items():
        chosen = record.chosen(point)
        times = f"{point.views * (point.epochs or _EPOCHS) // _EPOCHS} x"
        if chosen is None:
            lines.append([name, times, "", *(NOT_RUN for _ in measures)])
        else:
            cells = [_mean(chosen, measure, scale) for measure, scale in measures]
            lines.append([name, times, str(len(chosen.runs)), *cells])
    head = ["setting", "compute", "seeds", "top-1 %", "TTA %", "invariance", "test loss"]
    return Table(head, lines).markdown()


_REGIMES = {
    "1,024 images": partial(Point, "small-compute"),
    "4,096 images": partial(Point, "small-data"),
    "1,024 images, batch norm": NORM_LONGER,
    "1,024 images, RandAugment": STRONG_LONGER,
    "256 images, fine-tuning": partial(Point, "small-finetune"),
}
"""Where K=4 for 80 epochs was compared with K=1 for as long and for four times as long."""


def gains(record: Record) -> list[str]:
    """Top-1 of four views minus that of one, at equal epochs and at equal compute."""
    lines = []
    for name, point in _REGIMES.items():
        cells, seeds = [], set()
        for weight in (1.0, 0.0):
            four = record.chosen(point(4, kl_weight=weight, epochs=80))
            for epochs in (80, 320):
                one = record.chosen(point(1, epochs=epochs))
                gap = difference(four, one, "top1") if four and one else None
                cells.append(_text(gap, "top1") or NOT_RUN)
                seeds |= {gap.seeds} if gap else set()
        lines.append([name, *cells, ", ".join(map(str, sorted(seeds)))])
    columns = [f"K=4{kl}, equal {what}" for kl in (" + KL", "") for what in ("epochs", "compute")]
    return Table(["", *columns, "seeds"], lines).markdown()


TABLES: Mapping[str, Callable[[Record], list[str]]] = {
    "paper-claims": claims,
    "paper-comparisons": comparisons,
    "paper-settings": settings,
    "paper-time": time_to_accuracy,
    "paper-short": in_short,
    "paper-gains": gains,
}


# --- figures ---


def figures(record: Record) -> Iterator[tuple[str, Drawn]]:
    """The figures by file name; those whose runs are missing are left out."""
    for sweep, kinds in _FIGURES.items():
        for one in record.of(sweep)[:1]:
            for kind in kinds:
                shown = record.of(sweep) if kind == "capacity" else [one]
                for drawn in draw_figures(shown, [kind]):
                    if drawn.figure is not None:
                        yield f"paper-{sweep.removeprefix('small-')}-{kind}.png", drawn


_FIGURES = {
    "small-views": ("extended", "curves"),
    "small-compute": ("compute", "curves"),
    "small-finetune": ("compute",),
    "small-lambda": ("kl-weight",),
    "small-randaugment": ("randaugment",),
    "small-randaugment-longer": ("compute",),
    "small-batchnorm": ("extended",),
    "small-batchnorm-longer": ("compute",),
    "small-capacity": ("capacity",),
    "small-data": ("compute", "curves"),
}


def png(drawn: Drawn, digest: str) -> bytes:
    """A figure as a file that names its record."""
    assert drawn.figure is not None
    return render(drawn.figure, "png", digest)
