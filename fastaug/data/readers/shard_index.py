"""Index of a shard: label and position of each image, found once and cached for later runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastaug.data.array_cache import load_arrays, store_arrays
from fastaug.data.readers.shard_file import Record, Shard
from fastaug.errors import DataError
from fastaug.runtime.cache import cache_dir

VERSION = 2
"""Part of the cache file's name; increase it when the content changes."""

MAX_IMAGE = 2**30  # bytes; 180 megapixels of 16-bit color, stored raw, are 1.08e9


@dataclass(frozen=True)
class ShardIndex:
    """Labels and positions of the N images of a shard."""

    label: np.ndarray
    """[N] int64, as stored in the shard."""
    offset: np.ndarray
    """[N] int64."""
    size: np.ndarray
    """[N] int64."""
    continued: np.ndarray
    """[M, 3] int64: image, offset and size of every part after an image's first."""
    checked: np.ndarray
    """[N, 2] int64: offset and size of what each image's checksum covers; [0, 2] if the format has
    none."""

    def fits(self, shard_size: int) -> bool:
        """Whether this can be the index of a shard of this size; a cache file may be damaged."""
        columns = (self.label, self.offset, self.size)
        if any(a.dtype != np.int64 or a.shape != self.label.shape for a in columns):
            return False
        rest = self.continued
        if self.label.ndim != 1 or rest.dtype != np.int64 or rest.shape[1:] != (3,):
            return False
        checked = self.checked
        if checked.dtype != np.int64 or checked.shape not in ((0, 2), (len(self.label), 2)):
            return False
        offset = np.concatenate([self.offset, rest[:, 1], checked[:, 0]])
        size = np.concatenate([self.size, rest[:, 2], checked[:, 1]])
        inside = (offset >= 0) & (size >= 0) & (size <= MAX_IMAGE) & (offset <= shard_size - size)
        image = rest[:, 0]
        if not (inside.all() and (image >= 0).all() and (image < len(self.label)).all()):
            return False
        if len(checked) == 0:
            return True
        start, end = checked[:, 0], checked.sum(axis=1)
        return bool((start <= self.offset).all() and (self.offset + self.size <= end).all())


def load_index(path: Path) -> ShardIndex | None:
    """The cached index, unless it is damaged or the shard has changed since."""
    arrays = load_arrays(_cache_file(path)) or {}
    try:
        status = path.stat()
        if arrays.pop("shard").tolist() == [status.st_size, status.st_mtime_ns]:
            index = ShardIndex(**arrays)
            return index if index.fits(status.st_size) else None
    except (OSError, KeyError, TypeError):  # no such shard, unexpected arrays
        pass
    return None


def make_index(path: Path, read: Callable[[Shard], Iterator[Record]]) -> ShardIndex:
    """Index a shard with the reader of its format, and cache the result."""
    with Shard(path) as shard:
        index = _find(shard, read)
        state = np.array([shard.size, shard.mtime_ns])
    store_arrays(_cache_file(path), shard=state, **vars(index))
    return index


def _cache_file(path: Path) -> Path:
    digest = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]
    return cache_dir() / "indexes" / f"{digest}-v{VERSION}.npz"


def _find(shard: Shard, read: Callable[[Shard], Iterator[Record]]) -> ShardIndex:
    images: list[tuple[int, int, int]] = []
    rest: list[tuple[int, int, int]] = []
    checked: list[tuple[int, int]] = []
    for number, record in enumerate(read(shard)):
        _check(shard, record)
        images.append((record.label, *record.parts[0]))
        rest += [(number, *part) for part in record.parts[1:]]
        if record.checked is not None:
            checked.append(record.checked)
    if not images:
        raise DataError(f"{shard.path}: contains no images; remove it or download it again")
    label, offset, size = np.array(images, np.int64).T.copy()
    return ShardIndex(
        label,
        offset,
        size,
        np.array(rest, np.int64).reshape(-1, 3),
        np.array(checked, np.int64).reshape(-1, 2),
    )


def _check(shard: Shard, record: Record) -> None:
    start, total = record.parts[0][0], 0
    for offset, size in record.parts:
        if offset < 0 or size < 0 or offset + size > shard.size:
            raise shard.truncated(offset, size)
        total += size
    if total > MAX_IMAGE or (total == 0 and len(record.parts) == 1):
        raise shard.invalid(start, f"an image of {total} bytes (1 to {MAX_IMAGE} are allowed)")
    if record.checked is not None and record.checked[1] > MAX_IMAGE:  # it is read with the image
        raise shard.invalid(
            start, f"a record of {record.checked[1]} bytes (at most {MAX_IMAGE} are allowed)"
        )
    if not -(2**63) <= record.label < 2**63:
        raise shard.invalid(start, "a label that is not a 64-bit integer")
