"""WebDataset: images and labels in a tar. Only headers and labels are read."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from fastaug.data.image_set import IMAGE_SUFFIXES
from fastaug.data.readers.shard_file import Record, Shard
from fastaug.errors import DataError, parser_errors

_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
_MAX_CLS = 64  # bytes; a 64-bit integer has 20 digits
_MAX_HEADER = 2**17  # bytes; real ones hold a long name or file system attributes
_MAX_COMMON = 1000  # global pax values, which tarfile copies for each member
_PADDING = 2**16  # bytes checked after the end mark; tar pads to 10 KiB


class _Member(NamedTuple):
    name: str
    offset: int
    size: int

    @property
    def key(self) -> str:
        """Directory, and name up to its first dot: the same for all members of a sample."""
        return self.name[: len(self.name) - len(self.suffix)]

    @property
    def suffix(self) -> str:
        _, dot, suffix = self.name.rpartition("/")[2].partition(".")
        return dot + suffix


def read_samples(shard: Shard) -> Iterator[Record]:
    """Label and position of the image in each sample."""
    if shard.read(0, min(8, shard.size)).startswith(_COMPRESSED):
        raise DataError(
            f"{shard.path}: a compressed tar does not allow random access; decompress it to .tar"
        )
    for _, sample in groupby(_members(shard), key=lambda member: member.key):
        members = list(sample)
        images = [m for m in members if m.suffix.lower() in IMAGE_SUFFIXES]
        numbers = [m for m in members if m.suffix.lower() == ".cls"]
        if len(images) > 1 or len(numbers) > 1:
            twice = (images if len(images) > 1 else numbers)[1]
            what = "image" if len(images) > 1 else "label"
            raise shard.invalid(twice.offset, f"{twice.name!r} is the second {what} of its sample")
        if images:
            yield _label(shard, members, images[0]), ((images[0].offset, images[0].size),)
        elif numbers:
            kinds = ", ".join(sorted(IMAGE_SUFFIXES))
            raise shard.invalid(
                numbers[0].offset, f"{numbers[0].name!r} has no image next to it ({kinds})"
            )


def _label(shard: Shard, members: list[_Member], image: _Member) -> int:
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


def _members(shard: Shard) -> Iterator[_Member]:
    """The files in the tar, in order, except hidden ones."""
    damaged = parser_errors(
        f"{shard.path}: not a readable tar", "; it is truncated or damaged, download it again"
    )
    with damaged, tarfile.TarFile(fileobj=_Headers(shard)) as archive:  # type: ignore[arg-type]
        before = 0
        while (info := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            # A negative size would point back: an endless loop.
            if info.size < 0 or archive.offset <= before:
                raise shard.invalid(info.offset, f"a member of {info.size} bytes")
            if len(archive.pax_headers) > _MAX_COMMON:
                raise shard.invalid(info.offset, f"more than {_MAX_COMMON} values for all members")
            before = archive.offset
            if not info.isreg():
                continue
            if info.issparse():
                raise shard.invalid(
                    info.offset, f"{info.name!r} is sparse: its bytes are not contiguous"
                )
            member = _Member(info.name, info.offset_data, info.size)
            if not member.name.rpartition("/")[2].startswith("."):
                yield member
        _check_end(shard, archive.offset)


def _check_end(shard: Shard, place: int) -> None:
    """Raise unless the end mark is there: tarfile also stops silently at damage and truncation."""
    if shard.read(place, min(512, shard.size - place)) != bytes(512):
        raise DataError(
            f"{shard.path}, byte {place}: neither a member nor the end mark of a tar; "
            "it is truncated or damaged, download it again"
        )
    padding = min(shard.size - place, _PADDING)
    if shard.read(place, padding) != bytes(padding):
        raise shard.invalid(place, "data after the end mark (concatenated tars?)")


class _Headers:
    """The shard as tarfile sees it: a file with bounded reads."""

    def __init__(self, shard: Shard) -> None:
        self._shard, self._place = shard, 0

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> int:
        self._place = place
        return place

    def read(self, size: int) -> bytes:
        inside = min(size, max(self._shard.size - self._place, 0))
        if inside > _MAX_HEADER:
            raise self._shard.invalid(self._place, f"a header or label of {inside} bytes")
        content = self._shard.read(self._place, inside) if inside else b""
        self._place += len(content)
        return content
