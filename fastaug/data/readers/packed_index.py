"""Index of one split of a packed set: everything that training must know about its images.

The file is a magic number, the length of the header, the header in JSON, one row of 32 bytes for
each image, and a SHA-256 of all that. It needs no other file, so an object store fetches it in one
request. A set is FOLDER/train.index, FOLDER/train/00000.tar, ... and the same for val.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fastaug.data.image_set import Manifest, Split
from fastaug.data.readers.shard_index import MAX_IMAGE
from fastaug.errors import parser_errors
from fastaug.runtime.atomic import atomic_write
from fastaug.views.plan import MAX_PIXELS

FOLDERS: dict[Split, str] = {"train": "train", "test": "val"}
"""Split -> folder of its shards."""
INDEX_FILES: dict[Split, str] = {split: f"{folder}.index" for split, folder in FOLDERS.items()}
"""Split -> its index, next to the folder of its shards."""
JOURNAL = "unfinished-pack.jsonl"
"""While this file exists, the set is incomplete: fastaug.pack is running or was interrupted."""
ROW = np.dtype(
    [
        ("offset", "<u8"),  # of the image in its shard
        ("size", "<u4"),  # bytes
        ("crc32", "<u4"),  # zlib.crc32 of the bytes
        ("label", "<u4"),
        ("height", "<i4"),
        ("width", "<i4"),
        ("plain", "<u4"),  # 0 or 1: Manifest.plain
    ]
)
_MAGIC = b"fastaug packed 1"
"""Increase the version when the format changes, or the rules for plain in scan_image.py."""
_START = len(_MAGIC) + 8
_CHECKSUM = hashlib.sha256().digest_size
_MAX_HEADER = 2**28  # bytes; a million class names of 30 characters are 2**25
_MAX_INDEX = 2**34  # bytes; 500 million images
_SHARD_NAME = r"(train|val)/[0-9]{5,9}\.tar"


@dataclass(frozen=True)
class PackedShard:
    """A tar of a packed set."""

    name: str
    """Path below the folder of the set: train/00000.tar."""
    bytes: int
    images: int
    sha256: str
    """Hexadecimal, of the whole file."""


@dataclass(frozen=True)
class PackedIndex:
    """The images of one split. Those of a shard follow one another, in the order of the shards."""

    classes: tuple[str, ...]
    shards: tuple[PackedShard, ...]
    rows: np.ndarray
    """[N] of ROW."""
    made_with: dict[str, Any] = field(default_factory=dict)
    """Settings of fastaug.pack and the fingerprint of its source."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def shard(self) -> np.ndarray:
        """[N] int32: the shard of each image."""
        counts = [shard.images for shard in self.shards]
        return np.repeat(np.arange(len(self.shards), dtype=np.int32), counts)

    @cached_property
    def labels(self) -> np.ndarray:
        """[N] int64, indices into classes."""
        return self.rows["label"].astype(np.int64)

    @cached_property
    def manifest(self) -> Manifest:
        """What a scan of the images would find."""
        sizes = np.stack([self.rows["height"], self.rows["width"]], axis=1)
        return Manifest(sizes, self.rows["plain"] == 1)


def read_packed_index(content: bytes | Path, where: str) -> PackedIndex:
    """Check and read an index: its content, or a file, which is mapped into memory.

    where: its place, for messages. A damaged or foreign index is a DataError.
    """
    with parser_errors(f"{where}: not an index of fastaug.pack, or damaged"):
        view = memoryview(_map(content) if isinstance(content, Path) else content)
        header_end = _START + int.from_bytes(view[len(_MAGIC) : _START], "little")
        if view[: len(_MAGIC)] != _MAGIC or len(view) < _START + _CHECKSUM:
            raise ValueError("it does not begin as one of this version")
        if len(view) > _MAX_INDEX:
            raise ValueError(f"{len(view)} bytes")
        if hashlib.sha256(view[:-_CHECKSUM]).digest() != view[-_CHECKSUM:]:
            raise ValueError("its checksum is wrong")
        if header_end > min(_MAX_HEADER, len(view) - _CHECKSUM):
            raise ValueError(f"a header of {header_end} bytes")
        header = json.loads(bytes(view[_START:header_end]))
        rows = np.frombuffer(view[header_end:-_CHECKSUM], ROW)
        index = PackedIndex(
            tuple(header["classes"]),
            tuple(PackedShard(**shard) for shard in header["shards"]),
            rows,
            dict(header["made_with"]),
        )
        _check(index)
    return index


def write_packed_index(path: Path, index: PackedIndex) -> None:
    """Write an index atomically."""
    _check(index)
    header = {
        "classes": index.classes,
        "shards": [vars(shard) for shard in index.shards],
        "made_with": index.made_with,
    }
    text = json.dumps(header).encode()
    text = text.ljust(-(-(_START + len(text)) // 64) * 64 - _START)  # the rows are aligned
    content = _MAGIC + len(text).to_bytes(8, "little") + text + index.rows.astype(ROW).tobytes()
    with atomic_write(path) as temporary:
        temporary.write_bytes(content + hashlib.sha256(content).digest())


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _check(index: PackedIndex) -> None:
    """Raise unless every number can be used without looking at it again."""
    if not all(isinstance(name, str) for name in index.classes):
        raise ValueError("class names that are not text")
    for shard in index.shards:
        if not re.fullmatch(_SHARD_NAME, shard.name) or not re.fullmatch(r"\w{64}", shard.sha256):
            raise ValueError(f"a shard {shard.name!r} with the SHA-256 {shard.sha256!r}")
        if type(shard.bytes) is not int or type(shard.images) is not int or shard.images < 1:
            raise ValueError(f"{shard.name} of {shard.bytes} bytes with {shard.images} images")
    if len({shard.name for shard in index.shards}) != len(index.shards):
        raise ValueError("a shard is listed twice")
    if sum(shard.images for shard in index.shards) != len(index.rows):
        raise ValueError("the images of its shards are not those of its rows")
    if not (_fit(index) & (index.rows["label"] < len(index.classes))).all():
        raise ValueError("an image with an impossible position, size or label")


def _fit(index: PackedIndex) -> np.ndarray:
    """[N] bool: whether an image is inside its shard and of a possible size."""
    rows = index.rows
    ends = np.array([shard.bytes for shard in index.shards], np.uint64)[index.shard]
    size, height, width = rows["size"], rows["height"].astype(np.int64), rows["width"]
    inside = (rows["offset"] <= ends) & (size <= ends - np.minimum(rows["offset"], ends))
    possible = (size > 0) & (size <= MAX_IMAGE) & (rows["plain"] <= 1)
    return inside & possible & (height > 0) & (width > 0) & (height * width <= MAX_PIXELS)
