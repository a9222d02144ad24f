"""The manifest of an image set: every image looked at before the training, bad ones left out.

A look is remembered by path, size and time in the cache folder, so that a set is looked at once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import PIL
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fastaug.data.array_cache import load_arrays, store_arrays
from fastaug.data.image_set import ImageSet, Manifest
from fastaug.data.scan_image import Budget, Look, look
from fastaug.errors import DataError, few, printable
from fastaug.runtime.cache import cache_dir
from fastaug.runtime.cores import core_count
from fastaug.views.plan import MAX_PIXELS

log = logging.getLogger("fastaug")

_VERSION = 1
"""Part of the file's name: another rule in look.py takes a new one."""
_QUICK, _FULL = 1, 2
_ROW = np.dtype(
    [
        ("stamp", "<u8"),  # path, size and time of the image
        ("height", "<i4"),
        ("width", "<i4"),
        ("format", "S8"),
        ("plain", "?"),
        ("bad", "?"),
        ("level", "u1"),  # 0, _QUICK or _FULL: how it was looked at
    ]
)
_MEMORY = 1 << 30
"""Bytes that all threads together may decode into; a single large image may take more."""


@dataclass
class ScanResult:
    """What is known of every image of a set."""

    manifest: Manifest
    formats: Counter[str]
    """Images of each format; bad ones have none."""
    bad_list: Path | None = None
    """A text file with a line for each bad image."""


@dataclass
class _Notes:
    """What is remembered: a row for each image, and why the bad ones are bad."""

    rows: np.ndarray
    """[N] of _ROW."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Row -> reason."""

    def write_down(self, row: int, found: Look, level: int) -> None:
        self.rows[row] = (
            self.rows[row]["stamp"],
            found.height,
            found.width,
            found.format.encode()[:8],
            found.plain,
            bool(found.reason),
            level if found.lasting else 0,
        )
        if found.reason:
            self.reasons[row] = found.reason


def scan_images(
    images: ImageSet, *, full: bool = False, max_bad: float = 0.01, workers: int = -1
) -> ImageSet:
    """The set with its manifest; a share of bad images above max_bad is an error.

    full decodes every image; else those alone whose end is not where it should be. Images that were
    looked at before and have not changed are not looked at again. Bad ones keep their numbers.
    """
    found = scan_set(images, full=full, workers=workers)
    check_share(images, found, max_bad)
    if bad := found.manifest.bad:
        listed = f"; all of them: {found.bad_list}" if found.bad_list else ""
        log.warning(
            "%s: %s of %s images are bad and left out: %s%s",
            images.name,
            f"{len(bad):,}",
            f"{len(images):,}",
            _first_bad(images, bad),
            listed,
        )
    return replace(images, manifest=found.manifest)


def mark_bad(images: ImageSet, index: int, reason: str, stamp: int | None = None) -> None:
    """Leave image number index out from the next scan on, until its file changes.

    stamp: of the file that was found bad, where it may have changed since.
    """
    if images.array is not None:
        return
    stamp = stamp_of(images, index) if stamp is None else stamp
    file, notes = _file_of(images), _recall(images)
    (places,) = np.nonzero(notes.rows["stamp"] == np.uint64(stamp))
    if not len(places):
        notes.rows = np.append(notes.rows, np.zeros(1, _ROW))
        notes.rows["stamp"][-1] = stamp
    row = int(places[0]) if len(places) else len(notes.rows) - 1
    notes.write_down(row, Look(reason=" ".join(reason.split())[:200]), _FULL)
    _remember(file, notes)
    kept = _recall(images).rows
    if not kept["bad"][kept["stamp"] == np.uint64(stamp)].any():
        log.warning("%s cannot be written: %s is not left out", file, images.where(index))


def stamp_of(images: ImageSet, index: int) -> int:
    """Another number when the image changes: made of its path, size and time."""
    return 0 if images.array is not None else int(_stamps(images, [index])[0])


def check_share(images: ImageSet, found: ScanResult, max_bad: float) -> None:
    """Refuse a set with too many bad images, or with no other."""
    bad, total = found.manifest.bad, len(images)
    if len(bad) <= max_bad * total and (not bad or len(bad) < total):
        return
    allowed = f"--max-bad allows {_percent(max_bad)}" if len(bad) < total else "none is left"
    raise DataError(
        f"{images.name}: {len(bad):,} of {total:,} images are bad ({_percent(len(bad) / total)}), "
        f"{allowed}; {_first_bad(images, bad)}; python -m fastaug.scan DATA lists them: "
        "mend them, or raise --max-bad (a run to be resumed needs the files to stay)"
    )


def scan_set(images: ImageSet, *, full: bool = False, workers: int = -1) -> ScanResult:
    """Look at every image that is not known yet, and remember what was found."""
    count = len(images)
    if images.array is not None:
        sizes = np.tile(np.array(images.array.shape[1:3], np.int32), (count, 1))
        return ScanResult(Manifest(sizes, np.ones(count, bool)), Counter(array=count))
    level = _FULL if full else _QUICK
    file = _file_of(images)
    budget = Budget(_MEMORY)

    def look_at(part: Sequence[int]) -> list[Look]:
        return [look(images, index, full=full, budget=budget) for index in part]

    with _thread_pool(workers) as pool:
        notes = _matching(_recall(images), _all_stamps(images, pool))
        unknown = np.flatnonzero((notes.rows["level"] < level) & ~notes.rows["bad"]).tolist()
        try:
            for part, looks in _in_chunks(pool, look_at, unknown, 32, "looking at images"):
                for index, found in zip(part, looks, strict=True):
                    notes.write_down(index, found, level)
        finally:  # what was seen before Ctrl-C is not looked at again
            if unknown:
                _remember(file, notes)
    rows = notes.rows
    sizes = np.stack([rows["height"], rows["width"]], axis=1)
    formats = Counter(rows["format"][~rows["bad"]].astype(str).tolist())
    bad = dict(sorted(notes.reasons.items()))
    return ScanResult(
        Manifest(sizes, rows["plain"].copy(), bad), formats, _list_bad(file, images, bad)
    )


def _all_stamps(images: ImageSet, pool: ThreadPoolExecutor) -> np.ndarray:
    if images.spans is not None:
        return _stamps(images, range(len(images)))
    stamps = np.zeros(len(images), np.uint64)
    stat = _in_chunks(pool, lambda part: _stamps(images, part), range(len(images)), 512, "files")
    for part, values in stat:
        stamps[part.start : part.stop] = values
    return stamps


def _stamps(images: ImageSet, part: Sequence[int]) -> np.ndarray:
    """[part] uint64: made of path, size and time of each image, so another when one changes."""
    here = os.getcwd()
    if images.spans is None:
        stamps = [_file_stamp(os.path.join(here, images.files[index])) for index in part]
        return np.array(stamps, np.uint64)
    spans, chosen = images.spans, np.asarray(part)
    used, of_shard = np.unique(spans.shard[chosen], return_inverse=True)
    shards = [_file_stamp(os.path.join(here, spans.shards[shard])) for shard in used]
    offset, size = spans.offset[chosen].astype(np.uint64), spans.size[chosen].astype(np.uint64)
    return np.array(shards, np.uint64)[of_shard] + offset + (size << np.uint64(40))


def _file_stamp(path: str) -> int:
    try:
        status = os.stat(path)
        text = f"{path}\0{status.st_size}\0{status.st_mtime_ns}"
    except OSError:
        text = path
    return int.from_bytes(hashlib.blake2b(os.fsencode(text), digest_size=8).digest(), "little")


def _matching(notes: _Notes, stamps: np.ndarray) -> _Notes:
    """A row for each stamp: what the notes say of it, or nothing."""
    rows = np.zeros(len(stamps), _ROW)
    reasons = {}
    if len(notes.rows):
        order = np.argsort(notes.rows["stamp"])
        places = np.searchsorted(notes.rows["stamp"], stamps, sorter=order)
        source = order[np.minimum(places, len(order) - 1)]
        (known,) = np.nonzero(notes.rows["stamp"][source] == stamps)
        rows[known] = notes.rows[source[known]]
        for row in np.flatnonzero(rows["bad"]).tolist():
            reasons[row] = notes.reasons[int(source[row])]
    rows["stamp"] = stamps
    return _Notes(rows, reasons)


def _file_of(images: ImageSet) -> Path:
    what = f"{_VERSION} {PIL.__version__} {MAX_PIXELS} {os.path.abspath(images.name)}"
    return cache_dir() / "manifests" / f"{hashlib.sha256(os.fsencode(what)).hexdigest()[:16]}.npz"


def _recall(images: ImageSet) -> _Notes:
    """What was remembered of a set; nothing where that is not there or damaged."""
    stored = load_arrays(_file_of(images)) or {}
    rows, reasons = stored.get("rows"), stored.get("reasons")
    if rows is None or reasons is None or rows.dtype != _ROW or rows.ndim != 1:
        return _Notes(np.zeros(0, _ROW))
    bad = np.flatnonzero(rows["bad"]).tolist()
    if reasons.shape != (len(bad),):
        return _Notes(np.zeros(0, _ROW))
    return _Notes(rows, dict(zip(bad, map(str, reasons), strict=True)))


def _remember(file: Path, notes: _Notes) -> None:
    rows = notes.rows[notes.rows["level"] > 0]
    bad = np.flatnonzero(notes.rows["bad"] & (notes.rows["level"] > 0)).tolist()
    store_arrays(file, rows=rows, reasons=np.array([notes.reasons[row] for row in bad], str))


def _list_bad(file: Path, images: ImageSet, bad: Mapping[int, str]) -> Path | None:
    """Write the bad images beside the manifest, where that can be written."""
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


def _first_bad(images: ImageSet, bad: Mapping[int, str]) -> str:
    return few(bad, 2, lambda index: f"{images.where(index)} ({bad[index]})")


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


@contextmanager
def _thread_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """-1: four threads a core, since most of them wait for the storage."""
    threads = min(32, 4 * core_count()) if workers < 0 else max(1, workers)
    pool = ThreadPoolExecutor(threads)
    try:
        # Pillow's warnings (a large image, odd EXIF) would be a line for each image.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _in_chunks(
    pool: ThreadPoolExecutor, work: Callable, indices: Sequence[int], size: int, title: str
) -> Iterator[tuple]:
    """(part of the indices, what work makes of it), in order."""
    chunks = [indices[start : start + size] for start in range(0, len(indices), size)]
    with _bar(title, len(indices)) as advance:
        for part, result in zip(chunks, pool.map(work, chunks), strict=True):
            yield part, result
            advance(len(part))


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, in a terminal and after the first second alone."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(
        *columns, TextColumn("eta"), TimeRemainingColumn(), console=console, transient=True
    )
    task = progress.add_task(title, total=total)
    begin = time.monotonic()

    def advance(count: int) -> None:
        progress.advance(task, count)
        if console.is_terminal and time.monotonic() - begin > 1:
            progress.start()

    try:
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()
