"""The record in benchmarks/results/paper-small: the chosen runs of each setting."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fastaug.experiments.record import RUNS
from fastaug.experiments.results import find_results
from fastaug.experiments.run import Setting
from fastaug.experiments.selection import Chosen, Selected, select, select_families
from fastaug.kernels.config import Average


@dataclass(frozen=True)
class Point:
    """A setting of a sweep."""

    sweep: str
    views: int = 1
    average: Average = "losses"
    kl_weight: float = 0.0
    epochs: int = 0
    """0: the only ones that the sweep has."""
    model: str = "wrn-10-2"

    @property
    def setting(self) -> tuple[int, Average, float]:
        return self.views, self.average, self.kl_weight


class Record:
    """The chosen runs of each sweep of a record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = find_results([folder])

    @cached_property
    def digest(self) -> str:
        """Names the record that a table or a figure was made from."""
        return hashlib.sha256((self.folder / RUNS).read_bytes()).hexdigest()[:12]

    @cached_property
    def selected(self) -> dict[tuple[str, str], Selected]:
        """By sweep and model."""
        return {
            (sweep, one.family.config.model.model): one
            for one in select_families(self.results)
            if (sweep := one.family.sweep)
        }

    def chosen(self, point: Point) -> Chosen | None:
        """The chosen runs of a setting, at its number of epochs if it names one."""
        one = self.selected.get((point.sweep, point.model))
        if one is None:
            return None
        setting = Setting(*point.setting, epochs=point.epochs)
        if not point.epochs:
            return one.chosen.get(setting)
        return select(one.family.runs, one.on, with_epochs=True).get(setting)

    def of(self, sweep: str) -> list[Selected]:
        """The families of a sweep."""
        return [one for (name, _), one in self.selected.items() if name == sweep]
