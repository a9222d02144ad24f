"""What figures and tables ask a family for: its multiplicities, its regularizer, one setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from fastaug.experiments.results import Setting
from fastaug.experiments.selection import Chosen, Selected

AVERAGES = ("losses", "probs", "logits")
HOW = {False: "without the regularizer", True: "with the regularizer"}
NO_AUGMENTATION = Setting(1, "losses", 0.0, augmented=False)


def views_of(selected: Selected) -> list[int]:
    """The multiplicities K that were run, in order."""
    return sorted({setting.views for setting in selected.chosen if setting.augmented})


def kl_weight_of(selected: Selected) -> float:
    """The weight that "with the regularizer" means: the paper's 1, or the one most settings have.

    A sweep over weights leaves several; 1 if there are none at all.
    """
    weights = Counter(setting.kl_weight for setting in selected.chosen if setting.kl_weight)
    if not weights or 1.0 in weights:
        return 1.0
    return max(weights, key=lambda weight: (weights[weight], -abs(weight - 1)))


def chosen_at(selected: Selected, views: int, average: str, kl_weight: float) -> Chosen | None:
    """At K=1 all objectives are one setting."""
    setting = Setting(views, average, kl_weight) if views > 1 else Setting(1, "losses", 0.0)
    return selected.chosen.get(setting)


def averages_of(selected: Selected) -> list[str]:
    """The objectives that were run with several views."""
    found = {setting.average for setting in selected.chosen if setting.views > 1}
    return [average for average in AVERAGES if average in found]


def not_run(found: Container[tuple[str, bool]], averages: Sequence[str]) -> list[str]:
    """In words, the objectives that are not there with the regularizer, without it, or at all."""
    words = []
    for average in averages:
        lacking = [how for how in HOW if (average, how) not in found]
        whole = len(lacking) == len(HOW)
        words += (
            [f"average {average}"] if whole else [f"average {average} {HOW[h]}" for h in lacking]
        )
    return words


def seeds_of(chosen: list[Chosen]) -> str:
    """How many seeds, for captions: 1 seed, 3 seeds, 1 to 3 seeds."""
    counts = {len(one.runs) for one in chosen} or {0}
    low, high = min(counts), max(counts)
    return f"{low} seed{'s' * (low != 1)}" if low == high else f"{low} to {high} seeds"
