"""The scan before training: checks every image once and marks bad ones.

Results are cached: an unchanged image is not scanned again. If the storage knows that no image was
added, removed or replaced, only bad images are looked at, to see whether they were repaired.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fastaug.data.image_set import ImageSet, Manifest
from fastaug.data.progress import progress_bar, thread_pool
from fastaug.data.scan_cache import FULL, QUICK, Rows, ScanCache, cache_file
from fastaug.data.scan_image import ImageInfo, MemoryBudget, scan_image
from fastaug.data.storage import Storage
from fastaug.errors import DataError, few, printable

log = logging.getLogger("fastaug")

_SCAN_LISTS_THEM = "python -m fastaug.scan DATA lists them"
_CHUNKS_IN_FLIGHT = 128
"""Submitted at a time; all of 14 million images would take gigabytes."""
_MEMORY = 1 << 30
"""Bytes that all threads together may decode into; a single large image may take more."""


@dataclass
class ScanResult:
    """Results of scanning a set."""

    manifest: Manifest
    formats: Counter[str]
    """Number of good images of each format."""
    bad_list: Path | None = None
    """Text file with one line for each bad image."""


def scan_and_check(
    images: ImageSet, *, full: bool = False, max_bad: float = 0.01, workers: int = -1
) -> ImageSet:
    """Scan a set and return it with its manifest; raises if the share of bad images is above
    max_bad. Bad images keep their indices.

    full: decode every image; otherwise decode only those that look truncated.
    """
    found = scan_set(images, full=full, workers=workers)
    listed = f"{found.bad_list} lists them" if found.bad_list else _SCAN_LISTS_THEM
    check_max_bad(images, found.manifest, max_bad, listed)
    if bad := found.manifest.bad:
        log.warning(
            "%s: %s of %s images are bad and not used: %s; %s",
            images.name,
            f"{len(bad):,}",
            f"{len(images):,}",
            _few_bad(images, bad),
            listed,
        )
    return replace(images, manifest=found.manifest)


def scan_set(
    images: ImageSet, *, full: bool = False, workers: int = -1, look_at_all: bool = False
) -> ScanResult:
    """Scan every image that is not in the cache, and cache the results.

    look_at_all: compare size and modification time of every image with those in the cache, even if
    the storage is unchanged; this finds files that were rewritten in place.
    A set that comes with a manifest, such as a packed one, is only scanned if full.
    """
    count = len(images)
    if images.array is not None:
        sizes = np.tile(np.array(images.array.shape[1:3], np.int32), (count, 1))
        return ScanResult(Manifest(sizes, np.ones(count, bool)), Counter(array=count))
    assert images.storage is not None
    storage, level = images.storage, FULL if full else QUICK
    budget = MemoryBudget(_MEMORY)

    def scan_chunk(chunk: np.ndarray) -> list[ImageInfo]:
        return [scan_image(images, index, full=full, budget=budget) for index in chunk.tolist()]

    cache = ScanCache(images)
    table = cache.load()
    rows = cache.rows
    with thread_pool(workers) as pool:
        unsure = table.unsure(rows, level)
        if look_at_all:
            unsure[:] = True
        (looked_at,) = np.nonzero(unsure)
        if len(looked_at):
            table.match(_at(rows, looked_at), _all_stamps(storage, looked_at, pool))
        if images.manifest is not None:
            table.add_known(_at(rows, looked_at), images.manifest.subset(looked_at))
        unknown = looked_at[table.unsure(_at(rows, looked_at), level, bad=False)]
        try:
            for chunk, infos in _in_chunks(pool, scan_chunk, unknown, 32, "scanning images"):
                for row, info in zip(_at(rows, chunk).tolist(), infos, strict=True):
                    table.set(row, info, level)
        finally:  # keeps what was scanned before Ctrl-C
            cache.store(table)
    bad = table.bad_images(rows)
    return ScanResult(
        table.manifest(rows, bad), table.count_formats(rows), _write_bad_list(images, bad)
    )


def check_max_bad(
    images: ImageSet, manifest: Manifest, max_bad: float, listed: str = _SCAN_LISTS_THEM
) -> None:
    """Raise if the share of bad images is above max_bad, or if all images are bad.

    listed: where the user finds all of them.
    """
    bad, total = manifest.bad, len(images)
    if len(bad) <= max_bad * total and (not bad or len(bad) < total):
        return
    allowed, advice = f"--max-bad allows {_percent(max_bad)}", ", or raise --max-bad"
    if len(bad) == total:
        allowed, advice = "no usable image remains", ""
    raise DataError(
        f"{images.name}: {len(bad):,} of {total:,} images are bad ({_percent(len(bad) / total)}), "
        f"{allowed}: {_few_bad(images, bad)}; {listed}; repair or remove them{advice} "
        "(a run that you --resume needs the same files)"
    )


def mark_bad(images: ImageSet, index: int, reason: str, stamp: int | None = None) -> None:
    """Record an image as bad for later scans, until its file changes.

    stamp: stamp of the file that was found bad, if it may have changed since.
    """
    if images.array is not None:
        return
    cache = ScanCache(images)
    table = cache.load()
    row = table.row_of(cache.row(index), stamp_of(images, index) if stamp is None else stamp)
    table.set(row, ImageInfo(reason=" ".join(reason.split())[:200]), FULL)
    if not cache.store(table):
        log.warning(
            "%s cannot be written, so the next scan will not know that %s is bad",
            cache.file,
            images.where(index),
        )


def forget(images: ImageSet, indices: Sequence[int]) -> None:
    """Let the next scan look at these images again: they are not what was scanned."""
    if images.array is None and indices:
        cache = ScanCache(images)
        table = cache.load()
        table.forget([cache.row(index) for index in indices])
        cache.store(table)


def stamp_of(images: ImageSet, index: int) -> int:
    """Hash of an image's path, size and modification time; changes when the image does."""
    return 0 if images.storage is None else int(images.storage.stamps(np.array([index]))[0])


# --- stamps ---


def _all_stamps(storage: Storage, indices: np.ndarray, pool: ThreadPoolExecutor) -> np.ndarray:
    chunks = _in_chunks(pool, storage.stamps, indices, 512, "files")
    return np.concatenate([stamps for _, stamps in chunks])


def _at(rows: Rows, indices: np.ndarray) -> np.ndarray:
    """The rows of these images."""
    return indices if isinstance(rows, slice) else rows[indices]


# --- reports ---


def _write_bad_list(images: ImageSet, bad: Mapping[int, str]) -> Path | None:
    """Write the bad images to a text file next to the cache file, if possible."""
    path = cache_file(images.name).with_suffix(".bad.txt")
    try:
        if not bad:
            path.unlink(missing_ok=True)
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            printable(f"{images.where(index)}: {reason}") + "\n" for index, reason in bad.items()
        ]
        path.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    return path


def _few_bad(images: ImageSet, bad: Mapping[int, str]) -> str:
    return few(bad, 2, lambda index: f"{images.where(index)} ({bad[index]})")


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


# --- threads and progress ---


def _in_chunks(
    pool: ThreadPoolExecutor, work: Callable, indices: np.ndarray, size: int, title: str
) -> Iterator[tuple]:
    """(chunk of the indices, result of work for it), in order."""
    running: deque[tuple[np.ndarray, Future]] = deque()
    with progress_bar(title, len(indices)) as advance:
        for start in range(0, len(indices) + _CHUNKS_IN_FLIGHT * size, size):
            if len(chunk := indices[start : start + size]):
                running.append((chunk, pool.submit(work, chunk)))
            if running and start >= _CHUNKS_IN_FLIGHT * size:
                chunk, future = running.popleft()
                yield chunk, future.result()
                advance(len(chunk))
