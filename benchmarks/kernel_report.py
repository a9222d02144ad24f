"""What benchmarks/kernels.py says: a table for each case, and the project's targets at the end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from contenders import BOTH, COPY, DIRECT, FORWARD, Case
from rich.console import Console
from rich.table import Table

MEMORY = "memory"
PAPER_STEP = Case(4, 16, 100)
"""A step of the paper's CIFAR experiments at K = 16: so small that overhead is nearly all of it."""


def show(case: Case, rows: Sequence[Mapping[str, Any]], said: set[str]) -> None:
    """Medians in ms, spread and ratios of forward+backward; below, once, who is not there."""
    console = Console(highlight=False)
    table = Table(title=f"\n{case}", title_justify="left", title_style="bold", box=None)
    heads = ("forward\nms", "forward+\nbackward", "±", "value_\nand_grad")
    for head in ("", *heads, "x cross_\nentropy", "x\ncopy", "memory\n"):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    found = {(row["contender"], row["quantity"]): row for row in rows if row["status"] == "ok"}
    for name in dict.fromkeys(name for name, _ in found):
        cells = {quantity: row for (other, quantity), row in found.items() if other == name}
        main = cells.get(BOTH) or cells.get(COPY) or {}
        spread = (main["p80"] - main["p20"]) / 2 / main["median"] if main else math.nan
        table.add_row(
            name,
            _three_digits(cells.get(FORWARD, {}).get("median")),
            _three_digits(main.get("median")),
            f"{100 * spread:.0f}%" if main else "",
            _three_digits(cells.get(DIRECT, {}).get("median")),
            _three_digits(main.get("to_cross_entropy")),
            _three_digits(main.get("to_copy")),
            _bytes(cells.get(MEMORY, {}).get("median")),
        )
    if found:
        console.print(table)
    for row in rows:
        note = f"{row['contender']}: {row['status']}"
        if row["status"] != "ok" and note not in said:
            console.print(f" {note}", markup=False, soft_wrap=True)
            said.add(note)


def _three_digits(value: float | None) -> str:
    if not value:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{2 - math.floor(math.log10(value))}f}"


def _bytes(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e6:,.1f} MB" if value >= 1e6 else f"{value / 1e3:,.1f} kB"


def verdicts(run: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """The project's targets, those whose cases the run has."""
    rows = {
        (row["contender"], row["quantity"], row["B"], row["K"], row["C"]): row
        for row in run
        if row["status"] == "ok" and row["dtype"] == "fp32" and row["device"] == "cpu"
    }

    def value(name: str, case: Case, quantity: str = BOTH, column: str = "median") -> float:
        images, views, classes = map(str, case)
        return float(rows.get((name, quantity, images, views, classes), {}).get(column) or math.nan)

    eight, sixteen = Case(128, 8, 1000), Case(128, 16, 1000)
    ours = value("native", eight)
    relative = partial(value, "native", column="to_cross_entropy")
    for what, found, target in (
        (f"native / cross_entropy, {eight}, {DIRECT}", relative(eight, DIRECT), "<= 1"),
        (f"native / cross_entropy, {eight}, {BOTH}", relative(eight), "<= 1"),
        (f"literal / native, {eight}, {BOTH}", value("literal", eight) / ours, ">= 25"),
        # For information: the target was set against the form above.
        (f"literal-loop / native, {eight}, {BOTH}", value("literal-loop", eight) / ours, ""),
        (f"compiled / native, {eight}, {BOTH}", value("compiled", eight) / ours, ">= 2.5"),
        (f"native, K=16 / K=8, B=128 C=1000, {BOTH}", value("native", sixteen) / ours, "<= 2.2"),
        (f"native / cross_entropy, {PAPER_STEP}, {BOTH}", relative(PAPER_STEP), "<= 1"),
        (
            f"native / cross_entropy-views, {PAPER_STEP}, {BOTH}",
            value("native", PAPER_STEP) / value("cross_entropy-views", PAPER_STEP),
            "",
        ),
    ):
        if not math.isnan(found):
            yield f"{what}: {found:.2f}{_verdict(found, target)}"


def _verdict(found: float, target: str) -> str:
    if not target:
        return ""
    sign, bound = target.split()
    met = found <= float(bound) if sign == "<=" else found >= float(bound)
    return f" (target {target}): {'met' if met else 'not met'}"
