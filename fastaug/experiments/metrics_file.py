"""Reads a metrics.jsonl for plots, also one that another process is still writing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fastaug.experiments.report_format import number
from fastaug.runs.metrics_records import BadLines, metrics_lines, parse_record

Record = dict[str, Any]

MOST_RECORDS = 10_000
"""Evaluations that are kept, and other records. A plot shows few, and a long run has millions."""
_KINDS = {"train", "partial", "eval"}
_NUMBERS = ("step", "epoch", "loss", "nll", "kl", "top1", "tta_top1", "invariance")
"""Kinds and numbers of records that are kept: the report shows no others."""


class Metrics(NamedTuple):
    """Records of a metrics.jsonl, and what is wrong with the file; "" if nothing is."""

    records: list[Record]
    problem: str = ""


class EvenShare:
    """At most MOST_RECORDS of any number of items, at even distances."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, Record]] = []
        self._every, self._seen = 1, 0

    def takes_next(self) -> bool:
        """Count an item; True if it is to be kept."""
        self._seen += 1
        return (self._seen - 1) % self._every == 0

    def keep(self, place: int, record: Record) -> None:
        self.kept.append((place, record))
        if len(self.kept) > MOST_RECORDS:
            self.kept = self.kept[::2]
            self._every *= 2


def read_metrics(file: Path) -> Metrics:
    """Records of a metrics.jsonl with the numbers of the report, none if there is no such file.

    From a long file come an even share of the evaluations and of the others, and the last record.
    Only these lines are checked.
    """
    evaluations, others, bad = EvenShare(), EvenShare(), BadLines()
    problem, last = "", None
    try:
        for line in metrics_lines(file):
            share = evaluations if '"eval"' in line.text else others
            last = None if share.takes_next() else line
            if last is None and (record := parse_record(line.text)) is not None:
                share.keep(line.number, _reduced(record))
            elif last is None:
                bad.add(line)
    except OSError as error:
        problem = f"{file.name}: {error.strerror or error}"
    kept = sorted([*evaluations.kept, *others.kept], key=lambda item: item[0])
    records = [record for _, record in kept]
    if last is not None and (record := parse_record(last.text)) is not None:
        records.append(_reduced(record))
    return Metrics(records, problem or bad.describe())


def equal_parts(records: Sequence[Record], count: int) -> list[Sequence[Record]]:
    """The records in `count` consecutive parts, or in parts of one if there are fewer records."""
    count = min(count, len(records))
    cuts = [len(records) * place // count for place in range(count + 1)] if count else []
    return [records[start:end] for start, end in pairwise(cuts)]


def _reduced(record: Record) -> Record:
    """The parts of a record that the report uses: a stranger's may have any number of others."""
    found = {name: v for name in _NUMBERS if (v := number(record.get(name))) is not None}
    timing = record.get("timing")
    speed = number(timing.get("views_per_s")) if isinstance(timing, dict) else None
    kind = {"kind": record["kind"]} if record["kind"] in _KINDS else {}
    return {**kind, **found, **({} if speed is None else {"timing": {"views_per_s": speed}})}
