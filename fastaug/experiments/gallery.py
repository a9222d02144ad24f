"""All figures of the paper, from the families that were found: what figures and report show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from fastaug.experiments.figure_style import style
from fastaug.experiments.figures_capacity import capacity
from fastaug.experiments.figures_parts import Drawn
from fastaug.experiments.figures_sweeps import kl_weight, views_at_test
from fastaug.experiments.figures_toy import toy_example
from fastaug.experiments.figures_views import accuracy, extended, invariance, randaugment
from fastaug.experiments.selection import Selected

__all__ = ["FIGURES", "Drawn", "draw", "gallery"]

_OF_A_FAMILY: dict[str, Callable[[Selected], Drawn]] = {
    "accuracy": accuracy,
    "invariance": invariance,
    "kl-weight": kl_weight,
    "test-views": views_at_test,
    "extended": extended,
}
_OF_ALL: dict[str, Callable[[Sequence[Selected]], list[Drawn]]] = {
    "randaugment": randaugment,
    "capacity": capacity,
}
FIGURES = ("toy", *_OF_A_FAMILY, *_OF_ALL)
"""Kinds of figures."""


def gallery(selected: Sequence[Selected], only: Sequence[str] = ()) -> list[Drawn]:
    """Every figure that the runs admit, the toy example first. only: kinds of figures; all if
    empty."""
    return list(draw(selected, only))


def draw(selected: Sequence[Selected], only: Sequence[str] = ()) -> Iterator[Drawn]:
    """The gallery, one by one as they get ready."""
    wanted = set(only or FIGURES)
    names: Counter[str] = Counter()
    for make in _makers(selected, wanted):
        with style():
            found = make()
        for one in found:
            names[one.name] += 1
            same = names[one.name]  # two data sets of one name, say
            yield replace(one, name=f"{one.name}-{same}") if same > 1 else one


def _one(make: Callable[[Selected], Drawn], selected: Selected) -> list[Drawn]:
    return [make(selected)]


def _makers(selected: Sequence[Selected], wanted: set[str]) -> Iterator[Callable[[], list[Drawn]]]:
    if "toy" in wanted:
        yield lambda: [toy_example()]
    for one in selected:
        for kind, of_one in _OF_A_FAMILY.items():
            if kind in wanted:
                yield partial(_one, of_one, one)
    for kind, of_all in _OF_ALL.items():
        if selected and kind in wanted:
            yield partial(of_all, selected)
