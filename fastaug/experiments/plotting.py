"""Shared parts of the figures: style, curves with their spread over the seeds, legends."""

from __future__ import annotations

import io
import logging
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from fastaug.errors import ConfigError, printable
from fastaug.experiments.selection import REGULARIZER, Chosen, Selected
from fastaug.kernels.config import Average

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

FileKind = Literal["png", "svg"]

COLUMN, PAGE = 3.3, 6.8
"""Figure widths in inches: one panel, and two or three panels."""
DPI = 200
_LETTERS_PER_INCH = 15  # at 8 points
_NOTE_SIZE = 6.5
_MAX_NOTES = 3
_RC: Any = {
    "font.size": 8,
    **{f"{part}.titlesize": 8 for part in ("axes", "figure")},
    **{f"{part}.labelsize": 8 for part in ("axes", "xtick", "ytick")},
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "legend.columnspacing": 1.2,
    "svg.hashsalt": "fastaug",  # the same figure is the same file
}


class LineStyle(NamedTuple):
    """Style of a curve: label, color and marker."""

    label: str
    color: str
    marker: str


# Okabe and Ito's color-blind safe palette.
STYLES = {
    "losses": LineStyle("average losses", "#0072B2", "s"),
    "probs": LineStyle("average probs", "#D55E00", "D"),
    "logits": LineStyle("average logits", "#009E73", "v"),
}
BLACK, GREY, ORANGE = "#000000", "#666666", "#E69F00"
_VIEW_STYLES = {
    1: (BLACK, "o"),
    2: ("#56B4E9", "s"),
    4: (ORANGE, "D"),
    8: ("#CC79A7", "^"),
    16: ("#009E73", "v"),
}
"""Color and marker of the paper's K."""


@dataclass(frozen=True)
class Drawn:
    """A figure with its caption."""

    name: str
    """Kind and family, the stem of file names: accuracy-wrn-16-4-on-cifar-100-python."""
    title: str
    caption: str
    figure: Figure | None
    """None if runs are missing; the notes name them."""
    notes: tuple[str, ...] = ()
    """Missing runs and measures."""
    family: str = ""
    """Slug of the family that it shows; empty for several families."""

    def files(self) -> dict[str, bytes]:
        if self.figure is None:
            return {}
        return {f"{self.name}.{kind}": render(self.figure, kind) for kind in get_args(FileKind)}

    def markdown(self) -> str:
        notes = "".join(f"\n- {note}" for note in self.notes)
        text = f"### {self.title}\n\n![]({self.name}.png)\n\n{self.caption}\n{notes}"
        return "\n".join(map(printable, text.split("\n"))) + "\n"


@dataclass(frozen=True)
class Measure:
    """A measure of Evaluation.measure and how it is shown."""

    name: str
    title: str
    axis: str = "top-1 accuracy (%)"
    scale: float = 100.0

    def of(self, chosen: Chosen | None) -> list[float]:
        """Scaled values over the seeds; empty if there are no runs."""
        return [self.scale * value for value in chosen.values(self.name)] if chosen else []


CENTRAL = Measure("top1", "central crop")
TTA = Measure("tta_top1", "TTA, averaged probabilities")
TTA_LOGITS = Measure("tta_logits_top1", "TTA, averaged logits")
INVARIANCE = Measure("invariance", "invariance (lower is better)", "pairwise KL (nats)", 1.0)


@dataclass(frozen=True)
class Curve:
    """Mean, smallest and largest value over the seeds; nan where a run is missing."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]

    @property
    def gaps(self) -> list[float]:
        return [x for x, mean in zip(self.x, self.mean, strict=True) if math.isnan(mean)]

    @property
    def gap_list(self) -> str:
        return ", ".join(f"{x:g}" for x in self.gaps)

    @property
    def empty(self) -> bool:
        return len(self.gaps) == len(self.x)


def curve(points: Iterable[tuple[float, Sequence[float]]]) -> Curve:
    """A curve from (x, values over the seeds)."""
    found = Curve([], [], [], [])
    for x, values in points:
        found.x.append(x)
        found.mean.append(sum(values) / len(values) if values else math.nan)
        found.low.append(min(values, default=math.nan))
        found.high.append(max(values, default=math.nan))
    return found


def objective_curves(
    places: Sequence[tuple[float, Selected, int]], measure: Measure, averages: Iterable[Average]
) -> dict[tuple[Average, bool], Curve]:
    """A curve for each (average, regularized). places: (x, family, K) of the points."""
    return {
        (average, regularized): curve(
            (x, measure.of(one.at(views, average, regularized=regularized)))
            for x, one, views in places
        )
        for average in averages
        for regularized in REGULARIZER
    }


def draw_curve(ax: Axes, found: Curve, average: str, *, regularized: bool) -> None:
    """The curve of an objective."""
    gid = f"{average} {REGULARIZER[regularized]}"
    draw_line(ax, found, STYLES[average], gid, regularized=regularized)


def draw_line(ax: Axes, found: Curve, style: LineStyle, gid: str, *, regularized: bool) -> None:
    """Solid and filled with the regularizer, dashed and hollow without it."""
    (line,) = ax.plot(
        found.x,
        found.mean,
        color=style.color,
        marker=style.marker,
        linestyle="-" if regularized else "--",
        markerfacecolor=style.color if regularized else "white",
        gid=gid,
    )
    _draw_spread(ax, found, style.color, line.get_zorder())


def draw_point(ax: Axes, x: float, values: Sequence[float], marker: str, gid: str) -> None:
    """A black marker apart from the curves."""
    size, edge = (9, 1.8) if marker == "+" else (6, 1.0)
    found = curve([(x, values)])
    ax.plot(found.x, found.mean, marker, color=BLACK, ms=size, mew=edge, zorder=4, gid=gid)
    _draw_spread(ax, found, BLACK, 4)


def _draw_spread(ax: Axes, found: Curve, color: str, zorder: float) -> None:
    """Bars from the smallest to the largest value, where they differ."""
    points = zip(found.x, found.low, found.high, strict=True)
    if several := [point for point in points if point[2] > point[1]]:
        x, low, high = zip(*several, strict=True)
        ax.vlines(x, low, high, color=color, linewidth=1, zorder=zorder - 0.1, gid="spread")


def views_axis(ax: Axes, views: Sequence[int], label: str) -> None:
    """A logarithmic x axis with a tick for each number of views."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(views), [str(number) for number in views])
    ax.minorticks_off()
    ax.set_xlabel(label)


def objective_handles(averages: Iterable[str]) -> list[Line2D]:
    found = set(averages)
    return style_handles(style for average, style in STYLES.items() if average in found)


def view_styles(multiplicities: Iterable[int]) -> dict[int, LineStyle]:
    """Styles of curves for one K each, for the first five. The paper's K look alike in all
    figures."""
    shown = list(multiplicities)[: len(_VIEW_STYLES)]
    free = [style for k, style in _VIEW_STYLES.items() if k not in shown]
    styles = {k: _VIEW_STYLES.get(k) or free.pop(0) for k in shown}
    return {k: LineStyle(f"K = {k}", *style) for k, style in styles.items()}


def style_handles(styles: Iterable[LineStyle]) -> list[Line2D]:
    from matplotlib.lines import Line2D

    return [Line2D([], [], color=s.color, marker=s.marker, label=s.label) for s in styles]


def regularizer_handles(
    kl_weight: float, which: Iterable[bool], color: str = GREY, markers: str = "oo", of: str = ""
) -> list[Line2D]:
    """which: True for curves with the regularizer, False without. of: a prefix of the labels."""
    from matplotlib.lines import Line2D

    found = set(which)
    with_it, without = f"{of}regularized (λ = {kl_weight:g})", f"{of}not regularized"
    handles = {
        True: Line2D([], [], color=color, marker=markers[0], label=with_it),
        False: Line2D([], [], color=color, marker=markers[1], mfc="white", ls="--", label=without),
    }
    return [handle for regularized, handle in handles.items() if regularized in found]


def mark_handle(marker: str, label: str) -> Line2D:
    from matplotlib.lines import Line2D

    size = 8 if marker == "+" else 6
    return Line2D([], [], color=BLACK, marker=marker, ls="", ms=size, mew=1.5, label=label)


def selection_caption(*selected: Selected, chosen: str = "learning rate and epochs") -> str:
    """Part of a caption: number of seeds, and how learning rates and epochs were chosen."""
    counts = [len(own.runs) for one in selected for own in one.chosen.values()] or [0]
    low, high = min(counts), max(counts)
    seeds = f"{low} seed{'s' * (low != 1)}" if low == high else f"{low} to {high} seeds"
    bars = ", with bars from the smallest to the largest value" if high > 1 else ""
    images = {"held-out" if one.on == "validation" else "test" for one in selected}
    return (
        f"{'Means over' if high > 1 else 'From'} {seeds}{bars}; "
        f"each point has the {chosen} with the best top-1 accuracy on the "
        f"{' or '.join(sorted(images))} images."
    )


def new_figure(width: float, height: float) -> Figure:
    """A figure that needs no display and no global state."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it logs its fonts
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "figures need matplotlib, which is not installed: pip install 'fastaug[paper]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def style_context() -> Any:
    """The matplotlib settings for drawing and rendering figures."""
    new_figure(1, 1)  # raises if matplotlib is missing
    import matplotlib as mpl

    return mpl.rc_context(_RC)


def render(figure: Figure, kind: FileKind, description: str = "") -> bytes:
    """A figure as the bytes of a file; the same figure gives the same bytes."""
    file = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {}
    with style_context():
        described = metadata | ({"Description": description} if description else {})
        figure.savefig(file, format=kind, dpi=DPI, metadata=described)
    return file.getvalue()


def escape_math(text: str) -> str:
    """Text in which a dollar sign does not start a formula."""
    return printable(text).replace("$", r"\$")


def finish(
    figure: Figure, title: str, legend: Sequence[Sequence[Line2D]], notes: Sequence[str] = ()
) -> None:
    """Add the title, and one legend and the notes below the panels: the figure grows by both.

    legend: groups of handles, which stay together if they fit.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure.suptitle("\n".join(_wrap(figure, title, 8)))
    # The caption and the console have all notes.
    more = len(notes) - _MAX_NOTES
    shown = [*notes[:_MAX_NOTES], f"and {more} more"] if more > 0 else notes
    lines = [line for note in shown for line in _wrap(figure, note, _NOTE_SIZE)]
    rows = _arrange([list(group) for group in legend if group], figure.get_figwidth())
    for_notes = 0.115 * len(lines) + 0.04 if lines else 0.0
    for_legend = 0.167 * len(rows) + 0.12
    height = figure.get_figheight() + for_notes + for_legend
    figure.set_figheight(height)
    bottom = (for_notes + for_legend) / height
    rect = (0.0, bottom, 1.0, 1 - bottom)
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.06, rect=rect))
    figure.text(0.01, 0.005, "\n".join(lines), fontsize=_NOTE_SIZE, color=GREY, va="bottom")
    figure.legend(
        handles=[row[column] for column in range(len(rows[0])) for row in rows],
        loc="lower center",
        bbox_to_anchor=(0.5, for_notes / height),
        ncols=len(rows[0]),
    )


def _arrange(groups: list[list[Line2D]], width: float) -> list[list[Line2D]]:
    """Rows of a legend that fit the figure's width: all groups in one row, a row per group, a
    column per group, or one column."""
    from matplotlib.lines import Line2D

    def letters(rows: list[list[Line2D]]) -> int:
        columns = zip(*rows, strict=True)
        return sum(max(len(str(h.get_label())) for h in column) + 8 for column in columns)

    blank = [Line2D([], [], linestyle="", label=" ")]
    longest = max(map(len, groups))
    rows = [[*group, *blank * (longest - len(group))] for group in groups]
    handles = [handle for group in groups for handle in group]
    transposed = [list(column) for column in zip(*rows, strict=True)]
    stacked = [[handle] for handle in handles]
    room = width * _LETTERS_PER_INCH
    layouts = ([handles], rows, transposed)
    return next((layout for layout in layouts if letters(layout) <= room), stacked)


def _wrap(figure: Figure, text: str, size: float) -> list[str]:
    """Lines that fit the figure's width at this font size."""
    letters = figure.get_figwidth() * _LETTERS_PER_INCH * 8 / size
    return textwrap.wrap(escape_math(text), int(letters))
