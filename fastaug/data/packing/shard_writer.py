"""Writes one shard: a tar with KEY.jpg and KEY.cls for each image."""

from __future__ import annotations

import hashlib
import os
import tarfile
from pathlib import Path

import numpy as np

from fastaug.data.packing.convert import PackedImage
from fastaug.data.readers.packed_index import ROW, PackedShard
from fastaug.data.readers.shard_file import Shard
from fastaug.data.readers.webdataset import read_samples
from fastaug.errors import DataError
from fastaug.runtime.atomic import atomic_write

_BLOCK = tarfile.BLOCKSIZE
_STEP = 2**20


class ShardWriter:
    """A shard in the making, under a temporary name. Equal images make equal bytes."""

    def __init__(self, root: Path, name: str) -> None:
        """name: the shard's path below the root."""
        self.name, self._path = name, root / name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._unfinished = self._path.with_name(f".{self._path.name}.tmp")
        self._file = self._unfinished.open("wb")
        self._digest = hashlib.sha256()
        self._size = 0
        self._rows: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def size_with(self, image: PackedImage) -> int:
        """Bytes of the shard if it also had this image."""
        return self._size + 3 * _BLOCK + _padded(len(image.content)) + 3 * _BLOCK

    def add(self, key: str, label: int, image: PackedImage) -> None:
        offset = self._size + _BLOCK
        self._write_member(f"{key}{image.suffix}", image.content)
        self._write_member(f"{key}.cls", b"%d" % label)
        info = image.info
        size = len(image.content)
        row = (offset, size, image.crc32, label, info.height, info.width, info.plain)
        self._rows.append(row)

    def finish(self) -> tuple[PackedShard, np.ndarray]:
        """Write the end mark, read everything again from the disk, and give the shard its name."""
        self._write(bytes(2 * _BLOCK))
        os.fsync(self._file.fileno())
        self._file.close()
        rows = np.array(self._rows, ROW)
        shard = PackedShard(self.name, self._size, len(rows), self._digest.hexdigest())
        with atomic_write(self._path) as temporary:
            self._unfinished.rename(temporary)
            _forget_pages(temporary)
            check_shard(temporary, shard, rows)
        return shard, rows

    def discard(self) -> None:
        self._file.close()
        self._unfinished.unlink(missing_ok=True)

    def _write_member(self, name: str, content: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        header = info.tobuf(tarfile.USTAR_FORMAT)
        self._write(header + content + bytes(_padded(len(content)) - len(content)))

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self._size += len(content)


def check_shard(path: Path, shard: PackedShard, rows: np.ndarray) -> None:
    """Raise unless a file is this shard, with these images. rows: [n] of ROW."""
    with Shard(path) as content:
        if content.size != shard.bytes or sha256_of(path) != shard.sha256:
            raise DataError(f"{path}: its bytes are not those that were packed (checksum)")
        found = [(sample.label, *sample.parts[0]) for sample in read_samples(content)]
    listed = zip(*(rows[name].tolist() for name in ("label", "offset", "size")), strict=True)
    if found != list(listed):
        raise DataError(f"{path}: its index lists other images")


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_STEP):
            digest.update(part)
    return digest.hexdigest()


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _forget_pages(path: Path) -> None:
    """Drop a file from the page cache, so that reading it reads the disk."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
