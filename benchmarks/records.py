"""Results of benchmarks: rows of a CSV file that is only ever added to, and the machine's names."""

from __future__ import annotations

import csv
import datetime
import io
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fastaug
from fastaug.errors import ConfigError

MACHINE = ("date", "commit", "cpu", "threads", "gpu", "python", "torch", "fastaug")
"""The columns that every benchmark begins with. A run is the rows of one date."""


def machine(device: torch.device) -> dict[str, Any]:
    """The values of MACHINE, for a run that starts now; gpu is empty if none takes part."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
        "commit": commit(Path(__file__).parent),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastaug": fastaug.__version__,
    }


def machine_of(row: Mapping[str, Any]) -> str:
    """What a row was measured on, in a few words."""
    threads = f"{row['threads']} thread" + "s" * (str(row["threads"]) != "1")
    return row["gpu"] or f"{row['cpu']}, {threads}"


def commit(folder: Path) -> str:
    """git describe of the sources, or "unknown"."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Records:
    """A CSV file with these columns: made if it is not there, refused if it has others."""

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
            self._add(",".join(columns) + "\n")
            return
        hint = "move it away, or take another folder with --out"
        _check_columns(path, next(csv.reader(text.splitlines())), self._columns, hint)
        if not text.endswith("\n"):
            self._add("\n")  # an editor took the last one away

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """A row's values by column; a column that it does not name stays empty."""
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
        self._add(text.getvalue())

    def _add(self, text: str) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            file.write(text)  # at once: a run that is killed leaves no half row


def read(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """All rows; an error if the file has other columns."""
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            reader = csv.DictReader(file)
            hint = "give a CSV file that it has written"
            _check_columns(path, list(reader.fieldnames or ()), list(columns), hint)
            return list(reader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def run(rows: Sequence[dict[str, str]], date: str = "") -> list[dict[str, str]]:
    """The rows of the run of that date, or of the one that wrote the last row."""
    return [row for row in rows if row["date"] == (date or rows[-1]["date"])]


def _check_columns(path: Path, found: list[str], expected: list[str], hint: str) -> None:
    if found != expected:
        differ = sorted(set(found) ^ set(expected))
        raise ConfigError(
            f"{path} has other columns than this benchmark writes"
            + (f" ({', '.join(differ[:4])})" if differ else "")
            + f"; {hint}"
        )
