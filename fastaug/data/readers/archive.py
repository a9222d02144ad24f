"""A stranger's .tar or .tar.gz, read in one pass within bounds, without unpacking it to disk."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from fastaug.errors import DataError, parser_errors

_STEP = 2**20
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class ArchiveLimits:
    """What a genuine archive stays far below."""

    genuine: str
    """Name of the genuine one, for messages."""
    file: int
    """Bytes of a wanted member."""
    archive: int
    """Bytes unpacked."""
    members: int = 1000
    headers: int = 2**22
    """Bytes of all headers; tarfile reads what a header claims into memory."""


def read_archive(
    path: Path, wanted: Collection[str], limits: ArchiveLimits
) -> tuple[list[str], dict[str, bytes]]:
    """All names in the archive, and the contents of the wanted ones that are there."""
    with parser_errors(f"{path}: not a readable tar archive"), path.open("rb") as file:
        is_packed = file.read(2) == _GZIP
        file.seek(0)
        unpacked = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if is_packed else file
        return _read_members(path, _ArchiveStream(path, unpacked, limits), wanted, limits)


def _read_members(
    path: Path, file: _ArchiveStream, wanted: Collection[str], limits: ArchiveLimits
) -> tuple[list[str], dict[str, bytes]]:
    names: list[str] = []
    contents: dict[str, bytes] = {}
    with tarfile.TarFile(fileobj=file) as archive:  # type: ignore[arg-type]
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            name = member.name.removeprefix("./")
            names.append(name[:200])
            if len(names) > limits.members:
                raise DataError(
                    f"{path}: more than {limits.members} members; this is not {limits.genuine}"
                )
            if name not in wanted:
                continue
            # A link could point to any file on this machine.
            if not member.isreg() or member.issparse():
                raise DataError(f"{path}: {name} is not a plain file in the archive")
            if name in contents:
                raise DataError(f"{path}: {name} is in the archive twice")
            if not 0 <= member.size <= limits.file:
                raise DataError(f"{path}: {name} is too large ({member.size} bytes)")
            file.seek(member.offset_data)
            contents[name] = file.read_content(member.size)
    return names, contents


class _ArchiveStream:
    """The archive as tarfile sees it: forward only, with bounded headers and bounded total size."""

    def __init__(self, path: Path, file: IO[bytes], limits: ArchiveLimits) -> None:
        self._path, self._file, self._limits = path, file, limits
        self._place = self._headers = 0

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> int:
        if place < self._place:
            raise DataError(f"{self._path}: a member points back to byte {place}")
        while self._place < place and self._next(min(place - self._place, _STEP)):
            pass
        return self._place

    def read(self, size: int) -> bytes:
        self._headers += size
        if size < 0 or self._headers > self._limits.headers:
            raise DataError(
                f"{self._path}: headers of {self._headers} bytes; this is not "
                f"{self._limits.genuine}"
            )
        return self._next(size)

    def read_content(self, size: int) -> bytes:
        """The content of a member, read in steps: its size is only a claim."""
        parts = []
        while size and (part := self._next(min(size, _STEP))):
            parts.append(part)
            size -= len(part)
        if size:
            raise EOFError("unexpected end of data")
        return b"".join(parts)

    def _next(self, size: int) -> bytes:
        content = self._file.read(size)
        self._place += len(content)
        if self._place > self._limits.archive:
            raise DataError(
                f"{self._path}: more than {self._limits.archive:,} bytes unpacked; this is not "
                f"{self._limits.genuine}"
            )
        return content
