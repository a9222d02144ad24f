"""RecordIO (MXNet): images and labels in a .rec file. The .idx file is not needed."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from fastaug.data.readers.shard_file import Record, Shard

MAGIC = struct.pack("<I", 0xCED7230A)
"""First bytes of every part. A record that contains them, at a multiple of 4, is split there."""

_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_HEADER = struct.Struct("<IfQQ")  # number of extra labels, label, two ids


def read_records(shard: Shard) -> Iterator[Record]:
    """Label and image parts of each record; joined with MAGIC, the parts are the image."""
    place = 0
    while place < shard.size:
        record = place
        parts: list[tuple[int, int]] = []
        while True:
            kind, offset, size = _part(shard, place)
            if (kind in (_WHOLE, _FIRST)) == bool(parts) or kind > _LAST:
                raise shard.invalid(place, f"part of kind {kind} is out of order in the record")
            parts.append((offset, size))
            place = offset + size + -size % 4
            if kind in (_WHOLE, _LAST):
                break
        yield _image(shard, record, parts)


def _part(shard: Shard, place: int) -> tuple[int, int, int]:
    """Kind, offset and size of the part whose header is at place."""
    magic, length = struct.unpack("<4sI", shard.read(place, 8))
    if magic != MAGIC:
        raise shard.invalid(place, "not MXNet's RecordIO (its magic number is missing)")
    kind, size = length >> 29, length & (2**29 - 1)
    if place + 8 + size > shard.size:
        raise shard.truncated(place + 8, size)
    return kind, place + 8, size


def _image(shard: Shard, record: int, parts: list[tuple[int, int]]) -> Record:
    """The label, and the parts without the header and the extra labels."""
    extra, label, _, _ = _HEADER.unpack(_head(shard, record, parts, _HEADER.size))
    if extra:
        (label,) = struct.unpack_from(
            "<f", _head(shard, record, parts, _HEADER.size + 4), _HEADER.size
        )
    if not label.is_integer():  # also false for nan and inf
        raise shard.invalid(record, f"the label must be a whole number, got {label}")
    left = _HEADER.size + 4 * extra
    for number, (offset, size) in enumerate(parts):
        if left <= size:
            return Record(int(label), ((offset + left, size - left), *parts[number + 1 :]))
        left -= size + len(MAGIC)
        if left < 0:
            break
    raise shard.invalid(record, f"the record is too short for its header and {extra} labels")


def _head(shard: Shard, record: int, parts: list[tuple[int, int]], size: int) -> bytes:
    """The first bytes of the joined parts. Even the header is split if an id contains MAGIC."""
    head = b""
    for offset, length in parts:
        head += shard.read(offset, min(length, size - len(head)))
        if len(head) == size:
            return head
        head = (head + MAGIC)[:size]
    raise shard.invalid(record, "the record is too short for its header")
