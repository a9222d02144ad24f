"""MXNet's RecordIO: the images and labels of a .rec file; its .idx is not needed."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from fastaug.data.readers.shard import Record, Shard

MAGIC = struct.pack("<I", 0xCED7230A)
"""Starts every part. A record that has it inside, at a multiple of 4, is broken there."""

_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_HEADER = struct.Struct("<IfQQ")  # number of further labels, label, two ids


def read_records(shard: Shard) -> Iterator[Record]:
    """Label and parts of the image of each record; MAGIC goes between the parts."""
    place = 0
    while place < shard.size:
        record = place
        parts: list[tuple[int, int]] = []
        while True:
            kind, offset, size = _part(shard, place)
            if (kind in (_WHOLE, _FIRST)) == bool(parts) or kind > _LAST:
                raise shard.wrong(place, f"part of kind {kind} is out of order in the record")
            parts.append((offset, size))
            place = offset + size + -size % 4
            if kind in (_WHOLE, _LAST):
                break
        yield _image(shard, record, parts)


def _part(shard: Shard, place: int) -> tuple[int, int, int]:
    """Kind, offset and size of the part whose header is at place."""
    magic, length = struct.unpack("<4sI", shard.read(place, 8))
    if magic != MAGIC:
        raise shard.wrong(place, "not MXNet's RecordIO (its magic number is missing)")
    kind, size = length >> 29, length & (2**29 - 1)
    if place + 8 + size > shard.size:
        raise shard.torn(place + 8, size)
    return kind, place + 8, size


def _image(shard: Shard, record: int, parts: list[tuple[int, int]]) -> Record:
    """What is left of the parts after the header and its labels."""
    further, label, _, _ = _HEADER.unpack(_head(shard, record, parts, _HEADER.size))
    if further:
        (label,) = struct.unpack_from(
            "<f", _head(shard, record, parts, _HEADER.size + 4), _HEADER.size
        )
    if not label.is_integer():  # nor are nan and inf
        raise shard.wrong(record, f"the label is {label}; whole numbers are allowed")
    left = _HEADER.size + 4 * further
    for number, (offset, size) in enumerate(parts):
        if left <= size:
            return int(label), ((offset + left, size - left), *parts[number + 1 :])
        left -= size + len(MAGIC)
        if left < 0:
            break
    raise shard.wrong(record, f"the record is too short for its header and {further} labels")


def _head(shard: Shard, record: int, parts: list[tuple[int, int]], size: int) -> bytes:
    """The first bytes of the joined parts; an id can hold the magic number too."""
    head = b""
    for offset, length in parts:
        head += shard.read(offset, min(length, size - len(head)))
        if len(head) == size:
            return head
        head = (head + MAGIC)[:size]
    raise shard.wrong(record, "the record is too short for its header")
