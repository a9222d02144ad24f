"""The picture of benchmarks/soak.py: memory, threads and descriptors over time."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from soak_sampler import Sample
from soak_verdict import MEMORY, Verdict

# Okabe and Ito's colors, which all kinds of color vision tell apart.
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PINK = (
    *("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"),
)
MOST_MARKS = 40
"""Lines for epochs; more of them would be a grey area."""

Lines = dict[str, tuple[str, Callable[[Sample], float]]]

AMOUNTS: Lines = {
    "resident, all processes": (BLACK, MEMORY["resident"]),
    "PSS": (SKY, lambda s: s.pss),
    "USS": (GREEN, lambda s: s.uss),
    "own: anonymous and shared": (RED, MEMORY["own memory"]),
}
THREADS: Lines = {
    "threads": (BLACK, lambda s: s.threads),
    "processes": (BLUE, lambda s: s.processes),
    "zombies": (RED, lambda s: s.zombies),
}
DESCRIPTORS: Lines = {
    "all": (BLACK, lambda s: s.fds),
    "files": (BLUE, lambda s: s.files),
    "pipes": (ORANGE, lambda s: s.pipes),
    "sockets": (GREEN, lambda s: s.sockets),
    "memfd, /dev/shm": (RED, lambda s: s.shm),
    "other": (PINK, lambda s: s.other),
}


def draw(samples: Sequence[Sample], verdict: Verdict | None, path: Path) -> bool:
    """False if there is nothing to draw, or nothing to draw with."""
    try:
        logging.getLogger("matplotlib").setLevel(logging.WARNING)
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        print("no picture: pip install matplotlib, then --report")
        return False
    if len(samples) < 2:
        return False
    figure = Figure(figsize=(10, 11), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True, height_ratios=(3, 3, 2, 2))
    marks, every = _epoch_marks(samples)
    for ax in axes:
        for minute in marks:
            ax.axvline(minute, color="#000000", alpha=0.1, linewidth=0.7, zorder=0)
        if verdict:
            ax.axvspan(0, verdict.since / 60, color="#999999", alpha=0.15, linewidth=0, zorder=0)
        ax.grid(axis="y", alpha=0.3)
        ax.tick_params(labelsize=9)
    _lines(axes[0], samples, AMOUNTS, "memory, MiB")
    _close_up(axes[1], samples, verdict)
    _lines(axes[2], samples, THREADS, "threads and processes")
    _lines(axes[3], samples, DESCRIPTORS, "open descriptors")
    for ax in axes[2:]:
        ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes[-1].set_xlabel(_legend(every, verdict), fontsize=9)
    axes[-1].set_xlim(0, samples[-1].seconds / 60)
    found = "too short to judge" if verdict is None else "grows" if verdict.grows else "flat"
    end = samples[-1]
    figure.suptitle(
        f"A training of {end.seconds / 60:.1f} minutes, {int(end.epoch):,} epochs: {found}",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)
    return True


def _lines(ax: Any, samples: Sequence[Sample], lines: Lines, label: str) -> None:
    """From zero: the whole, and the parts that there are."""
    minutes = [sample.seconds / 60 for sample in samples]
    for place, (name, (color, value)) in enumerate(lines.items()):
        values = [value(sample) for sample in samples]
        if any(values) or place == 0:
            ax.plot(minutes, values, color=color, label=name, linewidth=1.2 if place else 2.4)
    ax.set_ylim(bottom=0)
    ax.set_ylabel(label, fontsize=9)
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _close_up(ax: Any, samples: Sequence[Sample], verdict: Verdict | None) -> None:
    """Each above or below its own middle, where a leak of a few MiB can be seen; with the slopes
    that the verdict found below and above it."""
    settled = [s for s in samples if verdict is None or s.seconds >= verdict.since]
    shown = []
    for name, (color, value) in AMOUNTS.items():
        if value not in MEMORY.values():
            continue
        middle = statistics.median(map(value, settled))
        minutes = [sample.seconds / 60 for sample in samples]
        values = [value(sample) - middle for sample in samples]
        shown += [value(sample) - middle for sample in settled]
        kind = next(kind for kind, own in MEMORY.items() if own is value)
        width = 2.4 if kind == "resident" else 1.0  # they often lie on one another
        ax.plot(minutes, values, color=color, linewidth=width, label=name.partition(":")[0])
        for trend in verdict.trends if verdict else ():
            if trend.slope and trend.name.startswith(kind):
                # Through the medians of the first and last third, which lie a sixth from the ends.
                span = verdict.until - verdict.since
                center = (trend.first + trend.last) / 2 - middle
                rise = trend.slope.middle * span / 3600 / 2
                ends = [verdict.since / 60, verdict.until / 60]
                ax.plot(ends, [center - rise, center + rise], color=color, ls="--", lw=1.6)
    margin = max(1.0, 0.25 * (max(shown) - min(shown)))
    ax.set_ylim(min(shown) - margin, max(shown) + margin)
    ax.set_ylabel("the same, close up:\nMiB from the median", fontsize=9)
    handles, labels = ax.get_legend_handles_labels()
    if verdict:
        from matplotlib.lines import Line2D

        handles.append(Line2D([], [], color="#777777", ls="--", lw=1.6))
        labels.append("slopes of an epoch's\nleast and most")
    ax.legend(
        handles, labels, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False
    )


def _epoch_marks(samples: Sequence[Sample]) -> tuple[list[float], int]:
    """Minutes at which epochs began, and how many epochs lie from one to the next."""
    starts: dict[int, float] = {}
    for sample in samples:
        starts.setdefault(int(sample.epoch), sample.seconds / 60)
    last = max(starts)
    steps = (factor * 10**power for power in range(9) for factor in (1, 2, 5))
    every = next(step for step in steps if last / step <= MOST_MARKS)
    return [minute for epoch, minute in starts.items() if epoch and epoch % every == 0], every


def _legend(every: int, verdict: Verdict | None) -> str:
    epochs = "each epoch" if every == 1 else f"every {every:,} epochs"
    return f"minutes (faint lines: {epochs}" + "; grey: warm-up, not judged" * bool(verdict) + ")"
