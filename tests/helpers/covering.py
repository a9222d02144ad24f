"""Covering arrays: few cases in which any two settings meet in each pair of their values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value per axis, chosen greedily, always the same ones."""
    rows = list(product(*(range(len(axis)) for axis in axes)))

    def pairs(row: tuple[int, ...]) -> set[tuple]:
        return set(combinations(enumerate(row), 2))

    left = set().union(*map(pairs, rows))
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(pairs(row) & left))
        left -= pairs(best)
        chosen.append(tuple(axis[place] for axis, place in zip(axes, best, strict=True)))
    return chosen
