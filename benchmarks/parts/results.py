"""Results of benchmarks: rows of an append-only CSV file, the machine, and printed tables."""

from __future__ import annotations

import csv
import datetime
import io
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as RichTable

import fastaug
from fastaug.errors import ConfigError
from fastaug.runtime.source_version import source_commit

MACHINE = ("date", "commit", "cpu", "threads", "gpu", "python", "torch", "fastaug")
"""The first columns of every benchmark. A run is the rows with one date."""


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The values of MACHINE for a run that starts now; gpu is empty if the device is a CPU."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "commit": source_commit() or "unknown",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastaug": fastaug.__version__,
    }


def machine_name(row: Mapping[str, Any]) -> str:
    """The machine of a row in a few words."""
    threads = f"{row['threads']} thread" + "s" * (str(row["threads"]) != "1")
    return row["gpu"] or f"{row['cpu']}, {threads}"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def summarize(values: Sequence[float], unit: str) -> dict[str, Any]:
    """The columns median, p20, p80, n, unit and status of at least one sample."""
    quantiles = np.quantile(values, (0.5, 0.2, 0.8)).tolist()
    rounded = [round(v) if unit == "bytes" else float(f"{v:.6g}") for v in quantiles]
    row = dict(zip(("median", "p20", "p80"), rounded, strict=True))
    return row | {"n": len(values), "unit": unit, "status": "ok"}


class ResultFile:
    """A CSV file with these columns; created if missing, refused if it has other columns."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self._columns = list(columns)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"--out {path.parent}: cannot be written ({error})") from error
        if not text:
            self._write(",".join(columns) + "\n")
            return
        _check_columns(path, next(csv.reader(text.splitlines())), self._columns)
        if not text.endswith("\n"):
            self._write("\n")  # an editor removed the last newline

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append rows by column name; missing columns stay empty."""
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
        self._write(text.getvalue())

    def _write(self, text: str) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            file.write(text)  # in one call: a killed run leaves no partial row


def read(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """All rows of a file that has exactly these columns."""
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            reader = csv.DictReader(file)
            _check_columns(path, list(reader.fieldnames or ()), list(columns))
            return list(reader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def select_run(rows: Sequence[dict[str, str]], date: str = "") -> list[dict[str, str]]:
    """The rows of the run of that date; by default of the run that wrote the last row."""
    return [row for row in rows if row["date"] == (date or rows[-1]["date"])]


def _check_columns(path: Path, found: list[str], expected: list[str]) -> None:
    if found != expected:
        differ = ", ".join(sorted(set(found) ^ set(expected))[:4])
        raise ConfigError(
            f"{path}: its columns are not those of this benchmark ({differ}); "
            "choose another file, or another folder with --out"
        )


class Table(NamedTuple):
    head: Sequence[str]
    lines: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        every = [self.head, ["---"] * len(self.head), *self.lines]
        return ["| " + " | ".join(line) + " |" for line in every]

    def print(self, console: Console, title: str = "") -> None:
        # The title is printed first: rich would wrap it to the width of the columns.
        console.print(f"\n{title}", style="bold", markup=False, soft_wrap=True)
        shown = RichTable(box=None, pad_edge=False)
        for place, head in enumerate(self.head):
            shown.add_column(head, justify="right" if place else "left", no_wrap=not place)
        for line in self.lines:
            shown.add_row(*line)
        console.print(shown)


def number(value: float | str, scale: float = 1.0, shift: float = 0.0) -> str:
    value = scale * float(value) + shift
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 or not value else f"{value:.2f}"
