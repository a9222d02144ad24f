"""The journal of an unfinished pack: which shards are finished, so that it can be continued.

One line of JSON for the settings, then one for each finished shard, in order.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fastaug.data.image_set import Split
from fastaug.data.readers.packed_index import JOURNAL, ROW, PackedShard
from fastaug.errors import ConfigError, DataError
from fastaug.runtime.atomic import atomic_write
from fastaug.settings import flag


@dataclass(frozen=True)
class FinishedShard:
    """A shard, and the source images that it covers."""

    split: Split
    shard: PackedShard
    rows: np.ndarray
    """[n] of ROW."""
    next: int
    """Index of the source image with which the next shard begins."""
    bad: dict[int, str]
    """Source image -> why it was left out, for those between this shard's first and `next`."""

    def to_line(self) -> str:
        rows = base64.b64encode(self.rows.tobytes()).decode()
        return json.dumps({**vars(self), "shard": vars(self.shard), "rows": rows}) + "\n"

    @classmethod
    def from_line(cls, line: str) -> FinishedShard:
        entry = json.loads(line)
        if entry["split"] not in get_args(Split):
            raise ValueError(entry["split"])
        rows = np.frombuffer(base64.b64decode(entry["rows"]), ROW)
        shard = PackedShard(**entry["shard"])
        bad = {int(index): str(reason) for index, reason in entry["bad"].items()}
        return cls(entry["split"], shard, rows, int(entry["next"]), bad)


class Journal:
    """The journal of a folder, new or continued."""

    def __init__(self, root: Path, made_with: dict[str, Any]) -> None:
        self._file = root / JOURNAL
        self.made_with = made_with
        self.finished: list[FinishedShard] = []
        if self._file.exists():
            self.finished = self._read()
        self.keep(self.finished)

    def keep(self, finished: Iterable[FinishedShard]) -> None:
        """Write the journal with these shards only."""
        self.finished = list(finished)
        with atomic_write(self._file) as temporary, temporary.open("w") as file:
            file.write(json.dumps(self.made_with) + "\n")
            file.writelines(entry.to_line() for entry in self.finished)

    def append(self, entry: FinishedShard) -> None:
        self.finished.append(entry)
        with self._file.open("a") as file:
            file.write(entry.to_line())
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        self._file.unlink()

    def _read(self) -> list[FinishedShard]:
        with self._file.open() as file:
            try:
                made_with = json.loads(file.readline())
            except ValueError as error:
                raise DataError(
                    f"{self._file}: damaged; remove the folder and start over"
                ) from error
            check_same(self._file.parent, made_with, self.made_with)
            finished = []
            for line in file:
                try:
                    finished.append(FinishedShard.from_line(line))
                except (ValueError, KeyError, TypeError):  # cut by a kill: this shard is redone
                    break
        return finished


def check_same(root: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise unless a folder was made with the settings and from the source of this command."""
    changed = [name for name in now if before.get(name) != now[name]]
    if not changed:
        return
    if "source" in changed:
        what = "from another source, or its files have changed"
    else:
        names = [flag(name) if name != "pillow" else "Pillow" for name in changed]
        values = [before.get(name) for name in changed]
        what = "with " + ", ".join(f"{n} {v}" for n, v in zip(names, values, strict=True))
        what += " (now " + ", ".join(str(now[name]) for name in changed) + ")"
    raise ConfigError(
        f"{root}: was packed {what}; give the same command, another OUT, or remove the folder"
    )
