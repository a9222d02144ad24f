"""Reads what wandb has written offline: LevelDB's log format, records as wandb's own protobuf."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

BLOCK = 32 * 1024
HEADER = struct.Struct("<IHB")
"""Checksum, length, and type: 1 whole, 2 first, 3 middle, 4 last part of a record."""


def records(file: Path) -> list[Any]:
    """All records of a .wandb file."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole, parts = file.read_bytes(), 7, b"", []
    while place + HEADER.size <= len(data):
        if BLOCK - place % BLOCK < HEADER.size:  # the end of a block is padded
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(data, place)
        part = data[place + HEADER.size : place + HEADER.size + length]
        place += HEADER.size + length
        whole = part if kind in (1, 2) else whole + part
        if kind in (1, 4):
            parts.append(Record.FromString(whole))
    return parts


def history(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """(step, values) of each call of log()."""
    found = []
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            items = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            found.append((record.history.step.num, items))
    return found


def config(file: Path) -> dict[str, Any]:
    """The settings of the run."""
    found: dict[str, Any] = {}
    for record in records(file):
        for kind in ("run", "config"):
            if record.WhichOneof("record_type") == kind:
                update = record.run.config if kind == "run" else record.config
                found |= {u.key: json.loads(u.value_json) for u in update.update}
    return found
