"""Accuracy at equal compute: K views for E epochs against one view for K times as many."""

from __future__ import annotations

from collections.abc import Mapping

from fastaug.experiments.plotting import (
    CENTRAL,
    PAGE,
    TTA,
    Drawn,
    curve,
    draw_line,
    finish,
    new_figure,
    regularizer_handles,
    selection_caption,
    style_handles,
    view_styles,
)
from fastaug.experiments.selection import REGULARIZER, Chosen, Selected, select

Budgets = Mapping[int, Chosen]
"""The chosen runs by the views that each was trained on."""


def budgets(selected: Selected) -> dict[tuple[int, bool], Budgets]:
    """Averaged losses with several numbers of epochs, by (K, regularized); at K=1 the regularizer
    is 0."""
    found: dict[tuple[int, bool], dict[int, Chosen]] = {}
    by_epochs = select(selected.family.runs, selected.on, with_epochs=True)
    for setting, chosen in by_epochs.items():
        weight, is_drawn = setting.kl_weight, setting.augmented and setting.average == "losses"
        if is_drawn and weight in (0.0, selected.regularizer_weight):
            run = chosen.runs[0]
            views = run.step * run.config.optim.batch_size
            found.setdefault((setting.views, weight > 0), {})[views] = chosen
    return {key: dict(sorted(points.items())) for key, points in sorted(found.items())}


def compute(selected: Selected) -> Drawn:
    """Top-1 versus the number of views trained on, a curve for each K."""
    name, title = f"compute-{selected.family.slug}", f"Compute: {selected.family.title}"
    caption = (
        "Top-1 test accuracy on central crops (left) and with test-time augmentation (right) "
        "versus the views that a run was trained on, which is its cost: at equal cost a run with "
        "K views of each image has a K-th of the epochs. Averaged losses; solid with the KL "
        "regularizer, dashed without it. "
    )
    found = budgets(selected)
    several = any(len(points) > 1 for points in found.values())
    multiplicities = sorted({views for views, _ in found})
    if not several or len(multiplicities) < 2:
        note = "needs averaged losses at two K, and several numbers of epochs"
        return Drawn(name, title, caption, None, (note,))
    styles = view_styles(multiplicities)
    figure = new_figure(PAGE, 2.6)
    for place, measure in enumerate((CENTRAL, TTA), 1):
        ax = figure.add_subplot(1, 2, place)
        for (views, regularized), points in found.items():
            if views in styles:
                drawn = curve((cost, measure.of(chosen)) for cost, chosen in points.items())
                gid = f"K={views} {REGULARIZER[regularized]}"
                draw_line(ax, drawn, styles[views], gid, regularized=regularized)
        ax.set_xscale("log", base=2)
        ticks = sorted({cost for points in found.values() for cost in points})
        ax.set_xticks(ticks, [_short(cost) for cost in ticks])
        ax.minorticks_off()
        ax.set_xlabel("training views (epochs x images x K)")
        ax.set_ylabel(measure.axis)
        ax.set_title(measure.title)
    which = {regularized for _, regularized in found}
    weight = selected.regularizer_weight
    finish(figure, title, [style_handles(styles.values()), regularizer_handles(weight, which)])
    caption += selection_caption(selected, chosen="learning rate")
    return Drawn(name, title, caption, figure)


def _short(views: int) -> str:
    """12,288 as 12k and 1,966,080 as 2.0M."""
    return f"{views / 1e6:.1f}M" if views >= 999_500 else f"{views / 1e3:.0f}k"
