"""Results of a part, written line by line in its process, so that a crash loses nothing."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastaug.diagnostics.gpu_report.results import CheckResult, Outcome, TableResult
from fastaug.errors import FastaugError, describe_error

STAND_IN = "Null GPU"
"""Name of the stand-in GPUs of fastaug's tests (tests/tools/nullgpu)."""
TRACEBACK_LINES = 12


class SkippedCheck(Exception):
    """A check cannot run here; the message says why."""


class GpuLostError(Exception):
    """This process can no longer use the GPU, because of a check that has failed."""


class Check(NamedTuple):
    """A named check. run() raises if it fails, and may return a line on what it found."""

    name: str
    run: Callable[[], str | None]
    quick: bool = False
    """True if it is part of the quick form: small sizes, a few of each kind."""


def is_stand_in(name: str) -> bool:
    """True for the name of a stand-in GPU."""
    return name.startswith(STAND_IN)


def needs_real_gpu(why: str) -> None:
    """Skip the check on a stand-in GPU."""
    if is_stand_in(torch.cuda.get_device_name()):
        raise SkippedCheck(f"needs a real GPU: {why}")


class Recorder:
    """Writes each check and each row of a table to a file, one JSON line each."""

    def __init__(self, file: Path, folder: Path, *, quick: bool) -> None:
        self._file = file
        self.folder = folder
        """For files that the part needs; removed after the run."""
        self.quick = quick

    def run(self, checks: Iterable[Check]) -> None:
        """Run all checks; in the quick form, the quick ones."""
        for check in checks:
            if check.quick or not self.quick:
                with self.check(check.name) as found:
                    found.append(check.run() or "")

    @contextmanager
    def check(self, name: str) -> Iterator[list[str]]:
        """Record the block as a check. It may append to the list what it has found.

        GpuLostError ends the part if the block fails and leaves the GPU unusable.
        """
        started, found, lost = time.perf_counter(), list[str](), False
        outcome: Outcome = "passed"
        try:
            yield found
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # a faulting kernel may only show here
        except SkippedCheck as error:
            outcome, found = "skipped", [str(error)]
        except Exception as error:  # drivers, packages and kernels may raise anything
            outcome, found = "failed", [_last_lines(error)]
            lost = _gpu_is_lost()
        seconds = round(time.perf_counter() - started, 3)
        self._write_check(CheckResult(name, outcome, seconds, "; ".join(filter(None, found))))
        if lost:
            raise GpuLostError(f"not run: the GPU cannot be used after {name!r}")

    def end(self, error: Exception | None = None) -> None:
        """The part is done. error: what ended it before, outside of its checks."""
        if error is not None:
            lost = isinstance(error, GpuLostError)
            outcome: Outcome = "skipped" if lost else "failed"
            detail = str(error) if lost else _last_lines(error)
            self._write_check(CheckResult("all other checks", outcome, 0.0, detail))
        self._write("end", {})

    def table(self, name: str, title: str, columns: Sequence[tuple[str, str]]) -> None:
        """Start a table: (name, unit) of each column."""
        self._write("table", asdict(TableResult(name, title, tuple(columns))))

    def row(self, table: str, *cells: Any) -> None:
        self._write("row", {"table": table, "cells": [_cell(cell) for cell in cells]})

    def _write_check(self, result: CheckResult) -> None:
        self._write("check", asdict(result))

    def _write(self, kind: str, content: dict[str, Any]) -> None:
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **content}) + "\n")


class Recorded(NamedTuple):
    """What the process of a part has written before it ended."""

    checks: tuple[CheckResult, ...]
    tables: tuple[TableResult, ...]
    ended: bool
    """True if the part came to its end."""


def read_records(file: Path) -> Recorded:
    checks: list[CheckResult] = []
    tables: dict[str, TableResult] = {}
    ended = False
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    for line in lines:
        content = json.loads(line)
        match content.pop("kind"):
            case "check":
                checks.append(CheckResult(**content))
            case "table":
                columns = tuple((name, unit) for name, unit in content.pop("columns"))
                tables[content["name"]] = TableResult(**content, columns=columns)
            case "row":
                tables[content["table"]].rows.append(content["cells"])
            case "end":
                ended = True
    return Recorded(tuple(checks), tuple(tables.values()), ended)


def _gpu_is_lost() -> bool:
    """True if an error has ended this process' use of the GPU: CUDA reports it in every call."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda").add_(1).cpu()
    except Exception:
        return True
    return False


def _last_lines(error: Exception) -> str:
    if isinstance(error, FastaugError):  # one line that says everything
        return describe_error(error)
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(lines[-TRACEBACK_LINES:])


def _cell(value: Any) -> Any:
    """A value that JSON has: numbers with six digits, NaN and infinity as text."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value
