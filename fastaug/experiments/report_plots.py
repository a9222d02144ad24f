"""Curves of the report as SVG: the metrics of runs over the epochs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from fastaug.experiments.comparison import evaluation_images
from fastaug.experiments.report_format import number, short
from fastaug.experiments.run import Run

Points = list[tuple[float, float]]

MAX_POINTS = 200
"""Points of a line."""
_MAX_POINTS_OF_ALL = 4000
"""Points of all lines of a plot, as far as that leaves each line enough."""
_MIN_POINTS = 40
_MAX_TICKS = 5
_MARGIN = 0.05
"""Share of the height that is left free above and below the lines."""
_FRAME = {"width": 400, "height": 230, "left": 52, "right": 388, "top": 12, "bottom": 190}
"""Size of a plot, and the box between its axes."""


class Series(NamedTuple):
    """A line of a plot."""

    name: str
    points: Points
    style: int
    """Number of its color and dash pattern in report.css; 0: gray."""
    run: str = ""
    """Anchor of its run, for plots of several runs."""


class Curve(NamedTuple):
    """A metric over the epochs."""

    metric: str
    title: str
    kind: str
    """Kind of the records that have it."""
    scale: float = 1.0


CURVES = (
    Curve("top1", "top-1 accuracy (%), {images}", "eval", 100.0),
    Curve("loss", "training loss", "train"),
    Curve("invariance", "invariance (nats), {images}", "eval"),
    Curve("nll", "nll (nats), {images}", "eval"),
    Curve("nll", "training nll (nats)", "train"),
    Curve("kl", "training kl (nats)", "train"),
)


def overlaid_plots(runs: Sequence[tuple[Run, Series]]) -> list[dict[str, Any]]:
    """A plot for each metric with a line for each run; the series come without points."""
    images = " or ".join(sorted({evaluation_images(run) for run, _ in runs}))
    plots = []
    for curve in CURVES:
        lines = [
            series._replace(points=_points(run.records, curve.kind, curve.metric, curve.scale))
            for run, series in runs
        ]
        plots.append(plot(curve.title.format(images=images), lines))
    return [found for found in plots if found]


def run_plots(run: Run) -> list[dict[str, Any]]:
    """Plots of one run: the training loss with its terms, top-1, and invariance."""
    images = evaluation_images(run)
    terms = ("loss", "nll", "kl")
    loss = [Series(n, _points(run.records, "train", n), s) for s, n in enumerate(terms, 1)]
    top1 = Series("top-1", _points(run.records, "eval", "top1", 100), 1)
    invariance = Series("invariance", _points(run.records, "eval", "invariance"), 1)
    plots = (
        plot("training loss", loss),
        plot(f"top-1 accuracy (%), {images}", [top1]),
        plot(f"invariance (nats), {images}", [invariance]),
    )
    return [found for found in plots if found]


def _points(
    records: Iterable[Mapping[str, Any]], kind: str, name: str, scale: float = 1.0
) -> Points:
    kinds = {kind, "partial"} if kind == "train" else {kind}
    found = (
        (number(record.get("epoch")), number(record.get(name)))
        for record in records
        if record.get("kind") in kinds
    )
    return [(x, scale * y) for x, y in found if x is not None and y is not None]


def plot(title: str, lines: Sequence[Series]) -> dict[str, Any] | None:
    """Lines over the epochs on one scale, as the template draws them; None without a point."""
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    x_low, x_high = _range([0.0, *(x for line in lines for x, _ in line.points)])
    y_low, y_high = _range([y for line in lines for _, y in line.points])
    margin = _MARGIN * (y_high - y_low)
    y_low, y_high = y_low - margin, y_high + margin
    left, right, top, bottom = (_FRAME[side] for side in ("left", "right", "top", "bottom"))

    def across(x: float) -> float:
        return left + (right - left) * (x - x_low) / (x_high - x_low)

    def down(y: float) -> float:
        return top + (bottom - top) * (y_high - y) / (y_high - y_low)

    most = max(_MIN_POINTS, min(MAX_POINTS, _MAX_POINTS_OF_ALL // len(lines)))
    shown = lines[:3]
    ends = ", ".join(f"{line.name} ends at {short(line.points[-1][1])}" for line in shown)
    more = f", and {len(lines) - len(shown)} more" if len(lines) > len(shown) else ""
    return {
        "title": title,
        "label": f"{title} over the epochs: {ends}{more}",
        "frame": _FRAME,
        "x_ticks": [(f"{across(x):.1f}", f"{x:.6g}") for x in ticks(x_low, x_high)],
        "y_ticks": [(f"{down(y):.1f}", f"{y:.6g}") for y in ticks(y_low, y_high)],
        # Gray lines first, below the others.
        "lines": [
            {
                "name": line.name,
                "style": line.style,
                "run": line.run,
                "points": " ".join(
                    f"{across(x):.1f},{down(y):.1f}" for x, y in thinned(line.points, most)
                ),
            }
            for line in sorted(lines, key=lambda line: line.style > 0)
        ],
    }


def ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten in a range, at most _MAX_TICKS."""
    power = 10.0 ** math.floor(math.log10((high - low) / _MAX_TICKS))
    for factor in (1, 2, 5, 10, 20):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < _MAX_TICKS:
            break
    return [place * step for place in range(first, last + 1)]


def thinned(points: Points, most: int = MAX_POINTS) -> Points:
    """The first and last point, and the lowest and highest of each interval between them: spikes
    stay visible."""
    if len(points) <= most:
        return points
    first, *between, last = points
    intervals = (most - 2) // 2
    cuts = [place * len(between) // intervals for place in range(intervals + 1)]
    kept = [first]
    for start, end in pairwise(cuts):
        part = between[start:end]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return [*kept, last]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest value; a single value gets a margin and lies in the middle."""
    low, high = min(values), max(values)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    margin = abs(low) / 2 or 0.5
    return low - margin, high + margin
