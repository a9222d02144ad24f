"""Packed sets: WebDataset shards with an index, as fastaug.pack writes them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet, Split
from fastaug.data.readers.packed_index import INDEX_FILES, JOURNAL, PackedIndex, read_packed_index
from fastaug.data.storage import Spans
from fastaug.errors import DataError

DESCRIPTION = "a folder that fastaug.pack has written"
LAYOUT: tuple[tuple[str, str], ...] = (
    (
        "packed",
        "what [`fastaug.pack`](packing.md) writes: `train.index`, `train/00000.tar`, ..., and the "
        "same for `val`; starts without a scan",
    ),
)


@dataclass(frozen=True)
class CheckedSpans(Spans):
    """Byte ranges whose checksums are known."""

    crc32: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    """[N] uint32."""

    def read(self, index: int) -> bytes:
        content = super().read(index)
        if zlib.crc32(content) != self.crc32[index]:
            raise DataError(f"{self.where(index)}: not the bytes that were packed (checksum)")
        return content

    def for_random_access(self) -> CheckedSpans:
        return self


def matches(path: Path) -> bool:
    return path.is_dir() and any(
        (path / name).is_file() for name in (JOURNAL, *INDEX_FILES.values())
    )


def has_test(root: Path) -> bool:
    return (root / INDEX_FILES["test"]).is_file()


def open_split(root: Path, split: Split, _config: DataConfig) -> ImageSet:
    if (root / JOURNAL).exists():
        raise DataError(
            f"{root}: fastaug.pack has not finished it; run the same fastaug.pack command again"
        )
    index = open_index(root, split)
    rows = index.rows
    storage = CheckedSpans(
        tuple(root / shard.name for shard in index.shards),
        index.shard,
        rows["offset"],
        rows["size"],
        crc32=rows["crc32"],
    )
    return ImageSet(f"{root} ({split})", index.classes, index.labels, storage, None, index.manifest)


def open_index(root: Path, split: Split) -> PackedIndex:
    """The index of a split, checked against the sizes of its shards."""
    file = root / INDEX_FILES[split]
    if not file.is_file():
        raise DataError(f"{file}: missing; copy it again, or run fastaug.pack again")
    index = read_packed_index(file, str(file))
    for shard in index.shards:
        path = root / shard.name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}), but {file.name} lists it; copy it "
                "again, or run fastaug.pack again"
            ) from error
        if found != shard.bytes:
            raise DataError(
                f"{path}: has {found:,} bytes, {file.name} has {shard.bytes:,}; it is truncated or "
                "of another set: copy it again, or run fastaug.pack again"
            )
    return index
