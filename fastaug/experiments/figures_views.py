"""Figures versus the number of views K of each training image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastaug.experiments.figure_style import (
    COLUMN,
    PAGE,
    finish,
    new_figure,
    plain,
    views_axis,
)
from fastaug.experiments.figures_parts import (
    CENTRAL,
    INVARIANCE,
    TTA,
    TTA_LOGITS,
    Curve,
    Drawn,
    Measure,
    chosen_by,
    curve,
    draw_curve,
    draw_point,
    mark_handle,
    objective_handles,
    regularizer_handles,
    slug_of,
)
from fastaug.experiments.lookup import (
    AVERAGES,
    HOW,
    NO_AUGMENTATION,
    chosen_at,
    kl_weight_of,
    not_run,
    views_of,
)
from fastaug.experiments.selection import Selected

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES = (
    "Solid with the KL regularizer, dashed without it; at K = 1 all objectives coincide, and a "
    "black plus marks training without augmentation. "
)


def accuracy(selected: Selected) -> Drawn:
    caption = "Top-1 test accuracy versus the training multiplicity K, "
    caption += "on central crops (left) and with test-time augmentation (right). "
    return _versus_views("accuracy", "Accuracy", caption, [selected], [CENTRAL, TTA], AVERAGES)


def invariance(selected: Selected) -> Drawn:
    caption = "Mean pairwise KL between the predictions for views of the same test image, versus "
    caption += "the training multiplicity K; lower is more invariant. "
    return _versus_views("invariance", "Invariance", caption, [selected], [INVARIANCE], AVERAGES)


def extended(selected: Selected) -> Drawn:
    caption = "Extended results: central crop, test-time augmentation that averages probabilities "
    caption += "or logits, and invariance, versus the training multiplicity K. "
    measures = [CENTRAL, INVARIANCE, TTA, TTA_LOGITS]
    return _versus_views("extended", "Extended results", caption, [selected], measures, AVERAGES)


def randaugment(selected: Sequence[Selected]) -> list[Drawn]:
    """One figure for each data set: a row for each network that was trained with RandAugment."""
    by_data: dict[str, list[Selected]] = {}
    for one in selected:
        if one.family.config.view.augment == "randaugment":
            by_data.setdefault(Path(one.family.config.data.data).name, []).append(one)
    title = "RandAugment"
    caption = "Networks trained with averaged losses and RandAugment: top-1 test accuracy on "
    caption += "central crops (left) and invariance (right) versus the training multiplicity K. "
    if not by_data:
        return [Drawn(title.lower(), title, caption, None, ("no runs with --augment randaugment",))]
    return [
        _versus_views(title.lower(), title, caption, rows, [CENTRAL, INVARIANCE], ["losses"])
        for rows in by_data.values()
    ]


def _versus_views(
    kind: str,
    title: str,
    caption: str,
    families: Sequence[Selected],
    measures: Sequence[Measure],
    averages: Sequence[str],
) -> Drawn:
    """A row of panels for each family, or for each two measures of a single one."""
    first, several = families[0], len(families) > 1
    of = Path(first.family.config.data.data).name if several else first.family.title
    name = f"{kind}-{slug_of(of) if several else first.family.slug}"
    title = f"{title}: {of}"
    notes = [note for one in families for note in _missing(one, measures, averages, several)]
    drawable = [one for one in families if len(views_of(one)) > 1]
    cells = [(one, measure) for one in drawable for measure in measures]
    if not several:
        cells = [(one, measure) for one, measure in cells if _has(one, measure)]
    if not cells:
        return Drawn(name, title, caption, None, tuple(notes))
    columns = min(2, len(cells))
    rows = -(-len(cells) // columns)
    figure = new_figure(PAGE if columns > 1 else COLUMN, 0.4 + 2.0 * rows)
    curves: set[tuple[str, bool]] = set()
    marks: dict[str, str] = {}
    for place, (one, measure) in enumerate(cells):
        if _has(one, measure):
            ax = figure.add_subplot(rows, columns, place + 1)
            curves |= _draw_curves(ax, one, measure, averages)
            marks |= _draw_marks(ax, one, measure)
            views_axis(ax, views_of(one), "views K of each training image")
            ax.set_ylabel(measure.axis)
            ax.set_title(plain(_panel_title(one, measure, several)))
    others = regularizer_handles(kl_weight_of(first), (regularized for _, regularized in curves))
    others += [mark_handle(marker, label) for marker, label in marks.items()]
    finish(figure, title, [objective_handles(average for average, _ in curves), others], notes)
    return Drawn(name, title, caption + _CURVES + chosen_by(*drawable), figure, tuple(notes))


def _draw_curves(
    ax: Axes, selected: Selected, measure: Measure, averages: Sequence[str]
) -> set[tuple[str, bool]]:
    curves = _curves(selected, measure, averages)
    for (average, regularized), found in curves.items():
        draw_curve(ax, found, average, regularized=regularized)
    return set(curves)


def _draw_marks(ax: Axes, selected: Selected, measure: Measure) -> dict[str, str]:
    """The points at K=1 that are of no objective: markers and what they mean."""
    marks = {}
    for marker, label, chosen in (
        ("o", "K = 1", chosen_at(selected, 1, "losses", 0.0)),
        ("+", "no augmentation", selected.chosen.get(NO_AUGMENTATION)),
    ):
        if chosen is not None and chosen.values(measure.name):
            draw_point(ax, 1, chosen, measure, marker)
            marks[marker] = label
    return marks


def _curves(
    selected: Selected, measure: Measure, averages: Sequence[str]
) -> dict[tuple[str, bool], Curve]:
    """By objective and whether it is regularized, those that have a point beyond K=1."""
    curves = {}
    for average in averages:
        for regularized, weight in ((False, 0.0), (True, kl_weight_of(selected))):
            points = [(k, chosen_at(selected, k, average, weight)) for k in views_of(selected)]
            found = curve(points, measure)
            if any(x > 1 and x not in found.gaps for x in found.x):
                curves[average, regularized] = found
    return curves


def _missing(
    selected: Selected, measures: Sequence[Measure], averages: Sequence[str], several: bool
) -> list[str]:
    """Panels, curves and points that a reader would look for."""
    views = views_of(selected)
    if not views:
        notes = ["no runs with augmentation"]
    elif len(views) == 1:
        notes = [f"K = {views[0]} is all that was run, which makes no curve"]
    else:
        absent = [m.name for m in measures if not _has(selected, m)]
        notes = [f"no run has {name}: was it evaluated with --tta 0?" for name in absent]
        present = [measure for measure in measures if measure.name not in absent]
        notes += dict.fromkeys(n for m in present for n in _gaps(selected, m, averages))
    return [f"{selected.family.title}: {note}" if several else note for note in notes]


def _gaps(selected: Selected, measure: Measure, averages: Sequence[str]) -> list[str]:
    curves = _curves(selected, measure, averages)
    notes, absent = [], not_run(curves, averages)
    if chosen_at(selected, 1, "losses", 0.0) is None:
        absent.append("K = 1")
    if absent:
        notes.append(f"not run: {', '.join(absent)}")
    lacking: dict[str, list[str]] = {}
    for (average, regularized), found in curves.items():
        weight = kl_weight_of(selected) if regularized else 0.0
        for k in (int(x) for x in found.gaps if x > 1):
            run = chosen_at(selected, k, average, weight) is not None
            why = f"no {measure.name} at K = {k}" if run else f"not run at K = {k}"
            lacking.setdefault(why, []).append(f"average {average} {HOW[regularized]}")
    return notes + [f"{why}: {', '.join(what)}" for why, what in lacking.items()]


def _has(selected: Selected, measure: Measure) -> bool:
    return any(chosen.values(measure.name) for chosen in selected.chosen.values())


def _panel_title(selected: Selected, measure: Measure, several: bool) -> str:
    numbers = {run.config.eval.tta for chosen in selected.chosen.values() for run in chosen.runs}
    title = measure.title
    if measure in (TTA, TTA_LOGITS) and len(numbers) == 1:
        title = title.replace("TTA", f"TTA with {numbers.pop()} views")
    return f"{selected.family.config.model.model}, {title}" if several else title
