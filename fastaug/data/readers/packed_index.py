"""The index beside packed shards: where each image is, its label, size and checksum."""

from __future__ import annotations

import io
import posixpath
from dataclasses import dataclass, fields

import numpy as np

from fastaug.errors import DataError, parser_errors

INDEX_NAMES = {"train": ("train/index.npz",), "test": ("val/index.npz", "test/index.npz")}
"""Names of the index of a split below the root; the first one that exists counts."""
CLASSES_NAME = "classes.txt"
_MAX_BYTES = 2**33
"""Of the arrays; 100 million images have 6 GB."""


@dataclass(frozen=True)
class PackedIndex:
    """The N images of a split, in S shards."""

    shard_name: np.ndarray
    """[S] str, relative to the root: train/00000.tar."""
    shard_size: np.ndarray
    """[S] int64, bytes."""
    shard_checksum: np.ndarray
    """[S] uint32, CRC-32."""
    shard: np.ndarray
    """[N] int32, indices into the shards."""
    offset: np.ndarray
    """[N] int64, first byte in the shard."""
    size: np.ndarray
    """[N] int64, bytes."""
    checksum: np.ndarray
    """[N] uint32, CRC-32."""
    label: np.ndarray
    """[N] int64, line of classes.txt, from 0."""
    height: np.ndarray
    """[N] int32, pixels."""
    width: np.ndarray
    """[N] int32, pixels."""
    plain: np.ndarray
    """[N] bool, see Manifest.plain."""

    def __len__(self) -> int:
        return len(self.label)


_TYPES = {
    "shard_size": np.int64,
    "shard_checksum": np.uint32,
    "shard": np.int32,
    "offset": np.int64,
    "size": np.int64,
    "checksum": np.uint32,
    "label": np.int64,
    "height": np.int32,
    "width": np.int32,
    "plain": np.bool_,
}


def encode_index(index: PackedIndex) -> bytes:
    """The content of an index file."""
    out = io.BytesIO()
    np.savez_compressed(out, allow_pickle=False, **vars(index))
    return out.getvalue()


def decode_index(content: bytes, where: str, class_count: int) -> PackedIndex:
    """Read and check the content of an index file. where: its place, for messages."""
    names = [own.name for own in fields(PackedIndex)]
    with parser_errors(f"{where}: not an index of packed shards"):
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            if sum(each.file_size for each in stored.zip.infolist()) > _MAX_BYTES:
                raise DataError(f"{where}: the index is too large")
            index = PackedIndex(**{name: stored[name] for name in names})
        _check(index, class_count)
    return index


def _check(index: PackedIndex, class_count: int) -> None:
    """Raise ValueError for values that cannot be of packed shards."""
    if index.shard_name.dtype.kind != "U":
        raise ValueError("shard_name is not text")
    for name, kind in _TYPES.items():
        column = getattr(index, name)
        rows = index.shard_name.shape if name.startswith("shard_") else index.label.shape
        if column.dtype != kind or column.shape != rows or column.ndim != 1:
            raise ValueError(f"{name} has the wrong type or length")
    for name in index.shard_name.tolist():
        if posixpath.normpath(name) != name or name.startswith(("/", "..")):
            raise ValueError(f"a shard is called {name!r}")
    if not len(index):
        raise ValueError("it has no images")
    if index.shard.min() < 0 or index.shard.max() >= len(index.shard_name):
        raise ValueError("an image is in a shard that is not listed")
    if index.label.min() < 0 or index.label.max() >= class_count:
        raise ValueError(f"a label is not one of the {class_count} classes")
    ends = index.shard_size[index.shard] - index.size
    if (index.offset < 0).any() or (index.size < 1).any() or (index.offset > ends).any():
        raise ValueError("an image is outside of its shard")
    if (index.height < 1).any() or (index.width < 1).any():
        raise ValueError("an image has no pixels")
