"""Figures at the largest number of training views: the regularizer's weight, views at test time."""

from __future__ import annotations

import re

from fastaug.experiments.figure_style import (
    BLACK,
    COLUMN,
    LOOKS,
    PAGE,
    finish,
    new_figure,
    views_axis,
)
from fastaug.experiments.figures_parts import (
    CENTRAL,
    INVARIANCE,
    Curve,
    Drawn,
    Measure,
    chosen_by,
    curve,
    draw_curve,
    objective_handles,
    regularizer_handles,
)
from fastaug.experiments.lookup import AVERAGES, HOW, averages_of, chosen_at, kl_weight_of, views_of
from fastaug.experiments.selection import Chosen, Selected

_FEWEST_WEIGHTS = 3
_AT = re.compile(r"tta_top1_at_(\d+)")


def kl_weight(selected: Selected) -> Drawn:
    """Accuracy and invariance versus λ, of the objectives that were run with several."""
    name, title = f"kl-weight-{selected.family.slug}", f"KL weight: {selected.family.title}"
    caption = "Top-1 test accuracy on central crops (left) and invariance (right) versus the "
    caption += "weight λ of the KL regularizer; λ = 0 is without it. "
    views, swept = _swept_weights(selected)
    if not swept:
        note = f"no objective has runs with {_FEWEST_WEIGHTS} KL weights at one K above 1"
        return Drawn(name, title, caption, None, (note,))
    figure = new_figure(PAGE, 2.5)
    notes = []
    for place, measure in enumerate((CENTRAL, INVARIANCE)):
        ax = figure.add_subplot(1, 2, place + 1)
        for average, weights in swept.items():
            points = [(w, chosen_at(selected, views, average, w)) for w in weights]
            found = curve(points, measure)
            if found.gaps:
                notes.append(f"average {average} has no {measure.name} at λ = {_list(found.gaps)}")
            draw_curve(ax, found, average, regularized=True)
        ax.set_xlim(left=min(0, ax.get_xlim()[0]))
        ax.set_xlabel("weight λ of the KL regularizer")
        ax.set_ylabel(measure.axis)
        ax.set_title(measure.title)
    finish(figure, f"{title}, K = {views}", [objective_handles(swept)], notes)
    caption += f"K = {views} training views. {chosen_by(selected)}"
    return Drawn(name, title, caption, figure, tuple(notes))


def _swept_weights(selected: Selected) -> tuple[int, dict[str, list[float]]]:
    """The largest K that has a sweep, and its weights by objective; (0, {}) if none has."""
    for views in reversed(views_of(selected)):
        found = {
            average: sorted(
                s.kl_weight for s in selected.chosen if (s.views, s.average) == (views, average)
            )
            for average in AVERAGES
            if views > 1
        }
        if swept := {a: w for a, w in found.items() if len(w) >= _FEWEST_WEIGHTS}:
            return views, swept
    return 0, {}


def views_at_test(selected: Selected) -> Drawn:
    """Accuracy versus the number of views at test time, against the central crop's."""
    name, title = (
        f"test-views-{selected.family.slug}",
        f"Views at test time: {selected.family.title}",
    )
    caption = (
        "Top-1 test accuracy versus the number of views that are averaged at test time. Black "
        "lines are central crops: solid with triangles with the KL regularizer, dashed with "
        "circles without it. "
    )
    views, weight = max(views_of(selected), default=1), kl_weight_of(selected)
    at = {
        (average, w): chosen
        for average in averages_of(selected)
        for w in (0.0, weight)
        if views > 1 and (chosen := chosen_at(selected, views, average, w)) and _numbers(chosen)
    }
    if not at:
        note = "no run with K > 1 was evaluated with views (--tta)"
        return Drawn(name, title, caption, None, (note,))
    averages = [average for average in AVERAGES if any(average == a for a, _ in at)]
    figure = new_figure(PAGE if len(averages) > 1 else COLUMN, 2.5)
    shared = None
    notes = []
    for place, average in enumerate(averages):
        ax = figure.add_subplot(1, len(averages), place + 1, sharey=shared)
        shared = shared or ax
        numbers = sorted(
            {n for (a, _), chosen in at.items() if a == average for n in _numbers(chosen)}
        )
        for regularized, w in ((False, 0.0), (True, weight)):
            chosen = at.get((average, w))
            if chosen is None:
                notes.append(f"not run: average {average} {HOW[regularized]} at K = {views}")
                continue
            draw_curve(ax, _over_numbers(chosen, numbers), average, regularized=regularized)
            central = 100 * (chosen.mean(CENTRAL.name) or 0.0)
            ax.plot(
                numbers,
                [central] * len(numbers),
                color=BLACK,
                linewidth=0.8,
                linestyle="-" if regularized else "--",
                marker="^" if regularized else "o",
                markersize=3.5,
                markerfacecolor=BLACK if regularized else "white",
                gid=f"central crop {HOW[regularized]}",
            )
        views_axis(ax, numbers, "views at test time")
        ax.set_title(LOOKS[average].label)
        if place == 0:
            ax.set_ylabel(CENTRAL.axis)
    which = [bool(w) for _, w in at]
    legend = [
        regularizer_handles(weight, which, of="TTA, "),
        regularizer_handles(weight, which, BLACK, "^o", "central crop, "),
    ]
    finish(figure, f"{title}, K = {views}", legend, notes)
    caption += f"K = {views} training views. {chosen_by(selected)}"
    return Drawn(name, title, caption, figure, tuple(notes))


def _numbers(chosen: Chosen) -> list[int]:
    """The N of tta_top1_at_N that any of its runs has."""
    names = {name for run in chosen.runs for name in run.measures}
    return sorted(int(found[1]) for name in names if (found := _AT.fullmatch(name)))


def _over_numbers(chosen: Chosen, numbers: list[int]) -> Curve:
    """One measure for each number of views."""
    single = [curve([(n, chosen)], Measure(f"tta_top1_at_{n}", "")) for n in numbers]
    return Curve(
        [one.x[0] for one in single],
        [one.mean[0] for one in single],
        [one.low[0] for one in single],
        [one.high[0] for one in single],
    )


def _list(numbers: list[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
