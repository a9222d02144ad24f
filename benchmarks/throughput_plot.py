"""The picture of benchmarks/throughput.py: the loaders versus K, and where a step's time goes."""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import throughput_rows as table
from records import machine_of
from stages import FORWARD, OBJECTIVE, OPTIMISER, STEP
from throughput_report import crops, index, policy_name, views_of
from throughput_rows import Key

# Okabe and Ito's colors, which all kinds of color vision tell apart; markers for print in grey.
STYLES = {
    "fastaug fused": ("#D55E00", "o"),
    "fastaug dali operators": ("#000000", "X"),
    "fastaug torch": ("#E69F00", "s"),
    "torchvision, one decode": ("#0072B2", "^"),
    "torchvision, K decodes": ("#56B4E9", "v"),
    "timm, K decodes": ("#009E73", "D"),
    "ffcv": ("#CC79A7", "P"),
}
PARTS = {
    FORWARD: "#0072B2",
    "backward": "#56B4E9",
    OBJECTIVE: "#CC79A7",
    OPTIMISER: "#009E73",
    table.WAIT: "#D55E00",
    "other": "#999999",
}

Row = Mapping[str, str]


def draw(run: Sequence[Row], path: Path) -> bool:
    """A column of panels for each policy, images/s above views/s; the stages beside them."""
    try:
        logging.getLogger("matplotlib").setLevel(logging.WARNING)
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib, then --plot-only")
        return False
    found, views, first = index(run), views_of(run), run[0]
    policies = [
        policy
        for policy in dict.fromkeys(row["policy"] for row in run if row["part"] == table.LOADERS)
        if any(key.policy == policy and quantity == table.VIEWS for key, quantity in found)
    ]
    steps = [key for key, quantity in found if key.contender == STEP and quantity == table.EXCESS]
    columns = len(policies) + bool(steps)
    if not columns:
        return False
    figure = Figure(figsize=(0.6 + 3.6 * columns, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, columns)
    handles: dict[str, Any] = {}
    for line, quantity in enumerate((table.IMAGES, table.VIEWS)):
        shared = None
        for column, policy in enumerate(policies):
            ax = figure.add_subplot(grid[line, column], sharey=shared)
            shared = shared or ax
            handles |= _draw_loaders(ax, found, views, policy, quantity)
            ax.set_ylabel(
                "unique images per second" if quantity == table.IMAGES else "views per second",
                fontsize=9,
            )
            if line == 0:
                text = policy_name(first, policy).replace(" (", "\n(")
                ax.set_title(f"Loaders alone: {text}", fontsize=10)
    if steps:
        _draw_steps(figure.add_subplot(grid[:, -1]), found, steps, first)
    what = (
        f"{machine_of(first)}; {first['size']} px, {crops(first)}, batches of "
        f"{first['batch_size']} views, {first['workers']} loader workers; points: medians, "
        "bars: 20th to 80th percentile"
    )
    title = "Throughput versus the number of views K of each image\n"
    figure.suptitle(title + textwrap.fill(what, 50 * columns), fontsize=10)
    if handles:
        lines = math.ceil(len(handles) / (2 * columns))
        figure.legend(
            handles.values(),
            handles,
            loc="outside lower center",
            ncols=math.ceil(len(handles) / lines),
            fontsize=9,
            frameon=False,
        )
    figure.savefig(path, dpi=160)
    return True


def _draw_loaders(
    ax: Any, found: Mapping, views: Sequence[int], policy: str, quantity: str
) -> dict[str, Any]:
    handles = {}
    names = dict.fromkeys(key.contender for key, _ in found if key.part == table.LOADERS)
    for name in sorted(names, key=lambda name: [*STYLES, name].index(name)):
        rows = {
            k: row
            for k in views
            if (row := found.get((Key(table.LOADERS, name, policy, k), quantity)))
        }
        if not rows:
            continue
        middle, low, high = (
            [float(row[column]) for row in rows.values()] for column in ("median", "p20", "p80")
        )
        color, marker = STYLES.get(name, ("#999999", "x"))
        spread = [
            [m - value for m, value in zip(middle, low, strict=True)],
            [value - m for m, value in zip(middle, high, strict=True)],
        ]
        handles[name] = ax.errorbar(
            list(rows), middle, yerr=spread, color=color, marker=marker, markersize=5, capsize=2
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(views, [str(k) for k in views])
    ax.minorticks_off()
    low, high = ax.get_ylim()
    digits = (1, 2, 5) if high > 15 * low else (1, 1.5, 2, 3, 4, 5, 6, 8)
    ticks = [round(d * 10**e) for e in range(1, 7) for d in digits if low <= d * 10**e <= high]
    ax.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.set_xlabel("views K of each image", fontsize=9)
    ax.grid(alpha=0.3)
    ax.tick_params(labelsize=9)
    return handles


def _draw_steps(ax: Any, found: Mapping, steps: Sequence[Key], first: Row) -> None:
    """Stacked: what a step with the real loader is made of, in ms."""
    bottoms = [0.0] * len(steps)
    times = [float(found[key, table.TIME]["median"]) for key in steps]
    for name in table.PARTS_OF_STEP:
        heights = [
            max(0.0, float(found[key._replace(contender=name), table.SHARE]["median"])) * time
            for key, time in zip(steps, times, strict=True)
        ]
        ax.bar(range(len(steps)), heights, bottom=bottoms, color=PARTS[name], label=name, width=0.7)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    for place, (key, time) in enumerate(zip(steps, times, strict=True)):
        rate = float(found[key, table.IMAGES]["median"])
        text = f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
        ax.text(
            place,
            max(time, bottoms[place]),
            f"{text}\nimages/s",
            ha="center",
            va="bottom",
            fontsize=8,
        )
    ax.set_ylim(0, 1.35 * max(bottoms))  # the legend stands above the bars
    ax.set_xticks(range(len(steps)), [str(key.K) for key in steps])
    ax.set_xlabel("views K of each image", fontsize=9)
    ax.set_ylabel(f"ms for a training step of {first['batch_size']} views", fontsize=9)
    title = f"Whole steps: {first['model']}, {first['precision']}\n{first['loader']} loader, "
    ax.set_title(title + policy_name(first, steps[0].policy).split(" (")[0], fontsize=10)
    lines, labels = ax.get_legend_handles_labels()
    ax.legend(lines[::-1], labels[::-1], fontsize=8, loc="upper left", ncols=2, frameon=False)
    ax.tick_params(labelsize=9)
