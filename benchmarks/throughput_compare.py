"""benchmarks/throughput.py --compare: two runs side by side, and what became slower."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import records
import throughput_rows as table
from loader_parts import FUSED
from records import machine_of
from rich.console import Console
from rich.table import Table
from stages import LOADER
from throughput_report import Found, Row, index, key_of
from throughput_rows import Key

from fastaug.errors import ConfigError

COMPARED = {table.TIME: "lower", table.VIEWS: "higher", table.MARGINAL: "lower"}
"""Quantity -> which is better. Others follow from these, or are no matter of speed."""
TOLERANCE = 0.03
"""Less than this is no change, however small the spread of the two runs is."""


def compare(files: Sequence[Path]) -> int:
    """Print the ratios; 1 if something became slower beyond the noise, else 0."""
    before, after = _runs(files)
    console = Console(highlight=False)
    for name, run in (("before", before), ("after", after)):
        first = run[0]
        console.print(
            f"{name}: {first['date']}, commit {first['commit']}, {machine_of(first)}",
            soft_wrap=True,
        )
    for line in _differences(before[0], after[0]):
        console.print(line, soft_wrap=True, markup=False)
    shown = Table(box=None)
    for head in ("", "quantity", "before", "after", "ratio", ""):
        shown.add_column(head, justify="left" if head in ("", "quantity") else "right")
    verdicts: list[str] = []
    ours, theirs = index(after), index(before)
    for (key, quantity), row in ours.items():
        if quantity not in COMPARED or (key, quantity) not in theirs:
            continue
        if key.contender == LOADER or (quantity == table.TIME and (key, table.VIEWS) in ours):
            continue  # the same once more
        old = theirs[key, quantity]
        verdicts.append(judge(old, row, COMPARED[quantity]))
        values = [float(each["median"]) for each in (old, row)]
        shown.add_row(
            str(key),
            f"{quantity}, {row['unit']}" if row["unit"] != quantity else quantity,
            *(f"{value:,.4g}" for value in values),
            f"{values[1] / values[0]:.3f}",
            verdicts[-1],
        )
    console.print(shown)
    for line in (*_relative(theirs, ours), *_gone(before, after)):
        console.print(line, markup=False, soft_wrap=True)
    if not verdicts:
        raise ConfigError("the two runs have nothing in common to compare")
    slower, faster = (verdicts.count(word) for word in ("SLOWER", "faster"))
    console.print(
        f"of {len(verdicts)}: {slower} slower, {faster} faster beyond the noise (no overlap "
        f"of the 20th to 80th percentiles, and more than {100 * TOLERANCE:.0f}%)",
        soft_wrap=True,
    )
    return 1 if slower else 0


def judge(before: Row, after: Row, better: str) -> str:
    """faster, SLOWER, or nothing: the difference is within the noise."""
    old, new = (
        {column: float(row[column]) for column in ("median", "p20", "p80")}
        for row in (before, after)
    )
    if abs(new["median"] / old["median"] - 1) <= TOLERANCE:
        return ""
    if new["p20"] <= old["p80"] and old["p20"] <= new["p80"]:
        return ""
    grown = new["median"] > old["median"]
    return "faster" if grown == (better == "higher") else "SLOWER"


def _runs(files: Sequence[Path]) -> list[list[dict[str, str]]]:
    read = [records.read(path, table.COLUMNS) for path in files]
    for path, rows in zip(files, read, strict=True):
        if not rows:
            raise ConfigError(f"{path}: holds no run")
    if len({path.resolve() for path in files}) == 2:
        return [records.run(rows) for rows in read]
    dates = list(dict.fromkeys(row["date"] for row in read[0]))
    if len(dates) < 2:
        raise ConfigError(f"{files[0]}: holds one run alone, there is nothing to compare it with")
    return [records.run(read[0], date) for date in dates[-2:]]


def _differences(before: Row, after: Row) -> Iterator[str]:
    for column in (*table.SETTINGS, "cpu", "threads", "gpu", "torch", "dali", "torchvision"):
        if before[column] != after[column]:
            yield f"note: {column} was {before[column] or 'none'}, is {after[column] or 'none'}"


def _relative(before: Found, after: Found) -> Iterator[str]:
    """How far the loaders moved against one another, which a slower machine does not change."""
    moved: dict[Key, float] = {}
    for key, quantity in after:
        base = key._replace(contender=FUSED)
        if quantity != table.VIEWS or key.part != table.LOADERS or key == base:
            continue
        rows = [found.get((of, quantity)) for found in (after, before) for of in (key, base)]
        if all(rows):
            mine, its, old, its_old = (float(row["median"]) for row in rows if row)
            moved[key] = math.log(mine / its / (old / its_old))
    if moved:
        over_k = {
            loader: statistics.mean(v for key, v in moved.items() if key._replace(K="") == loader)
            for loader in {key._replace(K="") for key in moved}
        }
        yield (
            f"against {FUSED}, the other loaders moved by at most {_most(over_k)}, as means over "
            f"all K; at a single K by at most {_most(moved)}"
        )


def _most(moved: Mapping[Key, float]) -> str:
    key = max(moved, key=lambda key: abs(moved[key]))
    return f"{100 * math.expm1(abs(moved[key])):.1f}% ({key})"


def _gone(before: Sequence[Row], after: Sequence[Row]) -> Iterator[str]:
    """What one run has and the other one has not, or could not run."""
    ran = [{key_of(row) for row in run if row["status"] == "ok"} for run in (before, after)]
    status: Mapping = {key_of(row): row["status"] for row in after if row["status"] != "ok"}
    for key in sorted(ran[0] - ran[1], key=str):
        yield f"gone: {key}{': ' + status[key] if key in status else ''}"
    for key in sorted(ran[1] - ran[0], key=str):
        yield f"new: {key}"
