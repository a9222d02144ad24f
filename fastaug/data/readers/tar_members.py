"""The members of a tar, found by its headers only. A tar may lie inside another file."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from fastaug.data.readers.shard_file import Shard
from fastaug.errors import DataError, parser_errors

_MAX_HEADER = 2**17  # bytes; real ones hold a long name or file system attributes
_MAX_COMMON = 1000  # global pax values, which tarfile copies for each member
_PADDING = 2**16  # bytes checked after the end mark; tar pads to 10 KiB


class Member(NamedTuple):
    """A file in a tar."""

    name: str
    offset: int
    """Where its content starts in the shard."""
    size: int

    @property
    def key(self) -> str:
        """Directory, and name up to its first dot: the same for all members of a sample."""
        return self.name[: len(self.name) - len(self.suffix)]

    @property
    def suffix(self) -> str:
        _, dot, suffix = self.name.rpartition("/")[2].partition(".")
        return dot + suffix


def tar_members(shard: Shard, start: int = 0, size: int | None = None) -> Iterator[Member]:
    """The files in the tar at bytes [start, start + size) of the shard (default: all of it), in
    order, except hidden ones."""
    file = _TarFile(shard, start, shard.size - start if size is None else size)
    damaged = parser_errors(
        f"{shard.path}: not a readable tar", "; it is truncated or damaged, download it again"
    )
    with damaged, tarfile.TarFile(fileobj=file) as archive:  # type: ignore[arg-type]
        before = 0
        while (info := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            place = start + info.offset
            # A negative size would point back: an endless loop.
            if info.size < 0 or archive.offset <= before:
                raise shard.invalid(place, f"a member of {info.size} bytes")
            if len(archive.pax_headers) > _MAX_COMMON:
                raise shard.invalid(place, f"more than {_MAX_COMMON} values for all members")
            before = archive.offset
            if not info.isreg():
                continue
            if info.issparse():
                raise shard.invalid(place, f"{info.name!r} is sparse: its bytes are not contiguous")
            member = Member(info.name, start + info.offset_data, info.size)
            if not member.name.rpartition("/")[2].startswith("."):
                yield member
        file.check_end(archive.offset)


class _TarFile:
    """The tar as tarfile sees it: a file with bounded reads."""

    def __init__(self, shard: Shard, start: int, size: int) -> None:
        self.size = size
        self._shard, self._start, self._place = shard, start, 0

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> int:
        self._place = place
        return place

    def read(self, size: int) -> bytes:
        inside = min(size, max(self.size - self._place, 0))
        if inside > _MAX_HEADER:
            raise self._shard.invalid(
                self._start + self._place, f"a header or label of {inside} bytes"
            )
        content = self._shard.read(self._start + self._place, inside) if inside else b""
        self._place += len(content)
        return content

    def check_end(self, place: int) -> None:
        """Raise unless the end mark is there: tarfile also stops silently at damage and
        truncation."""
        rest = max(self.size - place, 0)
        place += self._start
        if self._shard.read(place, min(512, rest)) != bytes(512):
            raise DataError(
                f"{self._shard.path}, byte {place}: neither a member nor the end mark of a tar; "
                "it is truncated or damaged, download it again"
            )
        padding = min(rest, _PADDING)
        if self._shard.read(place, padding) != bytes(padding):
            raise self._shard.invalid(place, "data after the end mark (concatenated tars?)")
