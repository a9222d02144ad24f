"""A shard file, open for reading headers and labels in small, bounded reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from fastaug.errors import DataError


class Record(NamedTuple):
    """An image in a shard."""

    label: int
    parts: tuple[tuple[int, int], ...]
    """Offset and size of each part of the image; only RecordIO has more than one part."""
    checked: tuple[int, int] | None = None
    """Offset and size of what a checksum covers, in formats that have one."""


_MAX_READ = 2**20  # bytes of a header or label; the longest real ones are metadata of a few KB
_WINDOW = 4096  # bytes read at once: a header, its labels and, in a tar, the next header


class Shard:
    """An open shard. Reads are small and inside the file, regardless of what its headers claim."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.exists() and not path.is_file():  # opening a pipe would block
                raise DataError(f"{path}: not a file; remove it or give another folder")
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError as error:
            raise DataError(f"{path}: the file is gone") from error
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        status = os.fstat(self._file.fileno())
        self.size, self.mtime_ns = status.st_size, status.st_mtime_ns
        self._start, self._window = 0, b""

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, offset: int, size: int) -> bytes:
        """Exactly these bytes, or a DataError."""
        if not 0 <= size <= _MAX_READ:
            raise self.invalid(offset, f"a header or label of {size} bytes")
        if not 0 <= offset <= self.size - size:
            raise self.truncated(offset, size)
        place = offset - self._start
        if place < 0 or place + size > len(self._window):
            try:
                self._window = os.pread(self._file.fileno(), max(size, _WINDOW), offset)
            except OSError as error:
                raise DataError(f"{self.path}: cannot be read ({error.strerror})") from error
            self._start, place = offset, 0
            if len(self._window) < size:
                raise self.truncated(offset, size)
        return self._window[place : place + size]

    def invalid(self, offset: int, what: str) -> DataError:
        """An error about the bytes at an offset."""
        return DataError(f"{self.path}, byte {offset}: {what}; fix or remove the shard")

    def truncated(self, offset: int, size: int) -> DataError:
        """An error about bytes that should follow an offset."""
        return DataError(
            f"{self.path}, byte {offset}: {size} bytes should follow, but the file has only "
            f"{self.size} in total; it is truncated or damaged, download it again"
        )
