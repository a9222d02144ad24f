"""What benchmarks/predict.py shows, all marked as PREDICTION: inputs, tables, the picture."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cpu_instance import BUSY, Comparison, CpuInputs
from hardware import Value
from rich.console import Console
from rich.table import Table
from step_model import ALL_REDUCE, COMPUTE, DECODE, LAUNCH, MEMORY, PCIE, STORAGE

# Okabe and Ito's colors; what limits has a marker too, for print in grey.
COLOURS = {"A100": "#0072B2", "H100": "#D55E00", "L4": "#009E73", "B200": "#CC79A7"}
MARKERS = {
    DECODE: ("v", "decoding"),
    STORAGE: ("s", "storage"),
    PCIE: ("P", "PCIe"),
    LAUNCH: ("X", "launching"),
    MEMORY: ("o", "memory bandwidth"),
    COMPUTE: ("^", "GPU arithmetic"),
    ALL_REDUCE: ("D", "all-reduce"),
}

Row = Mapping[str, Any]


def draw(rows: Sequence[Row], path: Path, *, settings: str) -> bool:
    """The fewest GPUs versus K; all GPUs versus their number, at the smallest and largest K."""
    try:
        logging.getLogger("matplotlib").setLevel(logging.WARNING)
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError:
        print("prediction: no picture, pip install matplotlib")
        return False
    images = [row for row in rows if row["quantity"] == "images/s"]
    fewest = min(row["count"] for row in images)
    ks = sorted({row["K"] for row in images})
    gpus = f"{fewest:,} GPU" + "s" * (fewest > 1)
    panels = [("count", fewest, "K", gpus, "views K of each image")]
    panels += [
        ("K", k, "count", f"all GPUs together, K = {k}", "number of GPUs")
        for k in dict.fromkeys((ks[0], ks[-1]))
    ]
    figure = Figure(figsize=(3.7 * len(panels), 4.1), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax in axes[2:]:
        ax.sharey(axes[1])
    for ax, (fixed, value, x, title, label) in zip(axes, panels, strict=True):
        _draw_panel(ax, [row for row in images if row[fixed] == value], x)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel(label, fontsize=9)
    axes[0].set_ylabel("images/s", fontsize=9)
    title = "PREDICTION, not a measurement: training throughput, and what limits it"
    figure.suptitle(f"{title}\n{settings}", fontsize=11)
    limits = dict.fromkeys(row["limit"] for row in images)
    names = dict.fromkeys(row["device"] for row in images)
    handles: list[Any] = [
        Line2D([], [], color=COLOURS.get(name, "k"), label=name) for name in names
    ]
    for limit in limits:
        marker, words = MARKERS[limit]
        handles.append(Line2D([], [], color="k", ls="", marker=marker, label=f"limit: {words}"))
    band = Patch(color="k", alpha=0.2, lw=0, label="all assumptions slow to all fast")
    figure.legend(
        handles=[*handles, band],
        loc="outside lower center",
        ncols=(len(handles) + 2) // 2 if len(handles) > 7 else len(handles) + 1,
        fontsize=9,
        frameon=False,
    )
    figure.savefig(path, dpi=200)
    return True


def _draw_panel(ax: Any, rows: Sequence[Row], x: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    for gpu in dict.fromkeys(row["device"] for row in rows):
        own = sorted((row for row in rows if row["device"] == gpu), key=lambda row: row[x])
        places = [row[x] for row in own]
        color = COLOURS.get(gpu, "k")
        low, mid, high = ([float(row[c]) for row in own] for c in ("low", "value", "high"))
        ax.plot(places, mid, color=color, lw=1.5)
        ax.fill_between(places, low, high, color=color, alpha=0.2, lw=0)
        for place, value, row in zip(places, mid, own, strict=True):
            ax.plot(place, value, color=color, marker=MARKERS[row["limit"]][0], ms=6)
    ticks = sorted({row[x] for row in rows})
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(labelsize=9)
    ax.grid(alpha=0.3, lw=0.5)


def show_inputs(title: str, inputs: Iterable[tuple[str, Value]], console: Console) -> None:
    console.print(f"PREDICTION, not a measurement: {title}. Its inputs:", soft_wrap=True)
    for name, value in inputs:
        number = f"{value.value:g}"
        if value.low is not None:
            number += f" ({value.low:g} to {value.high:g})"
        line = f"  {name}: {number} {value.unit} [{value.source}]"
        console.print(line, markup=False, soft_wrap=True)


def show(title: str, rows: Sequence[Row], console: Console) -> None:
    table = _table(f"PREDICTION: {title}", console)
    for head in ("GPUs", "K", "images/s", "low-high", "views/s", "low-high"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    pairs = ([row for row in rows if row["quantity"] == name] for name in ("images/s", "views/s"))
    for pair in zip(*pairs, strict=True):
        cells = []
        for row in pair:
            value, low, high = (_short(float(row[c])) for c in ("value", "low", "high"))
            cells += [value, f"{low}-{high}"]
        table.add_row(f"{pair[0]['count']:,}", str(pair[0]["K"]), *cells, pair[0]["limit"])
    console.print(table)


def _short(value: float) -> str:
    for scale, letter in ((1e6, "M"), (1e3, "k")):
        if value >= 10 * scale or (letter == "M" and value >= scale):
            return f"{value / scale:.3g}{letter}"
    return f"{value:,.0f}"


def show_check(about: Row, cpu: CpuInputs, found: Comparison, console: Console) -> None:
    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    say(f"CPU instance of the PREDICTION: {about['cpu']}, {about['threads']} threads")
    rates = ", ".join(f"{rate / 1e9:.3g} at {size / 1e6:g} MB" for size, rate in cpu.bandwidth)
    say(f"inputs, probes run now: a 3x3 convolution {cpu.flops / 1e9:.0f} GFLOP/s")
    say(f"  relu, GB/s: {rates}; launch of an operation {1e6 * cpu.launch:.1f} us")
    rows = " and ".join(f"{stage.contender} at K={stage.k}" for stage in found.inputs)
    say(f"inputs, rows of the run of {about['date']}: {rows}")
    say(f"second prediction: forward is an input too; it reaches {found.share:.0%} of the probes")
    if cpu.parallel > BUSY:
        say(
            f"caution: others keep the cores busy (a relu of 1 MB takes {1e3 * cpu.parallel:.1f} "
            "ms): the probes, and with them this comparison, mean little; run it again"
        )
    settings = f"{about['model']}, {about['size']} px, {about['batch_size']} views"
    table = _table(f"PREDICTION and measurement, ms a batch: {settings}", console)
    for head in ("", "K", "measured", "probes\nalone", "error", "calibrated\non forward", "error"):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for line in found.lines:
        cells = [f"{1e3 * line.measured:,.2f}"]
        for seconds in (line.predicted, line.calibrated):
            cells += [f"{1e3 * seconds:,.2f}", f"{seconds / line.measured - 1:+.0%}"]
        if line.stage.contender == "forward":
            cells[-1] = "(input)"
        table.add_row(line.stage.contender, str(line.stage.k or ""), *cells)
    console.print(table)


def _table(title: str, console: Console) -> Table:
    """Its title is printed now: rich would wrap it to the width of the columns."""
    console.print(f"\n{title}", style="bold", markup=False, soft_wrap=True)
    return Table(box=None, pad_edge=False)
