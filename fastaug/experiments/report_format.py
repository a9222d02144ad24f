"""Values of runs as text. Run folders may come from anyone: any value may have any type."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any, NamedTuple

from fastaug.engine.metrics import is_percentage

MISSING = "–"  # noqa: RUF001
_LARGEST, _SMALLEST = 1e100, 1e-100
"""The difference of two larger values could be infinite, and smaller ones count as 0: a thousandth
of them could be 0."""


class Cell(NamedTuple):
    """A cell of a table: its text, and the number to sort by."""

    text: str
    value: float | None = None


def number(value: Any) -> float | None:
    """A value as a finite float; None for anything else. Too small a value is 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # Compared before the conversion: an int may be too large for a float.
    if not abs(value) < _LARGEST:  # also NaN
        return None
    return float(value) if abs(value) > _SMALLEST else 0.0


def percent(value: float) -> str:
    return f"{100 * value:.2f}"


def short(value: float) -> str:
    return f"{value:.4g}"


def measure_text(name: str, value: Any) -> str:
    """Accuracies in percent, other measures as they are."""
    known = number(value)
    if known is None:
        return MISSING
    return f"{percent(known)} %" if is_percentage(name) else short(known)


def mean_cell(values: Iterable[Any], *, accuracy: bool = False) -> Cell:
    """The mean over the seeds, and the smallest and largest value if there are several."""
    known = [found for value in values if (found := number(value)) is not None]
    if not known:
        return Cell(MISSING)
    write = percent if accuracy else short
    mean = fmean(known)
    spread = f" [{write(min(known))}–{write(max(known))}]" if len(known) > 1 else ""  # noqa: RUF001
    return Cell(write(mean) + spread, mean)


def duration(seconds: Any) -> Cell:
    known = number(seconds)
    if known is None or known < 0:
        return Cell(MISSING)
    minutes, rest = divmod(round(known), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return Cell(f"{hours} h {minutes} min", known)
    return Cell(f"{minutes} min {rest} s" if minutes else f"{rest} s", known)


def counted(count: int, singular: str, plural: str = "") -> str:
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"
