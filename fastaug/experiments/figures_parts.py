"""What the figures are put together from: measures, curves with their spread, the legend."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastaug.experiments.figure_style import BLACK, GREY, LOOKS
from fastaug.experiments.lookup import HOW, seeds_of
from fastaug.experiments.selection import Chosen, Selected

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


@dataclass(frozen=True)
class Drawn:
    """A figure, with what is to be said of it."""

    name: str
    """Kind and family, for names of files: accuracy-wrn-16-4-on-cifar-100-python."""
    title: str
    caption: str
    figure: Figure | None
    """None: the runs that it needs are not there, and the notes say which."""
    notes: tuple[str, ...] = ()
    """What is missing in it, and what else a reader must know."""


@dataclass(frozen=True)
class Measure:
    """A name of evaluation.Evaluation.measure, and how it is shown."""

    name: str
    title: str
    axis: str = "top-1 accuracy (%)"
    scale: float = 100.0


CENTRAL = Measure("top1", "central crop")
TTA = Measure("tta_top1", "TTA, averaged probabilities")
TTA_LOGITS = Measure("tta_logits_top1", "TTA, averaged logits")
INVARIANCE = Measure("invariance", "invariance (lower is better)", "pairwise KL (nats)", 1.0)


@dataclass(frozen=True)
class Curve:
    """Means over the seeds, and the smallest and largest value; nan where a run is missing."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]

    @property
    def gaps(self) -> list[float]:
        return [x for x, mean in zip(self.x, self.mean, strict=True) if math.isnan(mean)]

    @property
    def empty(self) -> bool:
        return len(self.gaps) == len(self.x)


def curve(points: Iterable[tuple[float, Chosen | None]], measure: Measure) -> Curve:
    """points: x, and what was chosen there."""
    found = Curve([], [], [], [])
    for x, chosen in points:
        values = [measure.scale * value for value in chosen.values(measure.name)] if chosen else []
        found.x.append(x)
        found.mean.append(sum(values) / len(values) if values else math.nan)
        found.low.append(min(values, default=math.nan))
        found.high.append(max(values, default=math.nan))
    return found


def draw_curve(ax: Axes, found: Curve, average: str, *, regularized: bool) -> None:
    """Solid and filled with the regularizer, dashed and hollow without it."""
    look = LOOKS[average]
    (line,) = ax.plot(
        found.x,
        found.mean,
        color=look.color,
        marker=look.marker,
        linestyle="-" if regularized else "--",
        markerfacecolor=look.color if regularized else "white",
        gid=f"{average} {HOW[regularized]}",
    )
    draw_spread(ax, found, look.color, line.get_zorder())


def draw_spread(ax: Axes, found: Curve, color: str, zorder: float = 2) -> None:
    """Bars from the smallest to the largest value, where there are several."""
    several = [
        (x, low, high)
        for x, low, high in zip(found.x, found.low, found.high, strict=True)
        if high > low
    ]
    if several:
        x, low, high = zip(*several, strict=True)
        ax.vlines(x, low, high, color=color, linewidth=1, zorder=zorder - 0.1, gid="spread")


def draw_point(ax: Axes, x: float, chosen: Chosen | None, measure: Measure, marker: str) -> None:
    """A black mark that is no part of a curve."""
    found = curve([(x, chosen)], measure)
    if not found.empty:
        size, edge, gid = (9, 1.8, "no augmentation") if marker == "+" else (6, 1.0, "K = 1")
        ax.plot(found.x, found.mean, marker, color=BLACK, ms=size, mew=edge, zorder=4, gid=gid)
        draw_spread(ax, found, BLACK, 4)


def objective_handles(averages: Iterable[str]) -> list[Line2D]:
    from matplotlib.lines import Line2D

    found = set(averages)
    return [
        Line2D([], [], color=look.color, marker=look.marker, label=look.label)
        for average, look in LOOKS.items()
        if average in found
    ]


def regularizer_handles(
    kl_weight: float, which: Iterable[bool], color: str = GREY, markers: str = "oo", of: str = ""
) -> list[Line2D]:
    """which: whether there are curves with it, and without. of: what the curves are of."""
    from matplotlib.lines import Line2D

    handles, found = [], set(which)
    if True in found:
        label = f"{of}regularized (λ = {kl_weight:g})"
        handles.append(Line2D([], [], color=color, marker=markers[0], label=label))
    if False in found:
        label = f"{of}not regularized"
        line = Line2D([], [], color=color, marker=markers[1], mfc="white", ls="--", label=label)
        handles.append(line)
    return handles


def mark_handle(marker: str, label: str) -> Line2D:
    from matplotlib.lines import Line2D

    size = 8 if marker == "+" else 6
    return Line2D([], [], color=BLACK, marker=marker, ls="", ms=size, mew=1.5, label=label)


def chosen_by(*selected: Selected) -> str:
    """For captions: what the points are, and how learning rates and epochs were chosen."""
    chosen = [chosen for one in selected for chosen in one.chosen.values()]
    images = {"held-out" if one.on == "validation" else "test" for one in selected}
    several = any(len(choice.runs) > 1 for choice in chosen)
    bars = ", with bars from the smallest to the largest value" if several else ""
    return (
        f"{'Means over' if several else 'Of'} {seeds_of(chosen)}{bars}; "
        "learning rate and epochs of each point are those with the best top-1 accuracy on the "
        f"{' or '.join(sorted(images))} images."
    )


def slug_of(text: str) -> str:
    """For names of files."""
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")
