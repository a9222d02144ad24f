"""The content of a GPU report: parts with their checks and tables, as they are in its JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, get_args

from fastaug.errors import ConfigError

SCHEMA = "fastaug GPU report"
SCHEMA_VERSION = 1
"""Increase it when a reader of earlier reports would misread a new one."""

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check of a part."""

    name: str
    outcome: Outcome
    seconds: float
    detail: str = ""
    """What was found; for a failure, the last lines of the traceback."""


@dataclass(frozen=True)
class TableResult:
    """Measured values. A cell is a number, a text, or None."""

    name: str
    title: str
    columns: tuple[tuple[str, str], ...]
    """(name, unit) of each column; the unit is empty where there is none."""
    rows: list[list[Any]] = field(default_factory=list)

    def records(self) -> list[dict[str, Any]]:
        """The rows by column name."""
        names = [name for name, _ in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]


@dataclass(frozen=True)
class PartResult:
    """Result of a part. outcome: failed if a check failed or the process ended early."""

    name: str
    title: str
    outcome: Outcome
    seconds: float
    detail: str = ""
    """Why it was skipped, or how its process ended."""
    checks: tuple[CheckResult, ...] = ()
    tables: tuple[TableResult, ...] = ()
    output: str = ""
    """Last lines that a failed part printed."""

    def count(self, outcome: Outcome) -> int:
        return sum(check.outcome == outcome for check in self.checks)

    @property
    def reason(self) -> str:
        """One line on why it did not pass; "" if it did."""
        checks = [check for check in self.checks if check.outcome == self.outcome]
        if self.outcome == "passed" or (not checks and not self.detail):
            return ""
        if self.detail:
            return self.detail
        last = checks[0].detail.rstrip().rpartition("\n")[2]
        more = f" (and {len(checks) - 1} more)" if len(checks) > 1 else ""
        return shorten(f"{checks[0].name}: {last}", 160, placeholder=" ...") + more

    def table(self, name: str) -> TableResult | None:
        return next((table for table in self.tables if table.name == name), None)


@dataclass(frozen=True)
class GpuReport:
    """All parts of a run of --gpu-report. Nothing in it names the machine or its user."""

    made: str
    """Date and time, UTC."""
    fastaug: str
    torch: str
    gpus: tuple[str, ...]
    """Names, as torch reports them."""
    stand_in: bool
    """True if the GPUs are stand-ins of fastaug's tests: times mean nothing then."""
    quick: bool
    complete: bool
    """False while parts are still to come, and after Ctrl-C."""
    parts: tuple[PartResult, ...] = ()

    @property
    def failed(self) -> bool:
        return any(part.outcome == "failed" for part in self.parts)

    def part(self, name: str) -> PartResult | None:
        return next((part for part in self.parts if part.name == name), None)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **asdict(self)}


def outcome_of(checks: Sequence[CheckResult]) -> Outcome:
    """The outcome of a part with these checks: skipped if none was run."""
    outcomes = {check.outcome for check in checks}
    if "failed" in outcomes:
        return "failed"
    return "passed" if "passed" in outcomes else "skipped"


def read_report(path: Path, flag: str) -> GpuReport:
    """A report from its JSON file; ConfigError names the flag if it is not one."""
    hint = "write one on a GPU machine: python -m fastaug.doctor --gpu-report"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; {hint}") from error
    except ValueError as error:
        raise ConfigError(f"{flag} {path}: not a JSON file; {hint}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ConfigError(f"{flag} {path}: not a GPU report; {hint}")
    if content.get("schema_version") != SCHEMA_VERSION:
        version = content.get("schema_version")
        raise ConfigError(
            f"{flag} {path}: has schema version {version!r}, this fastaug reads {SCHEMA_VERSION}; "
            "use the fastaug that wrote it"
        )
    try:
        return _report(content)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{flag} {path}: a damaged GPU report ({error!r}); {hint}") from error


def _report(content: Mapping[str, Any]) -> GpuReport:
    names = ("made", "fastaug", "torch", "stand_in", "quick", "complete")
    return GpuReport(
        **{name: content[name] for name in names},
        gpus=tuple(content["gpus"]),
        parts=tuple(_part(part) for part in content["parts"]),
    )


def _part(content: Mapping[str, Any]) -> PartResult:
    checks = tuple(CheckResult(**check) for check in content["checks"])
    for named in (content, *content["checks"]):
        if named["outcome"] not in get_args(Outcome):
            raise ValueError(f"outcome {named['outcome']!r}")
    tables = tuple(_table(table) for table in content["tables"])
    return PartResult(**{**content, "checks": checks, "tables": tables})


def _table(content: Mapping[str, Any]) -> TableResult:
    columns = tuple((str(name), str(unit)) for name, unit in content["columns"])
    table = TableResult(**{**content, "columns": columns})
    table.records()  # raises if a row has another number of cells
    return table
