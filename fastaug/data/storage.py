"""Where the encoded images of a set are: files, byte ranges of shards, a part of another storage.

Images are read by index. To add a kind of storage, write a class with the methods of `Storage`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from fastaug.errors import DataError

SETTLED_AFTER_NS = 2_000_000_000
"""Age of a modification time before it is trusted: a later change has another one, even on file
systems that count in steps of 2 s."""
_FINGERPRINT_BLOCK = 1 << 16


class Digest(Protocol):
    def update(self, content: bytes, /) -> None: ...


class Storage(Protocol):
    """The encoded images of a set."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes | memoryview:
        """The bytes of an image; an OSError with an errno if the storage fails."""

    def ends(self, index: int, count: int) -> tuple[bytes, bytes, int]:
        """The first and the last `count` bytes of an image, and its size in bytes."""

    def where(self, index: int) -> str:
        """The place of an image, for messages."""

    def stamps(self, indices: np.ndarray) -> np.ndarray:
        """[n] int64 -> [n] uint64: each changes when its image does, or is moved."""

    def update_fingerprint(self, digest: Digest) -> None:
        """Add the identity of all images in their order, regardless of where the set is."""

    def for_random_access(self) -> Storage:
        """This storage, or one that reads single images fast; a DataError if there is none."""


@runtime_checkable
class HasSnapshot(Protocol):
    """A storage that knows whether its images have changed without a look at each of them."""

    @property
    def snapshot(self) -> str:
        """Changes when an image is added, removed or replaced; empty if that is not known."""


class Files:
    """One file per image. The names are in one buffer: a million paths as objects take 300 MB."""

    def __init__(
        self, folder: str, names: np.ndarray, ends: np.ndarray, snapshot: str = ""
    ) -> None:
        """names: [bytes] uint8, file names below the folder, one after the other.
        ends: [N] int64, where each name ends.
        snapshot: see HasSnapshot."""
        self.folder, self._names, self._ends = folder, names, ends
        self.snapshot = snapshot

    @classmethod
    def of(cls, paths: Iterable[Path | str], folder: Path | str = "") -> Files:
        """paths: absolute, or below the folder."""
        names = [os.fsencode(path) for path in paths]
        ends = np.cumsum([len(name) for name in names], dtype=np.int64)
        return cls(str(folder), np.frombuffer(b"".join(names), np.uint8), ends)

    def __len__(self) -> int:
        return len(self._ends)

    def name(self, index: int) -> str:
        """The name of a file below the folder."""
        start = int(self._ends[index - 1]) if index else 0
        return os.fsdecode(self._names[start : int(self._ends[index])].tobytes())

    def where(self, index: int) -> str:
        return os.path.join(self.folder, self.name(index))

    def read(self, index: int) -> bytes:
        with open(self.where(index), "rb", buffering=0) as file:
            return file.readall()

    def ends(self, index: int, count: int) -> tuple[bytes, bytes, int]:
        return _ends_of_range(self.where(index), count)

    def stamps(self, indices: np.ndarray) -> np.ndarray:
        here = os.getcwd()
        paths = (os.path.join(here, self.where(index)) for index in indices.tolist())
        return np.fromiter(map(_file_stamp, paths), np.uint64, len(indices))

    def update_fingerprint(self, digest: Digest) -> None:
        """From the names of the files and of their folders."""
        for first in range(0, len(self), _FINGERPRINT_BLOCK):
            ends = self._ends[first : first + _FINGERPRINT_BLOCK]
            begin = int(self._ends[first - 1]) if first else 0
            digest.update(_last_parts(self._names[begin : ends[-1]], ends - begin))

    def for_random_access(self) -> Files:
        return self


@dataclass(frozen=True)
class Spans:
    """Byte ranges of shards: an image is bytes [offset, offset + size) of a shard."""

    shards: tuple[Path, ...]
    shard: np.ndarray
    """[N] int32, indices into shards."""
    offset: np.ndarray
    """[N] int64."""
    size: np.ndarray
    """[N] int64."""
    continued: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Image -> (offset, size) of the parts after its first. RecordIO splits an image that contains
    the format's magic number."""
    separator: bytes = b""
    """Bytes between the parts of an image."""

    def __len__(self) -> int:
        return len(self.shard)

    def read(self, index: int) -> bytes:
        parts = ((self.offset[index], self.size[index]), *self.continued.get(index, ()))
        with open(self.shards[self.shard[index]], "rb") as file:
            read = [os.pread(file.fileno(), int(size), int(offset)) for offset, size in parts]
        if [len(part) for part in read] != [size for _, size in parts]:
            raise OSError(errno.EIO, "the shard ends before the image does")
        return self.separator.join(read)

    def ends(self, index: int, count: int) -> tuple[bytes, bytes, int]:
        if index in self.continued:
            content = self.read(index)
            return content[:count], content[-count:], len(content)
        extent = int(self.offset[index]), int(self.size[index])
        return _ends_of_range(self.shards[self.shard[index]], count, extent)

    def where(self, index: int) -> str:
        return f"{self.shards[self.shard[index]]}, image at byte {self.offset[index]}"

    @property
    def snapshot(self) -> str:
        digest = hashlib.sha256()
        trusted_before = time.time_ns() - SETTLED_AFTER_NS
        for shard in self.shards:
            try:
                status = shard.stat()
            except OSError:
                return ""
            if status.st_mtime_ns >= trusted_before:
                return ""
            state = f"{shard.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n"
            digest.update(os.fsencode(state))
        self.update_fingerprint(digest)
        return digest.hexdigest()

    def stamps(self, indices: np.ndarray) -> np.ndarray:
        here = os.getcwd()
        used, of_shard = np.unique(self.shard[indices], return_inverse=True)
        shards = [_file_stamp(os.path.join(here, self.shards[shard])) for shard in used]
        offset = self.offset[indices].astype(np.uint64)
        size = self.size[indices].astype(np.uint64)
        return np.array(shards, np.uint64)[of_shard] + offset + (size << np.uint64(40))

    def update_fingerprint(self, digest: Digest) -> None:
        digest.update(os.fsencode("\n".join(shard.name for shard in self.shards)))
        for numbers in (self.shard, self.offset, self.size):
            digest.update(np.ascontiguousarray(numbers).tobytes())

    def for_random_access(self) -> Spans:
        return self


class Subset:
    """Some images of another storage."""

    def __init__(self, base: Storage, positions: np.ndarray) -> None:
        """positions: [N] int64, indices of the images in the base."""
        self.base: Storage = base
        self.positions = positions
        if isinstance(base, Subset):
            self.base, self.positions = base.base, base.positions[positions]

    def __len__(self) -> int:
        return len(self.positions)

    def read(self, index: int) -> bytes | memoryview:
        return self.base.read(int(self.positions[index]))

    def ends(self, index: int, count: int) -> tuple[bytes, bytes, int]:
        return self.base.ends(int(self.positions[index]), count)

    def where(self, index: int) -> str:
        return self.base.where(int(self.positions[index]))

    def stamps(self, indices: np.ndarray) -> np.ndarray:
        return self.base.stamps(self.positions[indices])

    def update_fingerprint(self, digest: Digest) -> None:
        self.base.update_fingerprint(digest)
        digest.update(np.ascontiguousarray(self.positions).tobytes())

    def for_random_access(self) -> Subset:
        return Subset(self.base.for_random_access(), self.positions)


def snapshot_of(storage: Storage) -> str:
    """See HasSnapshot; empty for other storages."""
    return storage.snapshot if isinstance(storage, HasSnapshot) else ""


def _last_parts(names: np.ndarray, ends: np.ndarray) -> bytes:
    """The last two parts of each path, and a newline after each.

    names: [bytes] uint8, paths one after the other. ends: [N] int64, where each ends.
    """
    starts = np.concatenate([[0], ends[:-1]])
    (slashes,) = np.nonzero(names == ord("/"))
    slashes = np.concatenate([[-1, -1], slashes])
    second_last = slashes[np.searchsorted(slashes, ends) - 2]
    kept_from = np.maximum(starts, second_last + 1)
    if (kept_from > starts).any():
        change = np.zeros(len(names) + 1, np.int8)
        np.add.at(change, starts, -1)
        np.add.at(change, kept_from, 1)
        names = names[np.cumsum(change[:-1], dtype=np.int8) == 0]
        ends = np.cumsum(ends - kept_from)
    return np.insert(names, ends, ord("\n")).tobytes()


def _ends_of_range(
    path: str | Path, count: int, extent: tuple[int, int] | None = None
) -> tuple[bytes, bytes, int]:
    """extent: offset and size of a part of the file; None: the whole file."""
    # Without O_NONBLOCK, opening a named pipe would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError("not a file")
        offset, size = extent or (0, status.st_size)
        if offset + size > status.st_size:
            raise DataError("its shard ends before the image does")
        head = os.pread(descriptor, min(count, size), offset)
        start = max(0, size - count)
        tail = os.pread(descriptor, size - start, offset + start) if start else head
    finally:
        os.close(descriptor)
    return head, tail, size


def _file_stamp(path: str) -> int:
    """Hash of a file's path, size and modification time."""
    try:
        status = os.stat(path)
        text = f"{path}\0{status.st_size}\0{status.st_mtime_ns}"
    except OSError:
        text = path
    return int.from_bytes(hashlib.blake2b(os.fsencode(text), digest_size=8).digest(), "little")
