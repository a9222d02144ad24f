"""The figure of the networks' capacity: WRNs that were trained alike, versus width and depth."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fastaug.experiments.figure_style import (
    COLUMN,
    PAGE,
    finish,
    new_figure,
    views_axis,
)
from fastaug.experiments.figures_parts import (
    CENTRAL,
    INVARIANCE,
    Drawn,
    Measure,
    chosen_by,
    curve,
    draw_curve,
    objective_handles,
    regularizer_handles,
    slug_of,
)
from fastaug.experiments.lookup import AVERAGES, HOW, chosen_at, kl_weight_of, views_of
from fastaug.experiments.published import same_but_model
from fastaug.experiments.selection import Selected

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WRN = re.compile(r"wrn-(\d+)-(\d+)")
_CAPTION = (
    "WideResNets of several widths and depths: top-1 test accuracy on central crops (above) and "
    "invariance (below). Solid with the KL regularizer, dashed without it. "
)


class _Size(NamedTuple):
    depth: int
    width: int


Group = dict[_Size, Selected]


class _Direction(NamedTuple):
    """Networks that grow in one way: families by width at one depth, or by depth at one width."""

    title: str
    label: str
    families: dict[int, Selected]


def capacity(selected: Sequence[Selected]) -> list[Drawn]:
    """One figure for each group of families that differ in the WRN alone."""
    drawn = [figure for group in _groups(selected) if (figure := _draw(group))]
    if not drawn:
        note = "no two wrn-D-W that differ in width or depth alone were trained alike at one K > 1"
        return [Drawn("capacity", "Capacity", _CAPTION, None, (note,))]
    return drawn


def _groups(selected: Sequence[Selected]) -> list[Group]:
    groups: list[Group] = []
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


def _draw(group: Group) -> Drawn | None:
    views = _largest_common_views(group)
    directions = [d for d in _directions(group, views) if len(d.families) > 1]
    if not directions:
        return None
    first = next(iter(group.values()))
    data = Path(first.family.config.data.data).name
    title = f"Capacity: WRNs on {data}"
    columns = len(directions)
    figure = new_figure(PAGE if columns > 1 else COLUMN, 4.3)
    curves: set[tuple[str, bool]] = set()
    notes: list[str] = []
    panels = product((CENTRAL, INVARIANCE), directions)
    for place, (measure, direction) in enumerate(panels, start=1):
        ax = figure.add_subplot(2, columns, place)
        curves |= _panel(ax, direction, measure, views, notes)
        ax.set_title(f"{direction.title}: {measure.title}")
    objectives = objective_handles(average for average, _ in curves)
    others = regularizer_handles(kl_weight_of(first), (regularized for _, regularized in curves))
    finish(figure, f"{title}, K = {views}", [objectives, others], notes)
    caption = f"{_CAPTION}K = {views} training views. {chosen_by(*group.values())}"
    return Drawn(f"capacity-{slug_of(data)}", title, caption, figure, tuple(notes))


def _panel(
    ax: Axes, direction: _Direction, measure: Measure, views: int, notes: list[str]
) -> set[tuple[str, bool]]:
    """The curves that were drawn; what is missing is added to the notes."""
    drawn = set()
    sizes = sorted(direction.families)
    for average in AVERAGES:
        for regularized, how in HOW.items():
            points = []
            for size in sizes:
                family = direction.families[size]
                weight = kl_weight_of(family) if regularized else 0.0
                points.append((size, chosen_at(family, views, average, weight)))
            found = curve(points, measure)
            if not found.empty:
                draw_curve(ax, found, average, regularized=regularized)
                drawn.add((average, regularized))
            if found.gaps:
                at = ", ".join(f"{gap:g}" for gap in found.gaps)
                what = f"average {average} {how} has no {measure.name}"
                notes.append(f"{what} at {direction.label} {at}")
    if direction.label == "width":
        views_axis(ax, sizes, "width")
    else:
        ax.set_xticks(sizes)
        ax.set_xlabel("depth")
    ax.set_ylabel(measure.axis)
    return drawn


def _directions(group: Group, views: int) -> list[_Direction]:
    """At the depth that has most widths and at the width that has most depths; of equals the
    smaller network: the paper's 16 and 4."""
    sizes = sorted(size for size, one in group.items() if views in views_of(one))
    depths, widths = Counter(s.depth for s in sizes), Counter(s.width for s in sizes)
    depth = min(depths, key=lambda d: (-depths[d], d), default=0)
    width = min(widths, key=lambda w: (-widths[w], w), default=0)
    return [
        _Direction(f"depth {depth}", "width", {s.width: group[s] for s in sizes if s[0] == depth}),
        _Direction(f"width {width}", "depth", {s.depth: group[s] for s in sizes if s[1] == width}),
    ]


def _largest_common_views(group: Group) -> int:
    """The largest K at which two networks can be compared; 0 if there is none."""
    for views in sorted(
        {k for one in group.values() for k in views_of(one) if k > 1}, reverse=True
    ):
        if any(len(direction.families) > 1 for direction in _directions(group, views)):
            return views
    return 0
