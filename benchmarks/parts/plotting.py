"""Plots of benchmarks/throughput.py, kernels.py and predict.py."""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastaug.errors import ConfigError
from parts import throughput_rows as rows
from parts.results import machine_name
from parts.stages import STEP
from parts.throughput_rows import Key
from parts.throughput_tables import (
    VIEW_COST_LOADERS,
    crop_name,
    epoch_cost,
    index,
    policy_name,
    step_policy,
    views_of,
)

# The colors of Okabe and Ito, distinct for all kinds of color vision; markers for gray prints.
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PINK, GRAY = (
    *("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#999999"),
)
LOADER_STYLES = {
    "fastaug fused": (RED, "o"),
    "fastaug dali operators": (BLACK, "X"),
    "fastaug torch": (ORANGE, "s"),
    "torchvision, one decode": (BLUE, "^"),
    "torchvision, K decodes": (SKY, "v"),
    "timm, K decodes": (GREEN, "D"),
    "ffcv": (PINK, "P"),
}
STEP_COLORS = dict(zip(rows.PARTS_OF_STEP, (BLUE, SKY, PINK, GREEN, RED, GRAY), strict=True))
KERNEL_STYLES = {
    "native": (RED, "o"),
    "triton": (ORANGE, "X"),
    "cuda": (PINK, "P"),
    "reference": (SKY, "s"),
    "compiled": (GREEN, "^"),
    "linear": (BLUE, "D"),
    "literal-loop": (GRAY, "<"),
    "literal": (BLACK, "v"),
}
OTHER_STYLES = (("#8C510A", "*"), ("#762A83", "h"), ("#4D9221", "p"))
GPU_COLORS = {"A100": BLUE, "H100": RED, "L4": GREEN, "B200": PINK}
LIMIT_MARKERS = {
    "decode": "v",
    "storage": "s",
    "PCIe": "P",
    "launch": "X",
    "GPU memory bandwidth": "o",
    "GPU arithmetic": "^",
    "all-reduce": "D",
}

Row = Mapping[str, Any]


def save_figure(
    path: Path, size: tuple[float, float], draw: Callable[[Any], object], dpi: int = 160
) -> bool:
    """Draw on a new figure and save it; without matplotlib print a hint and return False."""
    try:
        logging.getLogger("matplotlib").setLevel(logging.WARNING)
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: pip install matplotlib")
        return False
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    try:
        figure.savefig(path, dpi=dpi)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error
    print(f"plot: {path}")
    return True


def _log_axes(ax: Any, xticks: Sequence[int], xlabel: str) -> None:
    """Both axes logarithmic, with plain numbers."""
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(xticks, [f"{tick:,}" for tick in xticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel(xlabel, fontsize=9)
    ax.tick_params(labelsize=9, labelbottom=True)
    ax.grid(alpha=0.3, lw=0.5)


def _legend_below(figure: Any, handles: Sequence[Any], labels: Sequence[str], columns: int) -> None:
    lines = math.ceil(len(handles) / columns)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=math.ceil(len(handles) / max(1, lines)),
        fontsize=9,
        frameon=False,
    )


def _by_style(names: Sequence[str], styles: Mapping[str, object]) -> list[str]:
    return sorted(names, key=lambda name: [*styles, name].index(name))


# --- throughput.py ---


def draw_throughput(run: Sequence[Row], path: Path) -> bool:
    """A column of panels for each policy, images/s above views/s; training steps on the right."""
    found, views, first = index(run), views_of(run), run[0]
    policies = list(
        dict.fromkeys(
            key.policy
            for key, quantity in found
            if key.part == rows.LOADERS and quantity == rows.VIEWS
        )
    )
    steps = [key for key, quantity in found if key.contender == STEP and quantity == rows.EXCESS]
    columns = len(policies) + bool(steps)
    if not columns:
        return False

    def draw(figure: Any) -> None:
        grid = figure.add_gridspec(2, columns)
        handles: dict[str, Any] = {}
        for line, quantity in enumerate((rows.IMAGES, rows.VIEWS)):
            shared = None
            for column, policy in enumerate(policies):
                ax = figure.add_subplot(grid[line, column], sharey=shared)
                shared = shared or ax
                handles |= _draw_loaders(ax, found, views, policy, quantity)
                if line == 0:
                    name = policy_name(first, policy).replace(" (", "\n(")
                    ax.set_title(f"Loaders only: {name}", fontsize=10)
        if steps:
            _draw_steps(figure.add_subplot(grid[:, -1]), found, steps, first)
        what = (
            f"{machine_name(first)}; {first['size']} px, {crop_name(first)}, batches of "
            f"{first['batch_size']} views, {first['workers']} loader workers; points: medians, "
            "bars: 20th to 80th percentile"
        )
        title = "Throughput versus the number of views per image, K\n"
        figure.suptitle(title + textwrap.fill(what, 50 * columns), fontsize=10)
        if handles:
            _legend_below(figure, list(handles.values()), list(handles), 2 * columns)

    return save_figure(path, (0.6 + 3.6 * columns, 6.4), draw)


def _draw_loaders(
    ax: Any, found: Mapping, views: Sequence[int], policy: str, quantity: str
) -> dict[str, Any]:
    """Draw a line for each loader; return the lines by name."""
    handles = {}
    names = dict.fromkeys(key.contender for key, _ in found if key.part == rows.LOADERS)
    for name in _by_style(list(names), LOADER_STYLES):
        own = {k: found.get((Key(rows.LOADERS, name, policy, k), quantity)) for k in views}
        points = [
            (k, *(float(row[column]) for column in ("median", "p20", "p80")))
            for k, row in own.items()
            if row
        ]
        if points:
            k, middle, low, high = zip(*points, strict=True)
            spread = [
                [m - value for m, value in zip(middle, low, strict=True)],
                [value - m for m, value in zip(middle, high, strict=True)],
            ]
            color, marker = LOADER_STYLES.get(name, (GRAY, "x"))
            handles[name] = ax.errorbar(
                k, middle, yerr=spread, color=color, marker=marker, markersize=5, capsize=2
            )
    _log_axes(ax, views, "views per image, K")
    ax.minorticks_off()
    low, high = ax.get_ylim()
    digits = (1, 2, 5) if high > 15 * low else (1, 1.5, 2, 3, 4, 5, 6, 8)
    ticks = [round(d * 10**e) for e in range(1, 7) for d in digits if low <= d * 10**e <= high]
    ax.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    label = "unique images per second" if quantity == rows.IMAGES else "views per second"
    ax.set_ylabel(label, fontsize=9)
    return handles


def _draw_steps(ax: Any, found: Mapping, steps: Sequence[Key], first: Row) -> None:
    """Stacked bars: the parts of a step with the real loader, in ms."""
    bottoms = [0.0] * len(steps)
    times = [float(found[key, rows.TIME]["median"]) for key in steps]
    for name, color in STEP_COLORS.items():
        heights = [
            max(0.0, float(found[key._replace(contender=name), rows.SHARE]["median"])) * time
            for key, time in zip(steps, times, strict=True)
        ]
        ax.bar(range(len(steps)), heights, bottom=bottoms, color=color, label=name, width=0.7)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    for place, (key, time) in enumerate(zip(steps, times, strict=True)):
        rate = float(found[key, rows.IMAGES]["median"])
        text = f"{rate:,.0f}\nimages/s" if rate >= 10 else f"{rate:.1f}\nimages/s"
        height = max(time, bottoms[place])
        ax.text(place, height, text, ha="center", va="bottom", fontsize=8)
    ax.set_ylim(0, 1.35 * max(bottoms))  # room for the legend above the bars
    ax.set_xticks(range(len(steps)), [str(key.K) for key in steps])
    ax.set_xlabel("views per image, K", fontsize=9)
    ax.set_ylabel(f"ms per training step of {first['batch_size']} views", fontsize=9)
    title = f"Training step: {first['model']}, {first['precision']}\n{first['loader']} loader, "
    ax.set_title(title + policy_name(first, steps[0].policy).split(" (")[0], fontsize=10)
    lines, labels = ax.get_legend_handles_labels()
    ax.legend(lines[::-1], labels[::-1], fontsize=8, loc="upper left", ncols=2, frameon=False)
    ax.tick_params(labelsize=9)


def draw_view_cost(run: Sequence[Row], path: Path) -> bool:
    """Two panels: ms per image of loaders versus K, and the time of an epoch relative to K=1."""
    found, views, first = index(run), views_of(run), run[0]
    policy, epochs = step_policy(run), epoch_cost(run)
    if not epochs:
        return False

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for name in VIEW_COST_LOADERS:
            color, marker = LOADER_STYLES[name]
            rates = {k: found.get((Key(rows.LOADERS, name, policy, k), rows.IMAGES)) for k in views}
            costs = {k: 1000 / float(rate["median"]) for k, rate in rates.items() if rate}
            left.plot(list(costs), list(costs.values()), color=color, marker=marker, label=name)
        left.set_ylabel("ms per image", fontsize=9)
        left.set_ylim(bottom=0)
        left.legend(fontsize=8, frameon=False)
        left.set_title("Loaders only", fontsize=10)
        right.bar([str(k) for k in epochs], list(epochs.values()), color=BLUE, width=0.7)
        for place, cost in enumerate(epochs.values()):
            right.text(place, cost, f"{cost:.1f}", ha="center", va="bottom", fontsize=8)
        right.set_ylabel("time of an epoch, relative to K=1", fontsize=9)
        right.set_ylim(0, 1.1 * max(epochs.values()))
        right.set_title("Training", fontsize=10)
        left.set_xticks(views)
        for ax in (left, right):
            ax.set_xlabel("views per image, K", fontsize=9)
            ax.tick_params(labelsize=9)
            ax.grid(axis="y", alpha=0.3, lw=0.5)
        what = (
            f"{machine_name(first)}; {first['size']} px, {policy_name(first, policy)}; "
            f"{first['model']}, {first['precision']}, {first['batch_size']} views per step"
        )
        figure.suptitle(what, fontsize=9)

    return save_figure(path, (9, 3.2), draw)


# --- kernels.py ---


def draw_kernels(run: Sequence[Row], path: Path) -> bool:
    """Time of forward+backward relative to cross_entropy versus K, a panel for each C.

    A C that was measured with several B is drawn with the B of the most K.
    """
    kept = [
        row
        for row in run
        if row["quantity"] in ("forward+backward", "copy")
        and row["to_cross_entropy"]
        and row["contender"] != "cross_entropy-views"  # within microseconds of cross_entropy
    ]
    if not kept:
        return False
    panels = [_kernel_panel(kept, classes) for classes in sorted({int(row["C"]) for row in kept})]
    most = max(len(_panel_views(panel)) for panel in panels)
    panels = [panel for panel in panels if len(_panel_views(panel)) > 1 or most == 1]
    views = sorted(set().union(*map(_panel_views, panels)))
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)

    def draw(figure: Any) -> None:
        axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
        handles: dict[str, Any] = {}
        for place, (ax, panel) in enumerate(zip(axes, panels, strict=False)):
            handles |= _draw_kernel_panel(ax, panel)
            _log_axes(ax, views, "views per image, K")
            ax.set_title(f"C = {int(panel[0]['C']):,}, B = {panel[0]['B']}", fontsize=10)
            if place % columns == 0:
                ax.set_ylabel("time relative to cross_entropy", fontsize=9)
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        what = f"{machine_name(kept[0])}, {kept[0]['dtype']}, average of {kept[0]['average']}"
        title = "Loss and gradient: time relative to cross_entropy\n"
        figure.suptitle(title + textwrap.fill(what, 48 * columns), fontsize=11)
        names = _by_style(list(handles), KERNEL_STYLES)
        _legend_below(figure, [handles[name] for name in names], names, 2 * columns)

    return save_figure(path, (1.2 + 3 * columns, 1.7 + 2.3 * lines), draw, dpi=200)


def _kernel_panel(kept: Sequence[Row], classes: int) -> list[Row]:
    """The rows of a C with one B, in the order of K."""
    own = sorted((row for row in kept if int(row["C"]) == classes), key=lambda row: int(row["K"]))
    by_images = [[row for row in own if row["B"] == images] for images in {r["B"] for r in own}]
    return max(by_images, key=lambda panel: (len(_panel_views(panel)), int(panel[0]["B"])))


def _panel_views(panel: Sequence[Row]) -> set[int]:
    return {int(row["K"]) for row in panel}


def _draw_kernel_panel(ax: Any, panel: Sequence[Row]) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    beside = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
    others = iter(OTHER_STYLES * len(panel))
    for name in dict.fromkeys(row["contender"] for row in panel):
        own = [row for row in panel if row["contender"] == name]
        k = [int(row["K"]) for row in own]
        ratio = [float(row["to_cross_entropy"]) for row in own]
        if name == "cross_entropy":
            ax.axhline(1, color="k", lw=1, zorder=1)
            ax.annotate("cross_\nentropy", (1, 1), xycoords=ax.get_yaxis_transform(), **beside)
            continue
        if name == "copy":
            ax.plot(k, ratio, "k--", lw=1, zorder=1)
            ax.annotate("copy", (1, ratio[-1]), xycoords=ax.get_yaxis_transform(), **beside)
            continue
        color, marker = KERNEL_STYLES.get(name) or next(others)
        handles[name] = ax.plot(k, ratio, color=color, marker=marker, ms=5, lw=1.5)[0]
        # The spread is the contender's own: cross_entropy's cancels within a round.
        share = [r / float(row["median"]) for r, row in zip(ratio, own, strict=True)]
        band = (
            [s * float(row[edge]) for s, row in zip(share, own, strict=True)]
            for edge in ("p20", "p80")
        )
        ax.fill_between(k, *band, color=color, alpha=0.25, lw=0)
    return handles


# --- predict.py ---


def draw_prediction(found: Sequence[Row], path: Path, *, settings: str) -> bool:
    """The smallest count versus K; all GPUs versus their count, at the smallest and largest K."""
    images = [row for row in found if row["quantity"] == "images/s"]
    fewest = min(row["count"] for row in images)
    ks = sorted({row["K"] for row in images})
    gpus = f"{fewest:,} GPU" + "s" * (fewest > 1)
    panels = [("count", fewest, "K", gpus, "views per image, K")]
    panels += [
        ("K", k, "count", f"all GPUs together, K = {k}", "number of GPUs")
        for k in dict.fromkeys((ks[0], ks[-1]))
    ]

    def draw(figure: Any) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for ax in axes[2:]:
            ax.sharey(axes[1])
        for ax, (fixed, value, x, title, label) in zip(axes, panels, strict=True):
            own = [row for row in images if row[fixed] == value]
            _draw_gpus(ax, own, x)
            _log_axes(ax, sorted({row[x] for row in own}), label)
            ax.set_title(title, fontsize=10)
        axes[0].set_ylabel("images/s", fontsize=9)
        title = "PREDICTION, not a measurement: training throughput, and what limits it"
        figure.suptitle(f"{title}\n{settings}", fontsize=11)
        names = dict.fromkeys(row["device"] for row in images)
        handles: list[Any] = [Line2D([], [], color=GPU_COLORS[name], label=name) for name in names]
        handles += [
            Line2D([], [], color="k", ls="", marker=LIMIT_MARKERS[limit], label=f"limit: {limit}")
            for limit in dict.fromkeys(row["limit"] for row in images)
        ]
        handles.append(Patch(color="k", alpha=0.2, lw=0, label="range of the assumptions"))
        _legend_below(figure, handles, [handle.get_label() for handle in handles], 6)

    return save_figure(path, (3.7 * len(panels), 4.1), draw, dpi=200)


def _draw_gpus(ax: Any, found: Sequence[Row], x: str) -> None:
    for gpu in dict.fromkeys(row["device"] for row in found):
        own = sorted((row for row in found if row["device"] == gpu), key=lambda row: row[x])
        places = [row[x] for row in own]
        low, mid, high = ([float(row[c]) for row in own] for c in ("low", "value", "high"))
        ax.plot(places, mid, color=GPU_COLORS[gpu], lw=1.5)
        ax.fill_between(places, low, high, color=GPU_COLORS[gpu], alpha=0.2, lw=0)
        for place, value, row in zip(places, mid, own, strict=True):
            ax.plot(place, value, color=GPU_COLORS[gpu], marker=LIMIT_MARKERS[row["limit"]], ms=6)
