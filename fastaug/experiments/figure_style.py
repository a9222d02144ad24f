"""How all figures look: sizes of a paper's column, colors that everybody can tell apart."""

from __future__ import annotations

import io
import logging
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastaug.errors import ConfigError, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

COLUMN, PAGE = 3.3, 6.8
"""Inches across: one panel, and two or three of them."""
DPI = 200
_LETTERS_PER_INCH = 15
"""In 8 points."""
_NOTE_SIZE = 6.5
_MOST_NOTES = 3
_RC: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "figure.titlesize": 8,
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


class Look(NamedTuple):
    """Of an objective. Color, marker, and a word in the legend all say which it is."""

    label: str
    color: str
    marker: str


# Okabe and Ito's colors.
LOOKS = {
    "losses": Look("average losses", "#0072B2", "s"),
    "probs": Look("average probs", "#D55E00", "D"),
    "logits": Look("average logits", "#009E73", "v"),
}
BLACK, GREY, ORANGE = "#000000", "#666666", "#E69F00"


def new_figure(width: float, height: float) -> Figure:
    """A figure that belongs to no window system and no global state."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of its fonts
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "figures need matplotlib, which is not installed: pip install 'fastaug[paper]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def style() -> Any:
    """The context in which figures are drawn and written."""
    new_figure(1, 1)  # says what to install
    import matplotlib as mpl

    return mpl.rc_context(_RC)


def render(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """A figure as the bytes of a file; the same figure gives the same bytes."""
    file = io.BytesIO()
    with style():
        figure.savefig(file, format=kind, dpi=DPI, metadata={"Date": None} if kind == "svg" else {})
    return file.getvalue()


def plain(text: str) -> str:
    """Names of folders as they are: a dollar would begin a formula."""
    return printable(text).replace("$", r"\$")


def finish(
    figure: Figure, title: str, legend: Sequence[Sequence[Line2D]], notes: Sequence[str] = ()
) -> None:
    """Title above; below, one legend for all panels, and the notes: the figure grows by both.

    legend: groups of handles, which stay together where there is room.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure.suptitle("\n".join(_wrap(figure, title, 8)))
    lines = [line for note in _few(notes) for line in _wrap(figure, note, _NOTE_SIZE)]
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
    """Rows of a legend that is no wider than the figure: the groups in one row, as rows, as
    columns, or all below one another."""
    from matplotlib.lines import Line2D

    def filled(rows: list[list[Line2D]]) -> list[list[Line2D]]:
        blank = [Line2D([], [], linestyle="", label=" ")]
        longest = max(map(len, rows))
        return [[*row, *blank * (longest - len(row))] for row in rows]

    def letters(rows: list[list[Line2D]]) -> int:
        columns = zip(*rows, strict=True)
        return sum(max(len(str(h.get_label())) for h in column) + 8 for column in columns)

    rows, everything = filled(groups), [handle for group in groups for handle in group]
    transposed = [list(column) for column in zip(*rows, strict=True)]
    stacked = [[handle] for handle in everything]
    layouts = ([everything], rows, transposed, stacked)
    room = width * _LETTERS_PER_INCH
    return next((layout for layout in layouts if letters(layout) <= room), stacked)


def _few(notes: Sequence[str]) -> list[str]:
    """The console and the captions have those that find no room."""
    more = len(notes) - _MOST_NOTES
    return [*notes[:_MOST_NOTES], f"and {more} more"] if more > 0 else list(notes)


def _wrap(figure: Figure, text: str, size: float) -> list[str]:
    """Lines of the figure's width in letters of a size."""
    letters = figure.get_figwidth() * _LETTERS_PER_INCH * 8 / size
    return textwrap.wrap(plain(text), int(letters))


def views_axis(ax: Axes, views: Sequence[int], label: str) -> None:
    """Powers of two, evenly spaced, and named as they are."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(views), [str(number) for number in views])
    ax.minorticks_off()
    ax.set_xlabel(label)
