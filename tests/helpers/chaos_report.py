"""The counts of chaos.py: of faults by kind and by setting, as a table and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from chaos_round import Result
from rich.table import Table

from fastaug.runtime.atomic import write_json


class Report:
    """All rounds so far, kept in a file that later commands add to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.results: list[Result] = []
        """Rounds with random faults."""
        self.enumerated: list[Result] = []
        if path.exists():
            stored = json.loads(path.read_text())
            self.results = [_result(each) for each in stored["rounds"]]
            self.enumerated = [_result(each) for each in stored["enumerated"]]

    def add(self, result: Result) -> None:
        is_round = not result.is_enumerated
        (self.results if is_round else self.enumerated).append(result)
        write_json(self._path, self.as_json())

    @property
    def next_seed(self) -> int:
        return max((result.seed for result in self.results), default=-1) + 1

    @property
    def faults(self) -> int:
        """How many random faults have hit."""
        return sum(sum(result.faults.values()) for result in self.results)

    @property
    def failures(self) -> int:
        return sum(bool(result.problems) for result in (*self.results, *self.enumerated))

    def has_enumerated(self, name: str) -> bool:
        return any(r.setting == name and not r.problems for r in self.enumerated)

    def by_kind(self) -> Counter[str]:
        return sum((result.faults for result in self.results), Counter())

    def by_setting(self) -> dict[str, Counter[str]]:
        found: dict[str, Counter[str]] = {}
        for result in self.results:
            found.setdefault(result.setting, Counter()).update(result.faults)
        return found

    def as_json(self) -> dict[str, Any]:
        by_setting = self.by_setting()
        return {
            "faults": self.faults,
            "failures": self.failures,
            "restarts": sum(result.restarts for result in self.results),
            "missed": sum(result.missed for result in self.results),
            "by_kind": dict(self.by_kind().most_common()),
            "by_setting": {name: sum(faults.values()) for name, faults in by_setting.items()},
            "enumerated": [_stored(result) for result in self.enumerated],
            "rounds": [_stored(result) for result in self.results],
        }

    def table(self) -> Table:
        table = Table("fault", "times")
        for kind, count in sorted(self.by_kind().items()):
            table.add_row(kind, f"{count:,}")
        table.add_section()
        table.add_row("all random faults", f"{self.faults:,}")
        table.add_row("missed (not counted)", f"{sum(r.missed for r in self.results):,}")
        table.add_section()
        for result in self.enumerated:
            for kind, count in sorted(result.faults.items()):
                table.add_row(f"enumerated: {kind}", f"{count:,}")
        table.add_section()
        for name, faults in self.by_setting().items():
            rounds = sum(result.setting == name for result in self.results)
            table.add_row(f"{name} ({rounds} rounds)", f"{sum(faults.values()):,}")
        table.add_section()
        table.add_row("rounds", f"{len(self.results):,}")
        table.add_row("restarts", f"{sum(r.restarts for r in self.results):,}")
        table.add_row("failures", f"{self.failures:,}")
        return table


def _result(stored: dict[str, Any]) -> Result:
    return Result(**{**stored, "faults": Counter(stored["faults"])})


def _stored(result: Result) -> dict[str, Any]:
    return {**vars(result), "faults": dict(result.faults)}
