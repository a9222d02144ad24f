"""TFRecord (TensorFlow): images and labels of the tf.train.Examples in a file.

An Example is a protobuf message with a map from names to Features, each a list of values. Fields
are skipped by their lengths, so no image is read; the checksum of a record is compared whenever its
image is.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import google_crc32c
import numpy as np

from fastaug.data.readers.shard_file import Record, Shard
from fastaug.data.storage import Spans
from fastaug.errors import DataError

IMAGE_NAMES = ("image/encoded", "image")
LABEL_NAMES = ("image/class/label", "label")

Extent = tuple[int, int]
"""Bytes [start, end) of a shard."""

_NAME, _FEATURE = 1, 2  # fields of an entry of the map
_BYTES_LIST, _INT64_LIST = 1, 3  # fields of a Feature
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types; groups (3, 4) are obsolete
_LONGEST_NAME = max(map(len, IMAGE_NAMES + LABEL_NAMES))
_CHECKSUM = 4  # bytes after a record


@dataclass(frozen=True)
class RecordSpans(Spans):
    """Images in records that end with a checksum."""

    record: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """[N, 2] int64: offset and size of each image's record."""

    def read(self, index: int) -> bytes:
        offset, size = map(int, self.record[index])
        with open(self.shards[self.shard[index]], "rb", buffering=0) as file:
            content = os.pread(file.fileno(), size + _CHECKSUM, offset)
        if len(content) != size + _CHECKSUM:
            raise OSError(errno.EIO, "the shard ends before the image does")
        if content[size:] != _masked_crc(content[:size]):
            raise DataError(f"{self.where(index)}: not the bytes that were written (checksum)")
        start = int(self.offset[index]) - offset
        return content[start : start + int(self.size[index])]

    def for_random_access(self) -> RecordSpans:
        return self


def read_examples(shard: Shard) -> Iterator[Record]:
    """Label and position of the image in each Example."""
    place = 0
    while place < shard.size:
        if shard.read(place, min(2, shard.size - place)) == b"\x1f\x8b":
            raise shard.invalid(
                place, "compressed records do not allow random access (decompress the file)"
            )
        header = shard.read(place, 12)
        (length,) = struct.unpack("<Q", header[:8])
        if header[8:] != _masked_crc(header[:8]):
            raise shard.invalid(place, "not a TFRecord (the checksum of the length is wrong)")
        start, end = place + 12, place + 12 + length
        if end + _CHECKSUM > shard.size:
            raise shard.truncated(start, length + _CHECKSUM)
        yield _example(shard, (start, end))
        place = end + _CHECKSUM


def _example(shard: Shard, example: Extent) -> Record:
    features: dict[str, Extent] = {}
    for feature_map in _messages(shard, example, 1):
        for entry in _messages(shard, feature_map, 1):
            parts = {number: (start, end) for number, _, start, end in _fields(shard, entry)}
            if {_NAME, _FEATURE} <= parts.keys():
                _keep(shard, features, parts[_NAME], parts[_FEATURE])
    start, end = _value(shard, example, features, IMAGE_NAMES, _BYTES_LIST)
    label, _ = _varint(shard, *_value(shard, example, features, LABEL_NAMES, _INT64_LIST))
    checked = example[0], example[1] - example[0]
    return Record(label - 2**64 * (label >= 2**63), ((start, end - start),), checked)


def _keep(shard: Shard, features: dict[str, Extent], name: Extent, feature: Extent) -> None:
    """Add a feature to `features` if its name is one of those needed."""
    start, end = name
    if end - start > _LONGEST_NAME:
        return
    text = shard.read(start, end - start).decode("latin-1")
    if text in features:
        raise shard.invalid(start, f"an Example has two features {text!r}, only one is allowed")
    if text in IMAGE_NAMES + LABEL_NAMES:
        features[text] = feature


def _value(
    shard: Shard, example: Extent, features: dict[str, Extent], names: tuple[str, ...], kind: int
) -> Extent:
    """The only value of the first of these features that the Example has."""
    name = next((name for name in names if name in features), None)
    if name is None:
        raise shard.invalid(example[0], f"an Example without {' or '.join(map(repr, names))}")
    values = list(islice(_values(shard, features[name], kind), 2))
    if len(values) != 1:
        takes = {_BYTES_LIST: "bytes", _INT64_LIST: "int64"}[kind]
        count = "more than one value" if values else "no value"
        raise shard.invalid(
            features[name][0], f"{name!r} has {count} of type {takes}, one is needed"
        )
    return values[0]


def _values(shard: Shard, feature: Extent, kind: int) -> Iterator[Extent]:
    """The values of a Feature of this kind; integers may be packed into one field or not."""
    for values in _messages(shard, feature, kind):
        for number, wire, start, end in _fields(shard, values):
            if number == 1 and wire == (_LENGTH if kind == _BYTES_LIST else _VARINT):
                yield start, end
            elif number == 1 and wire == _LENGTH:
                while start < end:
                    _, after = _varint(shard, start, end)
                    yield start, after
                    start = after


def _messages(shard: Shard, message: Extent, field: int) -> Iterator[Extent]:
    """The values of one length-delimited field of a message: messages, strings or bytes."""
    for number, wire, start, end in _fields(shard, message):
        if number == field and wire == _LENGTH:
            yield start, end


def _fields(shard: Shard, message: Extent) -> Iterator[tuple[int, int, int, int]]:
    """Number, wire type, start and end of each field of a message."""
    place, end = message
    while place < end:
        tag, start = _varint(shard, place, end)
        wire = tag & 7
        if wire == _LENGTH:
            length, start = _varint(shard, start, end)
            after = start + length
        elif wire == _VARINT:
            _, after = _varint(shard, start, end)
        elif wire in (_FIXED64, _FIXED32):
            after = start + (8 if wire == _FIXED64 else 4)
        else:
            raise shard.invalid(place, "not a tf.train.Example (unknown wire type)")
        if after > end:
            raise shard.invalid(
                place, "not a tf.train.Example (a field is longer than its message)"
            )
        if tag < 8:  # a hole of zeros in a file would be endless fields
            raise shard.invalid(place, "not a tf.train.Example (a field has number 0)")
        yield tag >> 3, wire, start, after
        place = after


def _varint(shard: Shard, place: int, end: int) -> tuple[int, int]:
    """An unsigned integer of up to 64 bits, stored in groups of 7, and where it ends."""
    value = 0
    for i, byte in enumerate(shard.read(place, min(10, end - place))):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value & (2**64 - 1), place + i + 1
    raise shard.invalid(place, "not a tf.train.Example (a number does not end)")


def _masked_crc(content: bytes) -> bytes:
    """TFRecord's checksum: CRC-32C, rotated by 15 bits, plus a constant."""
    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
