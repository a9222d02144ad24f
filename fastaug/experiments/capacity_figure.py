"""The capacity figure: WideResNets with the same training, versus width and depth."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fastaug.experiments.plotting import (
    CENTRAL,
    COLUMN,
    INVARIANCE,
    PAGE,
    Drawn,
    Measure,
    draw_curve,
    finish,
    new_figure,
    objective_curves,
    objective_handles,
    regularizer_handles,
    selection_caption,
    views_axis,
)
from fastaug.experiments.published import same_but_model
from fastaug.experiments.results import slug_of
from fastaug.experiments.run import AVERAGES
from fastaug.experiments.selection import REGULARIZER, Selected, missing_objectives
from fastaug.kernels.config import Average

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WRN = re.compile(r"wrn-(\d+)-(\d+)")


class _Size(NamedTuple):
    depth: int
    width: int


_Group = dict[_Size, Selected]


class _Direction(NamedTuple):
    """One axis of the figure: families by width at one depth, or by depth at one width."""

    title: str
    label: str
    families: dict[int, Selected]


def capacity(selected: Sequence[Selected]) -> list[Drawn]:
    """A figure for each group of families that differ only in the WRN."""
    caption = (
        "WideResNets of several widths and depths: top-1 test accuracy on central crops (top) and "
        "invariance (bottom). Solid with the KL regularizer, dashed without it. "
    )
    drawn = [figure for group in _groups(selected) if (figure := _draw_capacity(group, caption))]
    if not drawn:
        note = "needs two wrn-D-W of different width or depth with equal settings and K > 1"
        return [Drawn("capacity", "Capacity", caption, None, (note,))]
    return drawn


def _groups(selected: Sequence[Selected]) -> list[_Group]:
    groups: list[_Group] = []
    for one in selected:
        if not (found := _WRN.fullmatch(one.family.config.model.model)):
            continue
        for group in groups:
            if same_but_model(next(iter(group.values())).family, one.family):
                break
        else:
            groups.append(group := {})
        group[_Size(int(found[1]), int(found[2]))] = one
    return groups


def _draw_capacity(group: _Group, caption: str) -> Drawn | None:
    ks = {k for one in group.values() for k in one.multiplicities if k > 1}
    # The largest K at which two networks can be compared.
    views, directions = next(
        ((k, found) for k in sorted(ks, reverse=True) if (found := _directions(group, k))), (0, [])
    )
    if not directions:
        return None
    first = next(iter(group.values()))
    data = Path(first.family.config.data.data).name
    title = f"Capacity: WRNs on {data}"
    columns = len(directions)
    figure = new_figure(PAGE if columns > 1 else COLUMN, 4.3)
    curves: set[tuple[Average, bool]] = set()
    notes: list[str] = []
    for place, (measure, direction) in enumerate(product((CENTRAL, INVARIANCE), directions), 1):
        ax = figure.add_subplot(2, columns, place)
        curves |= _draw_direction(ax, direction, measure, views, notes)
        ax.set_title(f"{direction.title}: {measure.title}")
    if absent := missing_objectives(curves, AVERAGES):
        notes.append(f"not run: {', '.join(absent)}")
    objectives = objective_handles(average for average, _ in curves)
    others = regularizer_handles(first.regularizer_weight, (how for _, how in curves))
    finish(figure, f"{title}, K = {views}", [objectives, others], notes)
    caption = f"{caption}K = {views} training views. {selection_caption(*group.values())}"
    return Drawn(f"capacity-{slug_of(data)}", title, caption, figure, tuple(notes))


def _draw_direction(
    ax: Axes, direction: _Direction, measure: Measure, views: int, notes: list[str]
) -> set[tuple[Average, bool]]:
    """Draw one panel; returns its curves, and adds missing points to the notes."""
    drawn = set()
    sizes = sorted(direction.families)
    places = [(size, direction.families[size], views) for size in sizes]
    for (average, regularized), found in objective_curves(places, measure, AVERAGES).items():
        if found.empty:
            continue
        draw_curve(ax, found, average, regularized=regularized)
        drawn.add((average, regularized))
        if found.gaps:
            what = f"average {average} {REGULARIZER[regularized]} has no {measure.name}"
            notes.append(f"{what} at {direction.label} {found.gap_list}")
    if direction.label == "width":
        views_axis(ax, sizes, "width")
    else:
        ax.set_xticks(sizes)
        ax.set_xlabel("depth")
    ax.set_ylabel(measure.axis)
    return drawn


def _directions(group: _Group, views: int) -> list[_Direction]:
    """The depth with most widths and the width with most depths; among equals the smaller network:
    the paper's 16 and 4."""
    sizes = sorted(size for size, one in group.items() if views in one.multiplicities)
    depths, widths = Counter(s.depth for s in sizes), Counter(s.width for s in sizes)
    depth = min(depths, key=lambda d: (-depths[d], d), default=0)
    width = min(widths, key=lambda w: (-widths[w], w), default=0)
    found = [
        _Direction(f"depth {depth}", "width", {s.width: group[s] for s in sizes if s[0] == depth}),
        _Direction(f"width {width}", "depth", {s.depth: group[s] for s in sizes if s[1] == width}),
    ]
    return [direction for direction in found if len(direction.families) > 1]
