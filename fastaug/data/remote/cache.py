"""Byte ranges of remote objects on the local disk, shared by all processes of a machine.

Each object has one sparse file, which holds every cached range at the range's own offset. A range
counts as cached if its checksum is right. So nothing else has to be consistent: a hole, a write
that another process has not finished, and a damaged file all read as "not cached".

When the cache is full, objects that no run has used for a while are removed, the least recently
used first. Objects in use stay and new ranges are not added: an epoch reads every image once in
random order, so replacing some by others would only lower the share of reads that hit.
"""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from fastaug.runtime.file_lock import wait_for_lock

log = logging.getLogger("fastaug")

IN_USE = 3600.0
"""Seconds after its last use in which an object is not removed."""
_TOUCH = 600.0
"""Seconds after which a use is recorded again."""
_RETRY_FULL = 60.0
"""Seconds for which a process adds nothing to a cache that it found full."""
_PAGE = 4096
_SUFFIX = ".ranges"


class RangeCache:
    """A cache in a folder. Threads and processes may share it; it can be pickled."""

    def __init__(self, folder: Path, limit: int, keep_free: float = 0.05) -> None:
        """limit: bytes. keep_free: share of the disk that stays free in any case."""
        self._folder, self._limit, self._keep_free = folder, limit, keep_free
        self._touched: dict[str, float] = {}
        self._closed_until = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_touched": {}, "_closed_until": 0.0}

    def get(self, key: str, offset: int, size: int, checksum: int) -> bytes | None:
        """A range of an object; None if it is not cached.

        key: a file name that identifies the object and its version. checksum: CRC-32 of the range.
        """
        if not self._limit:
            return None
        try:
            with open(self._file(key), "rb", buffering=0) as file:
                content = os.pread(file.fileno(), size, offset)
        except OSError:
            return None
        if len(content) != size or zlib.crc32(content) != checksum:
            return None
        self._touch(key)
        return content

    def put(self, key: str, offset: int, content: bytes) -> None:
        """Add a range of an object, if there is room. Never raises."""
        if not self._limit or time.monotonic() < self._closed_until:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Written under the lock, so that whoever adds up the files sees what was reserved.
            with self._locked() as counter:
                if self._reserve(counter, _allocated(offset, len(content))):
                    self._write(key, offset, content)
                else:
                    self._closed_until = time.monotonic() + _RETRY_FULL
        except OSError as error:  # a full or read-only disk, a folder without access
            self._closed_until = float("inf")
            worker = get_worker_info()
            if worker is None or worker.id == 0:
                log.warning(
                    "the cache %s cannot be written (%s); the run continues without adding to it",
                    self._folder,
                    error.strerror,
                )

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"

    def _write(self, key: str, offset: int, content: bytes) -> None:
        """Write a range; this sets the time of the last use as well."""
        descriptor = os.open(self._file(key), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, content, offset)
        finally:
            os.close(descriptor)

    def _touch(self, key: str) -> None:
        """Record the use of an object."""
        now = time.monotonic()
        if now < self._touched.get(key, -_TOUCH) + _TOUCH:
            return
        self._touched[key] = now
        with suppress(OSError):  # removed, or read-only
            os.utime(self._file(key))

    # --- room ---

    def _reserve(self, counter: int, size: int) -> bool:
        """Count these bytes as used; False if there is no room for them."""
        stored = os.pread(counter, 8, 0)
        used = int.from_bytes(stored, "little") if len(stored) == 8 else self._limit  # not counted
        if used + size > self._limit or size > self._free():
            used = self._make_room(size)
        has_room = used + size <= self._limit
        os.pwrite(counter, (used + size * has_room).to_bytes(8, "little"), 0)
        return has_room

    def _make_room(self, size: int) -> int:
        """Remove objects out of use until `size` more bytes fit; returns the bytes in use."""
        objects = sorted(self._objects(), key=lambda each: each.last_use)
        used = sum(each.size for each in objects)
        limit = min(self._limit, used + self._free())
        oldest_in_use = time.time() - IN_USE
        for each in objects:
            if used + size <= limit or each.last_use > oldest_in_use:
                break
            each.path.unlink(missing_ok=True)
            used -= each.size
        # The disk has less room than the limit: count the missing bytes as used.
        return used + self._limit - limit

    def _free(self) -> int:
        """Bytes of the disk that the cache may still take; negative if it should give some back."""
        disk = os.statvfs(self._folder)
        return int(disk.f_frsize * (disk.f_bavail - self._keep_free * disk.f_blocks))

    def _objects(self) -> Iterator[_Object]:
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    try:
                        status = entry.stat()
                    except FileNotFoundError:
                        continue
                    yield _Object(Path(entry.path), 512 * status.st_blocks, status.st_mtime)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The counter of used bytes, locked. Opened each time: so it excludes threads, too."""
        descriptor = os.open(self._folder / "used", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            wait_for_lock(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)


class _Object(NamedTuple):
    """A file of the cache."""

    path: Path
    size: int
    """Bytes that it occupies on the disk."""
    last_use: float
    """Seconds since 1970."""


def _allocated(offset: int, size: int) -> int:
    """Bytes of the pages that a range touches."""
    return (offset + size + _PAGE - 1) // _PAGE * _PAGE - offset // _PAGE * _PAGE
