"""Whether the samples of a long training say that it leaks.

Memory breathes with an epoch (evaluation, checkpoint, the loaders that start and stop), so samples
are compared at the same phase alone: the least and the most of each group of whole epochs. A leak
lifts both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from soak_sampler import Sample

WARM_UP = 0.2
"""Share of the time that is not judged: pools, caches and the heap reach their size in it."""
WARM_UP_EPOCHS = 2
"""At least: the second epoch is the first that follows an evaluation and a checkpoint."""
GROUP = 8
"""Samples in a group at least, so that its least and most have seen all phases of an epoch."""
FEWEST_GROUPS = 5
"""Below them the interval of a slope is all of its values."""
MOST_GROUPS = 15
"""For a slope. There is a longer breath than an epoch's: protobuf, with which TensorBoard's events
are made, hands all free memory back to the system (malloc_trim) whenever it has freed 10,000 pieces
of its own, every 16 epochs of the default training; in between the heap grows in steps of up to 30
MiB. In an hour a group holds one such breath, and its least is what the training really needs."""
SLOPE_SHARE, SLOPE_MIB = 0.01, 5.0
"""Growth of memory in an hour that is a leak: above both, with an interval above zero. 1% an hour
doubles a training in three days; below 5 MiB an hour it would take a week to reach 1 GiB."""
RISE_MIB = 4.0
"""And at least so much in the time that was judged: a heap grows and shrinks by pieces of a MiB or
so, which in a few minutes is a steep slope."""
STEP_SHARE, STEP_MIB = 0.05, 25.0
"""Or so much, both, between the first and the last medians: a few large steps have a slope of zero
by Theil and Sen, which a step in the first or last quarter does not move at all."""
SPREAD = 2.0
"""And a slope has to rise above the values' spread around it, by so many standard deviations."""
NORMAL_95 = 1.959964
"""Standard deviations to each side that hold 95% of a normal distribution."""


@dataclass(frozen=True)
class Slope:
    """MiB an hour, and its interval of 95%."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Trend:
    """One quantity after the warm-up. first and last: medians of the first and the last third."""

    name: str
    first: float
    last: float
    most: float
    grows: bool
    slope: Slope | None = None
    """None for counts: they are whole and steady, and any growth counts."""
    bound: float = 0.0
    """The slope from which on it would be a leak, had its interval zero width."""
    later: float = 0.0
    """MiB an hour of the second half alone, to look at: near zero where memory has but settled
    later than the warm-up. It changes no verdict."""


@dataclass(frozen=True)
class Verdict:
    trends: tuple[Trend, ...]
    since: float
    """Seconds at which the warm-up ended."""
    until: float
    groups: int
    epochs: int
    """Whole ones that were judged."""

    @property
    def grows(self) -> bool:
        return any(trend.grows for trend in self.trends)


MEMORY: dict[str, Callable[[Sample], float]] = {
    "resident": lambda sample: sample.rss + sample.children_rss,
    "own memory": lambda sample: sample.own,
}
"""Judged by slope. PSS and USS are recorded, but move with what else runs on the machine."""
COUNTS: dict[str, Callable[[Sample], float]] = {
    "threads": lambda sample: sample.threads,
    "descriptors": lambda sample: sample.fds,
    "processes": lambda sample: sample.processes,
    "zombies": lambda sample: sample.zombies,
}


def judge(samples: Sequence[Sample]) -> Verdict | None:
    """None if there are too few epochs after the warm-up to tell."""
    groups = group(samples)
    if len(groups) < FEWEST_GROUPS:
        return None
    trends = [
        _memory_trend(f"{name}, {phase.__name__}", groups, quantity, phase)
        for name, quantity in MEMORY.items()
        for phase in (min, max)
    ]
    trends += [_count_trend(name, groups, quantity) for name, quantity in COUNTS.items()]
    epochs = {int(sample.epoch) for members in groups for sample in members}
    ends = groups[0][0].seconds, groups[-1][-1].seconds
    return Verdict(tuple(trends), *ends, len(groups), len(epochs))


def group(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples after the warm-up by whole epochs, as many together as make GROUP samples.

    The last epoch is left out: the end of the training cuts it short."""
    if not samples:
        return []
    warm = WARM_UP * samples[-1].seconds
    epochs: dict[int, list[Sample]] = {}
    for sample in samples:
        epochs.setdefault(int(sample.epoch), []).append(sample)
    whole = [
        members
        for epoch, members in epochs.items()
        if epoch >= WARM_UP_EPOCHS and epoch < int(samples[-1].epoch) and members[0].seconds >= warm
    ]
    if not whole:
        return []
    size = math.ceil(GROUP / statistics.fmean(map(len, whole)))
    return _joined(whole, size)


def _joined(groups: Sequence[Sequence[Sample]], size: int) -> list[list[Sample]]:
    """So many at a time; those at the end that make no whole one are left out."""
    parts = [groups[i : i + size] for i in range(0, len(groups) - size + 1, size)]
    return [[sample for members in part for sample in members] for part in parts]


def theil_sen(x: np.ndarray, y: np.ndarray) -> Slope:
    """The median of the slopes of all pairs, and Sen's interval of 95% by Kendall's variance.

    The interval takes the points for independent. Memory remembers, so it is too narrow; what it
    lets pass, the bounds of a leak have to stop."""
    one, two = np.triu_indices(len(x), 1)
    apart = x[two] > x[one]
    slopes = np.sort((y[two] - y[one])[apart] / (x[two] - x[one])[apart])
    n, count = len(x), len(slopes)
    half = NORMAL_95 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(0, round((count - half) / 2))
    high = min(count - 1, round((count + half) / 2))
    return Slope(float(np.median(slopes)), float(slopes[low]), float(slopes[high]))


def _memory_trend(
    name: str,
    groups: Sequence[Sequence[Sample]],
    quantity: Callable[[Sample], float],
    phase: Callable,
) -> Trend:
    values = np.array([phase(map(quantity, members)) for members in groups])
    breaths = _joined(groups, math.ceil(len(groups) / MOST_GROUPS))
    # Of the group, not of the sample: when in a group the least comes says nothing.
    hours = np.array([statistics.fmean(s.seconds for s in members) / 3600 for members in breaths])
    levels = np.array([phase(map(quantity, members)) for members in breaths])
    slope, span = theil_sen(hours, levels), float(hours[-1] - hours[0])
    half = len(levels) // 2
    later = theil_sen(hours[half:], levels[half:]).middle
    first, last = _ends(values)
    bound = max(SLOPE_MIB, SLOPE_SHARE * first, RISE_MIB / span)
    bound = max(bound, SPREAD * _spread(levels - slope.middle * hours) / span)
    steady = slope.middle > bound and slope.low > 0
    stepped = last - first > max(STEP_MIB, STEP_SHARE * first)
    most = max(quantity(sample) for members in groups for sample in members)
    return Trend(name, first, last, most, steady or stepped, slope, bound, later)


def _spread(values: np.ndarray) -> float:
    """A standard deviation that a few values far off do not move."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _count_trend(
    name: str, groups: Sequence[Sequence[Sample]], quantity: Callable[[Sample], float]
) -> Trend:
    """By the least of each group: a short phase with more of them is met by chance."""
    first, last = _ends(np.array([min(map(quantity, members)) for members in groups]))
    most = max(quantity(sample) for members in groups for sample in members)
    return Trend(name, first, last, most, last > first)


def _ends(values: np.ndarray) -> tuple[float, float]:
    third = max(1, len(values) // 3)
    return float(np.median(values[:third])), float(np.median(values[-third:]))


def describe(samples: Sequence[Sample], verdict: Verdict | None) -> list[str]:
    """The verdict in lines, with its figures."""
    if not samples:
        return ["no samples"]
    start, end = samples[0], samples[-1]
    lines = [
        f"{end.seconds / 60:.1f} min, {int(end.epoch):,} whole epochs, {end.step:,} steps, "
        f"{len(samples):,} samples"
    ]
    if verdict is None:
        return [
            *lines,
            f"too short: fewer than {FEWEST_GROUPS} groups of whole epochs with {GROUP} samples "
            "after the warm-up; take more --minutes",
        ]
    lines += [
        f"judged: {verdict.epochs:,} whole epochs in {verdict.groups} groups, from "
        f"{verdict.since / 60:.1f} to {verdict.until / 60:.1f} min (before: warm-up)",
        "",
        f"{'':18}{'first':>9}{'last':>9}{'most':>9}  {'MiB/hour [95%]':28}"
        f"{'2nd half':>9}{'leak above':>12}",
        *map(_line, verdict.trends),
        "",
    ]
    lines.append(
        f"/dev/shm of all the machine, not judged: {start.dev_shm:.1f} MiB at first, "
        f"{end.dev_shm:.1f} at the end, {max(s.dev_shm for s in samples):.1f} at most"
    )
    if verdict.grows:
        names = ", ".join(trend.name for trend in verdict.trends if trend.grows)
        return [*lines, f"verdict: grows ({names})"]
    # A leak lifts all of them, so the one that is told apart best finds it.
    least = min(trend.bound for trend in verdict.trends if trend.slope)
    return [*lines, f"verdict: flat (a leak below {least:,.0f} MiB/hour would not be called one)"]


def _line(trend: Trend) -> str:
    values = (trend.first, trend.last, trend.most)
    form = "9,.1f" if trend.slope else "9g"
    head = f"{trend.name:18}" + "".join(f"{value:>{form}}" for value in values)
    slope = later = bound = ""
    if trend.slope:
        slope = f"{trend.slope.middle:+.2f} [{trend.slope.low:+.2f}, {trend.slope.high:+.2f}]"
        later, bound = f"{trend.later:+.2f}", f"{trend.bound:.1f}"
    return f"{head}  {slope:28}{later:>9}{bound:>12}" + "  grows" * trend.grows
