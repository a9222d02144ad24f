"""Values of runs as the page writes them. Runs may come from anyone: any value may be no number."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any

from fastaug.experiments.page_html import Cell

NOTHING = "–"  # noqa: RUF001
_LARGEST = 1e100
"""Beyond it, differences of two values could be infinite."""


def number(value: Any) -> float | None:
    """A value that can be drawn and averaged, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # Compared as it is: a whole number may be larger than any float.
    return float(value) if abs(value) < _LARGEST else None


def numbers(values: Iterable[Any]) -> list[float]:
    return [known for value in values if (known := number(value)) is not None]


def percent(value: float) -> str:
    return f"{100 * value:.2f}"


def short(value: float) -> str:
    return f"{value:.4g}"


def measure_text(name: str, value: Any) -> str:
    """Accuracies in per cent, others in their own unit."""
    known = number(value)
    if known is None:
        return NOTHING
    return f"{percent(known)} %" if is_accuracy(name) else short(known)


def is_accuracy(name: str) -> bool:
    return name.startswith(("top", "tta_"))


def spread(values: Iterable[Any], *, accuracy: bool) -> Cell:
    """The mean over the seeds, with the smallest and largest where there are several."""
    known = numbers(values)
    if not known:
        return Cell(NOTHING)
    write = percent if accuracy else short
    mean = fmean(known)
    if len(known) == 1:
        return Cell(write(mean), mean)
    return Cell(f"{write(mean)} [{write(min(known))}–{write(max(known))}]", mean)  # noqa: RUF001


def one(value: Any, *, accuracy: bool = False) -> Cell:
    """A single value."""
    return spread([value], accuracy=accuracy)


def duration(seconds: Any) -> Cell:
    known = number(seconds)
    if known is None or known < 0:
        return Cell(NOTHING)
    minutes, rest = divmod(round(known), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return Cell(f"{hours} h {minutes} min", known)
    return Cell(f"{minutes} min {rest} s" if minutes else f"{rest} s", known)


def counted(number_of: int, one_name: str, several: str) -> str:
    return f"{number_of:,} {one_name if number_of == 1 else several}"


def size_text(number_of_bytes: int) -> str:
    if number_of_bytes < 1_000_000:
        return f"{number_of_bytes / 1000:.0f} kB"
    return f"{number_of_bytes / 1e6:.1f} MB"
