"""WebDataset: images and labels in a tar. Only headers and labels are read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby

from fastaug.data.image_set import IMAGE_SUFFIXES
from fastaug.data.readers.shard_file import Record, Shard
from fastaug.data.readers.tar_members import Member, tar_members
from fastaug.errors import DataError

_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
_MAX_CLS = 64  # bytes; a 64-bit integer has 20 digits


def read_samples(shard: Shard) -> Iterator[Record]:
    """Label and position of the image in each sample."""
    if shard.read(0, min(8, shard.size)).startswith(_COMPRESSED):
        raise DataError(
            f"{shard.path}: a compressed tar does not allow random access; decompress it to .tar"
        )
    seen: set[str] = set()
    for key, sample in groupby(tar_members(shard), key=lambda member: member.key):
        members = list(sample)
        images = [m for m in members if m.suffix.lower() in IMAGE_SUFFIXES]
        numbers = [m for m in members if m.suffix.lower() == ".cls"]
        if len(images) > 1 or len(numbers) > 1:
            twice = (images if len(images) > 1 else numbers)[1]
            what = "image" if len(images) > 1 else "label"
            raise shard.invalid(twice.offset, f"{twice.name!r} is the second {what} of its sample")
        if images and key in seen:
            raise shard.invalid(
                images[0].offset, f"{images[0].name!r}: an earlier sample has the same key {key!r}"
            )
        if images:
            seen.add(key)
            label = _label(shard, members, images[0])
            yield Record(label, ((images[0].offset, images[0].size),))
        elif numbers:
            kinds = ", ".join(sorted(IMAGE_SUFFIXES))
            raise shard.invalid(
                numbers[0].offset, f"{numbers[0].name!r} has no image next to it ({kinds})"
            )


def _label(shard: Shard, members: list[Member], image: Member) -> int:
    for member in members:
        if member.suffix.lower() == ".cls":
            text = shard.read(member.offset, min(member.size, _MAX_CLS)).strip()
            if member.size > _MAX_CLS or not re.fullmatch(rb"-?[0-9]+", text):
                raise shard.invalid(
                    member.offset, f"{member.name!r} must be a whole number, got {text[:20]!r}"
                )
            return int(text)
    for member in members:
        if member.suffix.lower() == ".json":
            label = _json_label(shard.read(member.offset, member.size))
            if label is not None:
                return label
    raise shard.invalid(
        image.offset,
        f"{image.name!r} has no label next to it (a .cls with a whole number, or a .json with a "
        'whole number as "label")',
    )


def _json_label(content: bytes) -> int | None:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError):
        return None
    label = record.get("label") if isinstance(record, dict) else None
    return label if type(label) is int else None
