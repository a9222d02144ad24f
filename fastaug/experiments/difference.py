"""Differences between two settings, seed by seed, and how certain they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from fastaug.experiments.selection import Chosen

_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""97.5% quantiles of Student's t with 1, 2, ... degrees of freedom; the last one for more, too."""
EQUAL_WITHIN = {"top1": 0.01, "invariance": 0.1}
"""Differences below this are of no importance: what "equally accurate" means, for each measure."""


@dataclass(frozen=True)
class Difference:
    """Difference of a measure between two settings, over the seeds that both have."""

    mean: float
    error: float
    """Standard error of the mean; 0 with one seed."""
    low: float
    high: float
    seeds: int

    @property
    def margin(self) -> float:
        """Half of the 95% confidence interval of the mean."""
        freedom = self.seeds - 1
        quantile = _QUANTILES[min(freedom, len(_QUANTILES)) - 1] if freedom else 0.0
        return quantile * self.error

    @property
    def is_clear(self) -> bool:
        """True if the confidence interval does not contain 0; of one seed any difference is."""
        return abs(self.mean) > self.margin

    def is_within(self, bound: float) -> bool:
        """True if the confidence interval contains 0 and nothing as large as the bound."""
        return self.seeds > 1 and not self.is_clear and abs(self.mean) + self.margin < bound

    @property
    def is_gain(self) -> bool:
        return self.mean > 0 and self.is_clear

    @property
    def is_loss(self) -> bool:
        return self.mean < 0 and self.is_clear

    def points(self) -> str:
        """The difference in percentage points."""
        return self._format(100, ".1f", "points")

    def nats(self) -> str:
        return self._format(1, ".3f", "nats")

    def _format(self, scale: float, spec: str, unit: str) -> str:
        values = (scale * value for value in (self.mean, self.low, self.high))
        mean, low, high = (f"{value:+{spec}}" for value in values)
        if self.seeds == 1:
            return f"{mean} {unit} (one seed)"
        return f"{mean} ± {scale * self.error:{spec}} {unit} [{low}, {high}]"


def difference(
    minuend: Chosen, subtrahend: Chosen, measure: str, other_measure: str = ""
) -> Difference | None:
    """minuend - subtrahend by seed; None if they share no seed with the measure."""
    left = _by_seed(minuend, measure)
    right = _by_seed(subtrahend, other_measure or measure)
    found = [left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())]
    if not found:
        return None
    error = stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0
    return Difference(fmean(found), error, min(found), max(found), len(found))


def _by_seed(chosen: Chosen, measure: str) -> dict[int, float]:
    return {r.config.run.seed: r.measures[measure] for r in chosen.runs if measure in r.measures}
