"""Training curves of the chosen runs: has the training loss converged?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from fastaug.experiments.metrics_file import Record, equal_parts
from fastaug.experiments.plotting import (
    PAGE,
    Curve,
    Drawn,
    draw_line,
    finish,
    new_figure,
    regularizer_handles,
    style_handles,
    view_styles,
)
from fastaug.experiments.run import Run
from fastaug.experiments.selection import REGULARIZER, Chosen, Selected

_PARTS = 12
_PANELS = (("nll", "training loss without the KL term", "nats"), ("kl", "pairwise KL", "nats"))


def curves(selected: Selected) -> Drawn:
    """Training loss and pairwise KL of averaged losses versus the share of the run."""
    name, title = f"curves-{selected.family.slug}", f"Training: {selected.family.title}"
    caption = (
        "Training loss without the KL term (left) and pairwise KL between the views of an image "
        "(right) over the training, means over the seeds. Averaged losses; solid with the KL "
        "regularizer, dashed without it. "
    )
    chosen = _chosen(selected)
    if not chosen:
        note = "needs averaged losses with a metrics.jsonl"
        return Drawn(name, title, caption, None, (note,))
    styles = view_styles(sorted({views for views, _ in chosen}))
    figure = new_figure(PAGE, 2.6)
    for place, (measure, text, unit) in enumerate(_PANELS, 1):
        ax = figure.add_subplot(1, 2, place)
        for (views, regularized), own in chosen.items():
            if views in styles and (measure == "nll" or views > 1):
                drawn = _curve(own.runs, measure)
                gid = f"K={views} {REGULARIZER[regularized]}"
                draw_line(ax, drawn, styles[views], gid, regularized=regularized)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("share of the run (%)")
        ax.set_ylabel(unit)
        ax.set_title(text)
    which = {regularized for _, regularized in chosen}
    weight = selected.regularizer_weight
    finish(figure, title, [style_handles(styles.values()), regularizer_handles(weight, which)])
    return Drawn(name, title, caption, figure)


def _chosen(selected: Selected) -> dict[tuple[int, bool], Chosen]:
    """The chosen runs of averaged losses that have a curve, by (K, regularized)."""
    found = {}
    for setting, chosen in selected.chosen.items():
        is_drawn = setting.augmented and setting.average == "losses"
        weights = (0.0, selected.regularizer_weight)
        has_curve = any(_points(run.records, "nll") for run in chosen.runs)
        if is_drawn and setting.kl_weight in weights and has_curve:
            found[setting.views, setting.kl_weight > 0] = chosen
    return dict(sorted(found.items()))


def _points(records: Iterable[Record], measure: str) -> list[Record]:
    """The training records with a measure."""
    return [r for r in records if r.get("kind") == "train" and {"epoch", measure} <= {*r}]


def _curve(runs: Sequence[Run], measure: str) -> Curve:
    """Means over equal parts of the run, and over the seeds."""
    # By number, not by epoch: the parts of a record end at the bounds of these parts, or just
    # beyond.
    curves = [equal_parts(_points(run.records, measure), _PARTS) for run in runs]
    curves = [parts for parts in curves if parts]
    found = Curve([], [], [], [])
    count = min(map(len, curves), default=0)
    for place in range(count):
        values = [fmean(r[measure] for r in parts[place]) for parts in curves]
        found.x.append(100 * (place + 1) / count)
        found.mean.append(fmean(values))
        found.low.append(min(values))
        found.high.append(max(values))
    return found
