"""Packs the splits of a data source, all cores at once, and continues where it was interrupted."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from fastaug.data.image_set import ImageSet, Manifest, Split, is_storage_error
from fastaug.data.packing.config import PackConfig
from fastaug.data.packing.convert import PackedImage, convert
from fastaug.data.packing.journal import FinishedShard, Journal, check_same
from fastaug.data.packing.out_folder import locked, write_lines, writing
from fastaug.data.packing.shard_writer import ShardWriter, check_shard
from fastaug.data.progress import progress_bar, thread_pool
from fastaug.data.readers.packed import open_index
from fastaug.data.readers.packed_index import (
    FOLDERS,
    INDEX_FILES,
    JOURNAL,
    PackedIndex,
    write_packed_index,
)
from fastaug.data.scan import check_max_bad
from fastaug.data.scan_image import ImageInfo, MemoryBudget
from fastaug.data.storage import Files, Spans
from fastaug.errors import DataError
from fastaug.runtime.atomic import TEMPORARY
from fastaug.runtime.cores import core_count
from fastaug.settings import fixed_settings

log = logging.getLogger("fastaug")

ANY_ORDER = (Files, Spans)
"""Storages that several threads may read at any place. Others, such as the row groups of Parquet
files, are read by one thread, in order."""
BAD_IMAGES = "bad-images.txt"
CLASSES = "classes.txt"
_MEMORY = 1 << 30
"""Bytes that all threads together may decode into."""
_MB = 10**6
_LOG_SECONDS = 60.0
_NONE = np.zeros(0)


def pack(sets: dict[Split, ImageSet], root: Path, config: PackConfig) -> dict[Split, PackedIndex]:
    """Write the image sets, which have the same classes, into a folder; returns their indexes.

    Nothing is done for a folder that is already packed like this. An unfinished one is continued.
    """
    made_with = {"source": [images.fingerprint for images in sets.values()]}
    made_with |= dict(fixed_settings(config)) | {"pillow": PIL.__version__}
    with writing(root), locked(root):
        if not (root / JOURNAL).exists() and (root / INDEX_FILES["train"]).exists():
            return _packed_before(root, sets, made_with)
        journal = Journal(root, made_with)
        for folder in ("", *FOLDERS.values()):
            for leftover in (root / folder).glob(TEMPORARY):
                leftover.unlink()
        packer = _Packer(root, config, journal)
        try:
            bad = {split: packer.pack_split(split, images) for split, images in sets.items()}
        except BaseException:
            log.warning(
                "%s: unfinished, with %s; the same command continues",
                root,
                _count(len(journal.finished), "finished shard"),
            )
            raise
        write_lines(root / CLASSES, [name.strip() for name in sets["train"].classes])
        _write_bad_list(root, sets, bad)
        for split in reversed(sets):  # the training index comes last
            write_packed_index(root / INDEX_FILES[split], packer.index(split, sets[split]))
        journal.remove()
    return {split: open_index(root, split) for split in sets}


class _Packer:
    """The work on one folder."""

    def __init__(self, root: Path, config: PackConfig, journal: Journal) -> None:
        self._root, self._config, self._journal = root, config, journal
        self._budget = MemoryBudget(_MEMORY)
        threads = max(core_count(), min(32, 4 * core_count()))
        self._threads = threads if config.workers < 0 else max(1, config.workers)
        self._keep_intact_shards()

    def pack_split(self, split: Split, images: ImageSet) -> dict[int, str]:
        """Pack the images that are not in finished shards. Returns the bad images of the split."""
        finished = self._finished(split)
        start = finished[-1].next if finished else 0
        shards = _Shards(self._root, split, self._journal)
        bad = {index: reason for entry in finished for index, reason in entry.bad.items()}
        title = f"packing {FOLDERS[split]}"
        with (
            thread_pool(self._threads) as pool,
            shards,
            progress_bar(title, len(images), start, _LOG_SECONDS) as advance,
        ):
            for index, image in self._convert(images, start, pool):
                if image.info.reason:
                    bad[index] = shards.bad[index] = image.info.reason
                    check_max_bad(images, Manifest(_NONE, _NONE, bad), self._config.max_bad)
                else:
                    if shards.is_full(image, self._config.shard_size * _MB):
                        shards.finish(next=index)
                    shards.add(index, int(images.labels[index]), image)
                advance(1)
            shards.finish(next=len(images))
        return bad

    def index(self, split: Split, images: ImageSet) -> PackedIndex:
        """The index of a finished split."""
        finished = self._finished(split)
        rows = np.concatenate([entry.rows for entry in finished])
        skipped = [index for entry in finished for index in entry.bad]
        if not np.array_equal(rows["label"], np.delete(images.labels, skipped)):
            raise DataError(f"{self._root}: its images are not those of {images.name}; start over")
        shards = tuple(entry.shard for entry in finished)
        return PackedIndex(images.classes, shards, rows, self._journal.made_with)

    def _finished(self, split: Split) -> list[FinishedShard]:
        return [entry for entry in self._journal.finished if entry.split == split]

    def _keep_intact_shards(self) -> None:
        """Continue after the last shard up to which all are as the journal says."""
        entries = self._journal.finished
        if not entries:
            return
        intact = 0
        with (
            thread_pool(self._threads) as pool,
            progress_bar("checking finished shards", len(entries)) as advance,
        ):
            for is_intact in pool.map(self._is_intact, entries):
                if not is_intact:
                    log.warning(
                        "%s: damaged or missing; packed again",
                        self._root / entries[intact].shard.name,
                    )
                    break
                intact += 1
                advance(1)
        self._journal.keep(entries[:intact])

    def _is_intact(self, entry: FinishedShard) -> bool:
        try:
            check_shard(self._root / entry.shard.name, entry.shard, entry.rows)
        except DataError:
            return False
        return True

    def _convert(
        self, images: ImageSet, start: int, pool: ThreadPoolExecutor
    ) -> Iterator[tuple[int, PackedImage]]:
        """(index, image as it is stored) from a start on, in order."""
        anywhere = images.storage is None or isinstance(images.storage, ANY_ORDER)
        pending: deque[tuple[int, Future[PackedImage]]] = deque()
        for index in range(start, len(images)):
            if anywhere:
                future = pool.submit(lambda i: self._packed_image(_read(images, i)), index)
            else:
                future = pool.submit(self._packed_image, _read(images, index))
            pending.append((index, future))
            if len(pending) >= 4 * self._threads:
                first, future = pending.popleft()
                yield first, future.result()
        for index, future in pending:
            yield index, future.result()

    def _packed_image(self, source: bytes | np.ndarray | ImageInfo) -> PackedImage:
        if isinstance(source, ImageInfo):
            return PackedImage(source)
        return convert(source, self._config, self._budget)


@dataclass
class _Shards:
    """The shards of a split, written one after the other. A finished one is read again and recorded
    in a thread while the next one is written."""

    root: Path
    split: Split
    journal: Journal
    bad: dict[int, str] = field(default_factory=dict)
    """Bad images since the last finished shard."""
    _writer: ShardWriter | None = None
    _finishing: Future[None] | None = None

    def __post_init__(self) -> None:
        self._number = sum(entry.split == self.split for entry in self.journal.finished)
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if self._writer is not None:
            self._writer.discard()
        if self._finishing is not None and error is None:
            self._finishing.result()

    def is_full(self, image: PackedImage, limit: int) -> bool:
        return self._writer is not None and self._writer.size_with(image) > limit

    def add(self, index: int, label: int, image: PackedImage) -> None:
        if self._writer is None:
            name = f"{FOLDERS[self.split]}/{self._number:05}.tar"
            self._writer = ShardWriter(self.root, name)
            self._number += 1
        self._writer.add(f"{index:08}", label, image)

    def finish(self, next: int) -> None:
        """End the shard; next: index of the image with which the next one begins."""
        if self._writer is None:
            return
        if self._finishing is not None:
            self._finishing.result()
        writer, bad = self._writer, self.bad
        self._writer, self.bad = None, {}
        self._finishing = self._thread.submit(self._record, writer, next, bad)

    def _record(self, writer: ShardWriter, next: int, bad: dict[int, str]) -> None:
        try:
            shard, rows = writer.finish()
        except BaseException:
            writer.discard()
            raise
        self.journal.append(FinishedShard(self.split, shard, rows, next, bad))


def _read(images: ImageSet, index: int) -> bytes | np.ndarray | ImageInfo:
    """The stored bytes or the pixels of an image, or why it is bad.

    If the storage fails, the pack ends: it can be continued, and a skipped image would be lost.
    """
    if images.array is not None:
        return images.array[index]
    try:
        return bytes(images.encoded(index))
    except DataError as error:
        if is_storage_error(error):
            raise
        return ImageInfo(reason=str(error).removeprefix(f"{images.where(index)}: ")[:200])


def _packed_before(
    root: Path, sets: dict[Split, ImageSet], made_with: dict[str, Any]
) -> dict[Split, PackedIndex]:
    indexes = {split: open_index(root, split) for split in sets}
    check_same(root, indexes["train"].made_with, made_with)
    log.info("%s: already packed, nothing to do; --verify reads it all again", root)
    return indexes


def _write_bad_list(
    root: Path, sets: dict[Split, ImageSet], bad: dict[Split, dict[int, str]]
) -> None:
    lines = [f"{sets[s].where(i)}: {reason}" for s in sets for i, reason in bad[s].items()]
    if lines:
        write_lines(root / BAD_IMAGES, lines)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
