"""Reads a metrics.jsonl, also one that another process is still writing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_READ_BYTES = 1_000_000
"""Bytes of a metrics.jsonl that are parsed, about 5,000 lines."""


def read_metrics(file: Path) -> Iterator[dict[str, Any]]:
    """Records of a metrics.jsonl, none if there is no such file.

    A long training has millions of records and a plot shows few. From a large file come all
    evaluations, the last record, and an even share of the others.
    """
    if not file.is_file():
        return
    every = max(1, file.stat().st_size // _READ_BYTES)
    skipped = ""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for place, line in enumerate(lines):
            skipped = line if place % every and '"eval"' not in line else ""
            if not skipped:
                yield from _parse(line)
    yield from _parse(skipped)


def _parse(line: str) -> Iterator[dict[str, Any]]:
    """The record of a line; none for a line that is incomplete or not a JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return
    if isinstance(record, dict):
        yield record
