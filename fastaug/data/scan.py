"""The scan before training: checks every image once and marks bad ones.

Results are cached by path, size and modification time: an unchanged image is not scanned again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import PIL

from fastaug.data.array_cache import load_arrays, store_arrays
from fastaug.data.image_set import ImageSet, Manifest
from fastaug.data.progress import progress_bar, thread_pool
from fastaug.data.scan_image import ImageInfo, MemoryBudget, scan_image
from fastaug.data.storage import Storage
from fastaug.errors import DataError, few, printable
from fastaug.runtime.cache import cache_dir
from fastaug.views.plan import MAX_PIXELS

log = logging.getLogger("fastaug")

_VERSION = 1
"""Part of the cache file's name; increase it when the rules of scan_image.py change."""
_QUICK, _FULL = 1, 2
_ROW = np.dtype(
    [
        ("stamp", "<u8"),  # hash of path, size and modification time
        ("height", "<i4"),
        ("width", "<i4"),
        ("format", "S8"),
        ("plain", "?"),
        ("bad", "?"),
        ("level", "u1"),  # 0 (not scanned), _QUICK or _FULL
    ]
)
_SCAN_LISTS_THEM = "python -m fastaug.scan DATA lists them"
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


def scan_set(images: ImageSet, *, full: bool = False, workers: int = -1) -> ScanResult:
    """Scan every image that is not in the cache, and cache the results.

    A set that comes with a manifest, such as a packed one, is only scanned if full.
    """
    count = len(images)
    if images.array is not None:
        sizes = np.tile(np.array(images.array.shape[1:3], np.int32), (count, 1))
        return ScanResult(Manifest(sizes, np.ones(count, bool)), Counter(array=count))
    assert images.storage is not None
    level = _FULL if full else _QUICK
    file = _cache_file(images)
    known = _Table.load(file)
    if images.manifest is not None and not (full or len(known.rows)):
        return ScanResult(images.manifest, Counter(packed=count))
    budget = MemoryBudget(_MEMORY)

    def scan_chunk(chunk: Sequence[int]) -> list[ImageInfo]:
        return [scan_image(images, index, full=full, budget=budget) for index in chunk]

    with thread_pool(workers) as pool:
        table = known.for_stamps(_all_stamps(images.storage, pool))
        if images.manifest is not None:
            table.add_known(images.manifest)
        rows = table.rows
        unknown = np.flatnonzero((rows["level"] < level) & ~rows["bad"]).tolist()
        try:
            for chunk, infos in _in_chunks(pool, scan_chunk, unknown, 32, "scanning images"):
                for index, info in zip(chunk, infos, strict=True):
                    table.set(index, info, level)
        finally:  # keeps what was scanned before Ctrl-C
            if unknown:
                table.store(file)
    sizes = np.stack([rows["height"], rows["width"]], axis=1)
    formats = Counter(rows["format"][~rows["bad"]].astype(str).tolist())
    bad = dict(sorted(table.reasons.items()))
    return ScanResult(
        Manifest(sizes, rows["plain"].copy(), bad), formats, _write_bad_list(file, images, bad)
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
    stamp = stamp_of(images, index) if stamp is None else stamp
    file = _cache_file(images)
    table = _Table.load(file)
    (found,) = np.nonzero(table.rows["stamp"] == np.uint64(stamp))
    if not len(found):
        table.rows = np.append(table.rows, np.zeros(1, _ROW))
        table.rows["stamp"][-1] = stamp
    row = int(found[0]) if len(found) else len(table.rows) - 1
    table.set(row, ImageInfo(reason=" ".join(reason.split())[:200]), _FULL)
    table.store(file)
    stored = _Table.load(file).rows
    if not stored["bad"][stored["stamp"] == np.uint64(stamp)].any():
        log.warning(
            "%s cannot be written, so the next scan will not know that %s is bad",
            file,
            images.where(index),
        )


def stamp_of(images: ImageSet, index: int) -> int:
    """Hash of an image's path, size and modification time; changes when the image does."""
    return 0 if images.storage is None else int(images.storage.stamps(np.array([index]))[0])


# --- stamps ---


def _all_stamps(storage: Storage, pool: ThreadPoolExecutor) -> np.ndarray:
    stamps = np.zeros(len(storage), np.uint64)

    def stamp(part: range) -> np.ndarray:
        return storage.stamps(np.arange(part.start, part.stop))

    for chunk, values in _in_chunks(pool, stamp, range(len(storage)), 512, "files"):
        stamps[chunk.start : chunk.stop] = values
    return stamps


# --- cache ---


def _cache_file(images: ImageSet) -> Path:
    key = f"{_VERSION} {PIL.__version__} {MAX_PIXELS} {os.path.abspath(images.name)}"
    return cache_dir() / "manifests" / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:16]}.npz"


@dataclass
class _Table:
    """Scan results: one row for each image."""

    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, _ROW))
    """[N] of _ROW."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Row of a bad image -> reason."""

    @classmethod
    def load(cls, file: Path) -> _Table:
        """The table in a cache file; empty if the file is missing or damaged."""
        stored = load_arrays(file) or {}
        rows, reasons = stored.get("rows"), stored.get("reasons")
        if rows is None or reasons is None or rows.dtype != _ROW or rows.ndim != 1:
            return cls()
        bad = np.flatnonzero(rows["bad"]).tolist()
        if reasons.shape != (len(bad),):
            return cls()
        return cls(rows, dict(zip(bad, map(str, reasons), strict=True)))

    def store(self, file: Path) -> None:
        rows = self.rows[self.rows["level"] > 0]
        bad = np.flatnonzero(self.rows["bad"] & (self.rows["level"] > 0)).tolist()
        store_arrays(file, rows=rows, reasons=np.array([self.reasons[row] for row in bad], str))

    def for_stamps(self, stamps: np.ndarray) -> _Table:
        """A table with one row for each stamp: the known row, or one of level 0."""
        rows = np.zeros(len(stamps), _ROW)
        reasons = {}
        if len(self.rows):
            order = np.argsort(self.rows["stamp"])
            found = np.searchsorted(self.rows["stamp"], stamps, sorter=order)
            source = order[np.minimum(found, len(order) - 1)]
            (known,) = np.nonzero(self.rows["stamp"][source] == stamps)
            rows[known] = self.rows[source[known]]
            for row in np.flatnonzero(rows["bad"]).tolist():
                reasons[row] = self.reasons[int(source[row])]
        rows["stamp"] = stamps
        return _Table(rows, reasons)

    def add_known(self, manifest: Manifest) -> None:
        """Fill in the rows of level 0 from a manifest without bad images."""
        new = (self.rows["level"] == 0) & ~self.rows["bad"]
        self.rows["height"][new], self.rows["width"][new] = manifest.sizes[new].T
        self.rows["plain"][new] = manifest.plain[new]
        self.rows["format"][new], self.rows["level"][new] = b"packed", _QUICK

    def set(self, row: int, info: ImageInfo, level: int) -> None:
        self.rows[row] = (
            self.rows[row]["stamp"],
            info.height,
            info.width,
            info.format.encode()[:8],
            info.plain,
            bool(info.reason),
            level if info.permanent else 0,
        )
        if info.reason:
            self.reasons[row] = info.reason


# --- reports ---


def _write_bad_list(file: Path, images: ImageSet, bad: Mapping[int, str]) -> Path | None:
    """Write the bad images to a text file next to the cache file, if possible."""
    path = file.with_suffix(".bad.txt")
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


# --- threads ---


def _in_chunks(
    pool: ThreadPoolExecutor, work: Callable, indices: Sequence[int], size: int, title: str
) -> Iterator[tuple]:
    """(chunk of the indices, result of work for it), in order."""
    chunks = [indices[start : start + size] for start in range(0, len(indices), size)]
    with progress_bar(title, len(indices)) as advance:
        for chunk, result in zip(chunks, pool.map(work, chunks), strict=True):
            yield chunk, result
            advance(len(chunk))
