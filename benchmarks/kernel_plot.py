"""The picture of benchmarks/kernels.py: forward+backward relative to cross_entropy versus K."""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contenders import BOTH, COPY
from records import machine_of

# Okabe and Ito's colors, which all kinds of color vision tell apart; markers for print in grey.
STYLES = {
    "native": ("#D55E00", "o"),
    "triton": ("#E69F00", "X"),
    "cuda": ("#CC79A7", "P"),
    "reference": ("#56B4E9", "s"),
    "compiled": ("#009E73", "^"),
    "linear": ("#0072B2", "D"),
    "literal-loop": ("#888888", "<"),
    "literal": ("#000000", "v"),
}
OTHER_STYLES = (("#8C510A", "*"), ("#762A83", "h"), ("#4D9221", "p"))

Row = Mapping[str, str]


def draw(run: Sequence[Row], path: Path) -> bool:
    """Time relative to cross_entropy versus K, a panel for each C; False if nothing can be drawn.

    Of forward+backward. A C that was measured with several B is drawn with that of the most K, and
    left out if that is one K and others have more.
    """
    try:
        logging.getLogger("matplotlib").setLevel(logging.WARNING)
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib, then --plot-only")
        return False
    rows = [
        row
        for row in run
        if row["quantity"] in (BOTH, COPY)
        and row["to_cross_entropy"]
        and row["contender"] != "cross_entropy-views"  # a few microseconds above cross_entropy
    ]
    if not rows:
        return False
    panels = [_panel(rows, classes) for classes in sorted({int(row["C"]) for row in rows})]
    most = max(len(_views(panel)) for panel in panels)
    panels = [panel for panel in panels if len(_views(panel)) > 1 or most == 1]
    views = sorted(set().union(*map(_views, panels)))
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(1.2 + 3 * columns, 1.7 + 2.3 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    handles: dict[str, Any] = {}
    for place, (ax, panel) in enumerate(zip(axes, panels, strict=False)):
        handles |= _draw_panel(ax, panel)
        ax.set_title(f"C = {int(panel[0]['C']):,}, B = {panel[0]['B']}", fontsize=10)
        ax.set_xlabel("views K", fontsize=9)
        ax.tick_params(labelsize=9, labelbottom=True)
        ax.set_xticks(views, [str(k) for k in views])
        if place % columns == 0:
            ax.set_ylabel("time / cross_entropy's", fontsize=9)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    what = f"{machine_of(rows[0])}, {rows[0]['dtype']}, average {rows[0]['average']}"
    title = "Loss and gradient: time relative to cross_entropy\n"
    figure.suptitle(title + textwrap.fill(what, 48 * columns), fontsize=11)
    names = sorted(handles, key=lambda name: [*STYLES, name].index(name))
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=2 * columns,
        fontsize=9,
        frameon=False,
    )
    figure.savefig(path, dpi=200)
    return True


def _panel(rows: Sequence[Row], classes: int) -> list[Row]:
    """The rows of a C with one B, in the order of K."""
    of = sorted((row for row in rows if int(row["C"]) == classes), key=lambda row: int(row["K"]))
    by_images = [[row for row in of if row["B"] == images] for images in {r["B"] for r in of}]
    return max(by_images, key=lambda panel: (len(_views(panel)), int(panel[0]["B"])))


def _views(panel: Sequence[Row]) -> set[int]:
    return {int(row["K"]) for row in panel}


def _draw_panel(ax: Any, panel: Sequence[Row]) -> dict[str, Any]:
    """Draws the lines of one C; gives them by the names of the legend."""
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    handles: dict[str, Any] = {}
    beside = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
    others = iter(OTHER_STYLES * len(panel))
    for name in dict.fromkeys(row["contender"] for row in panel):
        own = [row for row in panel if row["contender"] == name]
        k = [int(row["K"]) for row in own]
        ratio = [float(row["to_cross_entropy"]) for row in own]
        if name == "cross_entropy":
            ax.axhline(1, color="k", lw=1, zorder=1)
            ax.annotate("cross_\nentropy", (1, 1), xycoords=ax.get_yaxis_transform(), **beside)
            continue
        if name == COPY:
            ax.plot(k, ratio, "k--", lw=1, zorder=1)
            ax.annotate("copy", (1, ratio[-1]), xycoords=ax.get_yaxis_transform(), **beside)
            continue
        color, marker = STYLES.get(name) or next(others)
        handles |= {name: ax.plot(k, ratio, color=color, marker=marker, ms=5, lw=1.5)[0]}
        # The spread is the contender's own: cross_entropy's is gone in the ratio of each round.
        share = [r / float(row["median"]) for r, row in zip(ratio, own, strict=True)]
        band = (
            [s * float(row[edge]) for s, row in zip(share, own, strict=True)]
            for edge in ("p20", "p80")
        )
        ax.fill_between(k, *band, color=color, alpha=0.25, lw=0)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.grid(alpha=0.3, lw=0.5)
    return handles
