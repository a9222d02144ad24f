"""The paper's figures, from families of runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fastaug.experiments.capacity_figure import capacity
from fastaug.experiments.compute_figure import compute
from fastaug.experiments.curves_figure import curves
from fastaug.experiments.plotting import (
    BLACK,
    CENTRAL,
    COLUMN,
    INVARIANCE,
    PAGE,
    STYLES,
    TTA,
    TTA_LOGITS,
    Curve,
    Drawn,
    Measure,
    curve,
    draw_curve,
    draw_point,
    escape_math,
    finish,
    mark_handle,
    new_figure,
    objective_curves,
    objective_handles,
    regularizer_handles,
    selection_caption,
    style_context,
    views_axis,
)
from fastaug.experiments.results import slug_of
from fastaug.experiments.run import AVERAGES, Setting
from fastaug.experiments.selection import REGULARIZER, Chosen, Selected, missing_objectives
from fastaug.experiments.toy import toy_figure
from fastaug.kernels.config import Average

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NO_AUGMENTATION = Setting(1, "losses", 0.0, augmented=False)
_MIN_WEIGHTS = 3
_TTA_AT = re.compile(r"tta_top1_at_(\d+)")

# --- versus the number of views K of each training image ---


class VersusViews(NamedTuple):
    """A figure with K on the x axis and a panel for each measure."""

    kind: str
    title: str
    caption: str
    measures: tuple[Measure, ...]
    averages: Sequence[Average] = AVERAGES


_ACCURACY = VersusViews(
    "accuracy",
    "Accuracy",
    "Top-1 test accuracy versus the training multiplicity K, on central crops (left) and with "
    "test-time augmentation (right). ",
    (CENTRAL, TTA),
)
_INVARIANCE = VersusViews(
    "invariance",
    "Invariance",
    "Mean pairwise KL between the predictions for views of the same test image, versus the "
    "training multiplicity K; lower is more invariant. ",
    (INVARIANCE,),
)
_EXTENDED = VersusViews(
    "extended",
    "Extended results",
    "Extended results: central crop, test-time augmentation that averages probabilities or logits, "
    "and invariance, versus the training multiplicity K. ",
    (CENTRAL, INVARIANCE, TTA, TTA_LOGITS),
)
_RANDAUGMENT = VersusViews(
    "randaugment",
    "RandAugment",
    "Networks trained with averaged losses and RandAugment: top-1 test accuracy on central crops "
    "(left) and invariance (right) versus the training multiplicity K. ",
    (CENTRAL, INVARIANCE),
    ("losses",),
)
_CURVES = (
    "Solid with the KL regularizer, dashed without it; at K = 1 all objectives coincide, and a "
    "black plus marks training without augmentation. "
)


def randaugment(selected: Sequence[Selected]) -> list[Drawn]:
    """A figure for each data set, with a row for each network trained with RandAugment."""
    by_data: dict[str, list[Selected]] = {}
    for one in selected:
        if one.family.config.view.augment == "randaugment":
            by_data.setdefault(Path(one.family.config.data.data).name, []).append(one)
    if not by_data:
        kind, title, caption, *_ = _RANDAUGMENT
        return [Drawn(kind, title, caption, None, ("needs runs with --augment randaugment",))]
    return [versus_views(_RANDAUGMENT, *families) for families in by_data.values()]


def versus_views(spec: VersusViews, *families: Selected) -> Drawn:
    """A row of panels for each family, or for each two measures of a single family."""
    first, several = families[0], len(families) > 1
    of = Path(first.family.config.data.data).name if several else first.family.title
    name = f"{spec.kind}-{slug_of(of) if several else first.family.slug}"
    title = f"{spec.title}: {of}"
    notes = [note for one in families for note in _missing(one, spec, several)]
    drawable = [one for one in families if len(one.multiplicities) > 1]
    cells = [(one, m) for one in drawable for m in spec.measures if several or _has(one, m)]
    if not cells:
        return Drawn(name, title, spec.caption, None, tuple(notes))
    columns = min(2, len(cells))
    rows = -(-len(cells) // columns)
    figure = new_figure(PAGE if columns > 1 else COLUMN, 0.4 + 2.0 * rows)
    curves: set[tuple[Average, bool]] = set()
    marks: dict[str, str] = {}
    for place, (one, measure) in enumerate(cells, 1):
        if _has(one, measure):
            ax = figure.add_subplot(rows, columns, place)
            curves |= _draw_curves(ax, one, measure, spec.averages)
            marks |= _draw_marks(ax, one, measure)
            views_axis(ax, one.multiplicities, "views K of each training image")
            ax.set_ylabel(measure.axis)
            ax.set_title(escape_math(_panel_title(one, measure, several)))
    others = regularizer_handles(first.regularizer_weight, (how for _, how in curves))
    others += [mark_handle(marker, label) for marker, label in marks.items()]
    finish(figure, title, [objective_handles(average for average, _ in curves), others], notes)
    caption = spec.caption + _CURVES + selection_caption(*drawable)
    return Drawn(name, title, caption, figure, tuple(notes))


def _draw_curves(
    ax: Axes, selected: Selected, measure: Measure, averages: Sequence[Average]
) -> set[tuple[Average, bool]]:
    curves = _curves(selected, measure, averages)
    for (average, regularized), found in curves.items():
        draw_curve(ax, found, average, regularized=regularized)
    return set(curves)


def _curves(
    selected: Selected, measure: Measure, averages: Sequence[Average]
) -> dict[tuple[Average, bool], Curve]:
    """The curves that have a point beyond K=1, by (average, regularized)."""
    places = [(k, selected, k) for k in selected.multiplicities]
    curves = objective_curves(places, measure, averages)
    return {key: found for key, found in curves.items() if {*found.x} - {1, *found.gaps}}


def _draw_marks(ax: Axes, selected: Selected, measure: Measure) -> dict[str, str]:
    """Draw the points at K=1, which all objectives share; returns labels by marker."""
    marks = {}
    for marker, label, chosen in (
        ("o", "K = 1", selected.at(1, "losses")),
        ("+", "no augmentation", selected.chosen.get(_NO_AUGMENTATION)),
    ):
        if values := measure.of(chosen):
            draw_point(ax, 1, values, marker, label)
            marks[marker] = label
    return marks


def _missing(selected: Selected, spec: VersusViews, several: bool) -> list[str]:
    """Notes on missing panels, curves and points."""
    views = selected.multiplicities
    if not views:
        notes = ["needs runs with augmentation"]
    elif len(views) == 1:
        notes = [f"needs runs with several K; only K = {views[0]} was run"]
    else:
        absent = [m.name for m in spec.measures if not _has(selected, m)]
        notes = [f"no run has {name}; evaluate with --tta > 0" for name in absent]
        present = [measure for measure in spec.measures if measure.name not in absent]
        notes += dict.fromkeys(n for m in present for n in _gaps(selected, m, spec.averages))
    return [f"{selected.family.title}: {note}" if several else note for note in notes]


def _gaps(selected: Selected, measure: Measure, averages: Sequence[Average]) -> list[str]:
    curves = _curves(selected, measure, averages)
    absent = missing_objectives(curves, averages)
    if selected.at(1, "losses") is None:
        absent.append("K = 1")
    lacking: dict[str, list[str]] = {}
    for (average, regularized), found in curves.items():
        for k in (int(x) for x in found.gaps if x > 1):
            run = selected.at(k, average, regularized=regularized) is not None
            why = f"no {measure.name} at K = {k}" if run else f"not run at K = {k}"
            lacking.setdefault(why, []).append(f"average {average} {REGULARIZER[regularized]}")
    notes = [f"not run: {', '.join(absent)}"] if absent else []
    return notes + [f"{why}: {', '.join(what)}" for why, what in lacking.items()]


def _has(selected: Selected, measure: Measure) -> bool:
    return any(chosen.values(measure.name) for chosen in selected.chosen.values())


def _panel_title(selected: Selected, measure: Measure, several: bool) -> str:
    numbers = {run.config.eval.tta for chosen in selected.chosen.values() for run in chosen.runs}
    title = measure.title
    if measure in (TTA, TTA_LOGITS) and len(numbers) == 1:
        title = title.replace("TTA", f"TTA with {numbers.pop()} views")
    return f"{selected.family.config.model.model}, {title}" if several else title


# --- at the largest K: the regularizer's weight, and test-time views ---


def kl_weight(selected: Selected) -> Drawn:
    """Accuracy and invariance versus λ, for the objectives that were run with several weights."""
    name, title = f"kl-weight-{selected.family.slug}", f"KL weight: {selected.family.title}"
    caption = (
        "Top-1 test accuracy on central crops (left) and invariance (right) versus the weight λ of "
        "the KL regularizer; λ = 0 is without it. "
    )
    views, swept = _swept_weights(selected)
    if not swept:
        note = f"needs an objective with {_MIN_WEIGHTS} KL weights at the same K > 1"
        return Drawn(name, title, caption, None, (note,))
    figure = new_figure(PAGE, 2.5)
    notes = []
    for place, measure in enumerate((CENTRAL, INVARIANCE), 1):
        ax = figure.add_subplot(1, 2, place)
        for average, weights in swept.items():
            found = curve((w, measure.of(selected.at_weight(views, average, w))) for w in weights)
            if found.gaps:
                notes.append(f"average {average} has no {measure.name} at λ = {found.gap_list}")
            draw_curve(ax, found, average, regularized=True)
        ax.set_xlim(left=min(0, ax.get_xlim()[0]))
        ax.set_xlabel("weight λ of the KL regularizer")
        ax.set_ylabel(measure.axis)
        ax.set_title(measure.title)
    finish(figure, f"{title}, K = {views}", [objective_handles(swept)], notes)
    caption += f"K = {views} training views. {selection_caption(selected)}"
    return Drawn(name, title, caption, figure, tuple(notes))


def _swept_weights(selected: Selected) -> tuple[int, dict[Average, list[float]]]:
    """The largest K with enough weights, and the weights by objective; (0, {}) if there is none."""
    for views in reversed([k for k in selected.multiplicities if k > 1]):
        settings = [setting for setting in selected.chosen if setting.views == views]
        found = {a: sorted(s.kl_weight for s in settings if s.average == a) for a in AVERAGES}
        if swept := {a: weights for a, weights in found.items() if len(weights) >= _MIN_WEIGHTS}:
            return views, swept
    return 0, {}


def views_at_test(selected: Selected) -> Drawn:
    """Accuracy versus the number of test-time views, with the central crop as a reference."""
    family, views, weight = selected.family, selected.largest_k, selected.regularizer_weight
    name, title = f"test-views-{family.slug}", f"Test-time views: {family.title}"
    caption = (
        "Top-1 test accuracy versus the number of views averaged at test time. Black lines show "
        "central crops: solid with triangles with the KL regularizer, dashed with circles without "
        "it. "
    )
    evaluated = {
        (average, regularized): chosen
        for average, regularized in product(AVERAGES, REGULARIZER)
        if views > 1 and (chosen := selected.at(views, average, regularized=regularized))
        if _numbers(chosen)
    }
    if not evaluated:
        note = "needs runs with K > 1 and --tta > 0"
        return Drawn(name, title, caption, None, (note,))
    averages = list(dict.fromkeys(average for average, _ in evaluated))
    figure = new_figure(PAGE if len(averages) > 1 else COLUMN, 2.5)
    first: Axes | None = None
    notes = []
    for place, average in enumerate(averages, 1):
        ax = figure.add_subplot(1, len(averages), place, sharey=first)
        first = first or ax
        both = {how: evaluated.get((average, how)) for how in REGULARIZER}
        numbers = sorted({n for chosen in both.values() if chosen for n in _numbers(chosen)})
        for regularized, chosen in both.items():
            if chosen is None:
                how = REGULARIZER[regularized]
                notes.append(f"not run: average {average} {how} at K = {views}")
            else:
                _draw_test_views(ax, chosen, numbers, regularized=regularized)
        views_axis(ax, numbers, "test-time views")
        ax.set_title(STYLES[average].label)
        if ax is first:
            ax.set_ylabel(CENTRAL.axis)
    which = [regularized for _, regularized in evaluated]
    legend = [
        regularizer_handles(weight, which, of="TTA, "),
        regularizer_handles(weight, which, BLACK, "^o", "central crop, "),
    ]
    finish(figure, f"{title}, K = {views}", legend, notes)
    caption += f"K = {views} training views. {selection_caption(selected)}"
    return Drawn(name, title, caption, figure, tuple(notes))


def _draw_test_views(ax: Axes, chosen: Chosen, numbers: list[int], *, regularized: bool) -> None:
    values = ((n, Measure(f"tta_top1_at_{n}", "").of(chosen)) for n in numbers)
    draw_curve(ax, curve(values), chosen.setting.average, regularized=regularized)
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
        gid=f"central crop {REGULARIZER[regularized]}",
    )


def _numbers(chosen: Chosen) -> list[int]:
    """All N for which a run has tta_top1_at_N."""
    names = {name for run in chosen.runs for name in run.measures}
    return sorted(int(found[1]) for name in names if (found := _TTA_AT.fullmatch(name)))


# --- all of them ---

_OF_ONE_FAMILY: dict[str, Callable[[Selected], Drawn]] = {
    "accuracy": partial(versus_views, _ACCURACY),
    "invariance": partial(versus_views, _INVARIANCE),
    "kl-weight": kl_weight,
    "test-views": views_at_test,
    "extended": partial(versus_views, _EXTENDED),
    "compute": compute,
    "curves": curves,
}
_OF_ALL_FAMILIES: dict[str, Callable[[Sequence[Selected]], list[Drawn]]] = {
    "randaugment": randaugment,
    "capacity": capacity,
}
FIGURES = ("toy", *_OF_ONE_FAMILY, *_OF_ALL_FAMILIES)


def draw_figures(selected: Sequence[Selected], only: Container[str] = FIGURES) -> Iterator[Drawn]:
    """Draw the figures one by one, the toy example first. only: kinds of figures."""
    makers: list[tuple[str, str, Callable[[], Drawn | list[Drawn]]]] = [("toy", "", toy_figure)]
    for one in selected:
        slug = one.family.slug
        makers += [(kind, slug, partial(make, one)) for kind, make in _OF_ONE_FAMILY.items()]
    if selected:
        makers += [(kind, "", partial(make, selected)) for kind, make in _OF_ALL_FAMILIES.items()]
    names: Counter[str] = Counter()
    for kind, slug, make in makers:
        if kind not in only:
            continue
        with style_context():
            made = make()
        for drawn in made if isinstance(made, list) else [made]:
            names[drawn.name] += 1
            count = names[drawn.name]  # > 1 if two data sets have the same name
            name = f"{drawn.name}-{count}" if count > 1 else drawn.name
            yield replace(drawn, name=name, family=slug)
