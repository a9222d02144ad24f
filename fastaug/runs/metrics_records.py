"""The records of metrics.jsonl: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastaug.runtime.folder_files import read_lines

FILE_BYTES = 2**30
"""Most bytes of a metrics.jsonl: a record has about 300, so these are over 3 million."""
LINE_BYTES = 2**20
"""Most bytes of a line: a skipped step lists its images, and 100,000 of them take 0.9 MB."""
MOST_LINES = 5_000_000
_MOST_STEPS = 2**53
"""Larger numbers of steps are not exact as a float."""


class Line(NamedTuple):
    """A line of metrics.jsonl."""

    number: int
    """1 for the first line."""
    text: str
    """Without its end."""
    is_torn: bool
    """True for a last line without an end: a process was killed, or is writing it."""


def parse_record(text: str) -> dict[str, Any] | None:
    """The record of a line; None if it is not one."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if is_record(record) else None


def is_record(value: Any) -> bool:
    """True for an object with a kind and a step, and with an epoch if it is an evaluation."""
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        return False
    step, epoch = value.get("step"), value.get("epoch")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < _MOST_STEPS:
        return False
    # Compared before a conversion: an int may be too large for a float.
    return value["kind"] != "eval" or (
        isinstance(epoch, (int, float)) and -_MOST_STEPS < epoch < _MOST_STEPS
    )


def metrics_lines(file: Path) -> Iterator[Line]:
    """The lines of a metrics.jsonl that are not blank; none if there is no such file.

    Raises BadFileError for a pipe, a link, or a file that is too large.
    """
    try:
        lines = read_lines(
            file, most_bytes=FILE_BYTES, line_bytes=LINE_BYTES, most_lines=MOST_LINES
        )
        for number, line in enumerate(lines, 1):
            if text := line.decode("utf-8", errors="replace").strip():
                yield Line(number, text, not line.endswith(b"\n") and len(line) < LINE_BYTES)
    except FileNotFoundError:
        return


class BadLines:
    """Counts the lines that are not records. A torn last line does not count: it is expected."""

    def __init__(self) -> None:
        self.count = self.first = 0

    def add(self, line: Line) -> None:
        if not line.is_torn:
            self.count += 1
            self.first = self.first or line.number

    def describe(self) -> str:
        """Number and place of the lines; "" if there are none."""
        if not self.count:
            return ""
        what = (
            "1 line is not a record" if self.count == 1 else f"{self.count:,} lines are not records"
        )
        return f"metrics.jsonl: {what} and left out (first: line {self.first:,})"
