"""Facts: the results of checks, with advice where something is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastaug.errors import describe_error


@dataclass(frozen=True)
class Fact:
    """Result of a check."""

    value: str
    todo: str = ""
    """What to install or change, in one line; empty if nothing is missing."""
    failed: bool = False
    """Present and broken. Something that is only missing is not a failure."""


Check = Callable[[], Fact]


def run_checks(checks: Mapping[str, Check]) -> dict[str, Fact]:
    return {name: run_check(check) for name, check in checks.items()}


def run_check(check: Check) -> Fact:
    try:
        return check()
    except Exception as error:  # drivers and packages may raise anything
        return Fact(f"check failed: {describe_error(error)}")
