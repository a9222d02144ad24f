"""Reads a packed set again and compares it with its index."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fastaug.data.image_set import Split
from fastaug.data.packing.shard_writer import check_shard
from fastaug.data.progress import progress_bar, thread_pool
from fastaug.data.readers.packed import open_index
from fastaug.data.readers.packed_index import INDEX_FILES, JOURNAL, PackedIndex, PackedShard
from fastaug.errors import DataError


def verify(root: Path) -> dict[Split, PackedIndex]:
    """Read every shard of a packed set and compare it with the index; raises DataError."""
    if not (root / INDEX_FILES["train"]).is_file() or (root / JOURNAL).exists():
        raise DataError(f"{root}: not a folder that fastaug.pack has finished")
    splits = [split for split, name in INDEX_FILES.items() if (root / name).is_file()]
    indexes = {split: open_index(root, split) for split in splits}
    work: list[tuple[PackedShard, np.ndarray]] = []
    for index in indexes.values():
        ends = np.cumsum([shard.images for shard in index.shards])[:-1]
        work += zip(index.shards, np.split(index.rows, ends), strict=True)

    def check(item: tuple[PackedShard, np.ndarray]) -> None:
        shard, rows = item
        check_shard(root / shard.name, shard, rows)

    with thread_pool(-1) as pool, progress_bar("checking shards", len(work)) as advance:
        for _ in pool.map(check, work):
            advance(1)
    return indexes
