"""The cache of the scan: a table with a row for each image of a set, memory-mapped by all ranks."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import PIL

from fastaug.data.array_cache import MappedArrays, map_arrays, store_mapped
from fastaug.data.image_set import ImageSet, Manifest
from fastaug.data.scan_image import ImageInfo
from fastaug.data.storage import Subset, snapshot_of
from fastaug.runtime.cache import cache_dir
from fastaug.views.plan import MAX_PIXELS

VERSION = 3
"""Part of the cache file's name; increase it when the rules of scan_image.py change."""
QUICK, FULL = 1, 2
"""Levels of a scan; 0: not scanned."""
Rows = np.ndarray | slice
"""Which rows belong to the images of a set: indices [N] int64, or all of the first N."""
_PACKED = "packed"
"""Format of images whose manifest was stored with them."""
_COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    "stamp": ("<u8", ()),  # hash of path, size and modification time when it was scanned
    "size": ("<i4", (2,)),  # height and width
    "format": ("|u1", ()),  # index into `formats`
    "plain": ("|b1", ()),
    "bad": ("|b1", ()),
    "level": ("|u1", ()),
}


def cache_file(name: str) -> Path:
    """name: that of the image set."""
    digest = hashlib.sha256(os.fsencode(_about(name))).hexdigest()[:16]
    return cache_dir() / "manifests" / f"{digest}.scan"


class ScanCache:
    """The cached scan of a set. All subsets of a set share one table."""

    def __init__(self, images: ImageSet) -> None:
        assert images.storage is not None
        storage = images.storage
        self.rows: Rows = slice(0, len(images))
        if isinstance(storage, Subset):
            self.rows = storage.positions
            storage = storage.base
        self._count = len(storage)
        self._snapshot = snapshot_of(storage)
        self._name = images.origin or images.name
        self.file = cache_file(self._name)

    def row(self, index: int) -> int:
        """The row of an image."""
        return index if isinstance(self.rows, slice) else int(self.rows[index])

    def load(self) -> ScanTable:
        """The stored table if it is that of the unchanged set. Otherwise one whose stored rows can
        be found by their stamps; an empty one if the file is missing or damaged."""
        stored = map_arrays(self.file, _about(self._name))
        table = _unpack(stored) if stored else None
        if table is None:
            return ScanTable.empty(self._count)
        assert stored is not None
        is_current = stored.about["snapshot"] == self._snapshot and self._snapshot
        if is_current and stored.about["images"] == self._count:
            return table
        return table.for_other_images(self._count)

    def store(self, table: ScanTable) -> bool:
        """Write the table if it has changed; False if it cannot be written."""
        if not (table.is_changed or (self._snapshot and not table.is_aligned)):
            return True
        return store_mapped(
            self.file,
            _about(self._name),
            table.packed(),
            images=self._count,
            snapshot=self._snapshot,
        )


class ScanTable:
    """Scan results: a row for each image, then rows that are only known by their stamps."""

    def __init__(
        self,
        columns: dict[str, np.ndarray],
        images: int,
        *,
        reasons: dict[int, str],
        formats: list[str],
        is_aligned: bool,
    ) -> None:
        self._columns, self._images = columns, images
        self._reasons = reasons
        """Row of a bad image -> reason."""
        self._formats = formats
        self.is_aligned = is_aligned
        """Whether a row is that of its image without a look at the stamp."""
        self.is_changed = False
        """Whether it has results that are not in the cache."""

    @classmethod
    def empty(cls, images: int) -> ScanTable:
        return cls(_zeros(images), images, reasons={}, formats=[], is_aligned=False)

    def for_other_images(self, images: int) -> ScanTable:
        """A table of unknown images, with the rows of this one to be found by their stamps."""
        (known,) = np.nonzero(self._columns["level"])
        known = known[: 2 * images]  # images that were removed do not pile up
        new = _zeros(images)
        columns = {n: np.concatenate([new[n], c[known]]) for n, c in self._columns.items()}
        bad, place = known[self._columns["bad"][known]], np.flatnonzero(columns["bad"])
        texts = (self._reasons[row] for row in bad.tolist())
        reasons = dict(zip(place.tolist(), texts, strict=True))
        return ScanTable(columns, images, reasons=reasons, formats=self._formats, is_aligned=False)

    def unsure(self, rows: Rows, level: int, *, bad: bool = True) -> np.ndarray:
        """[n] bool: images that were not scanned to this level, and bad ones, which may have been
        repaired. bad: whether these are included."""
        is_bad, is_unknown = self._columns["bad"][rows], self._columns["level"][rows] < level
        return is_unknown | is_bad if bad else is_unknown & ~is_bad

    def match(self, rows: np.ndarray, stamps: np.ndarray) -> None:
        """Keep what is known of these images if their stamps are the same, else find a row with the
        stamp, else reset them."""
        different = self._columns["stamp"][rows] != stamps
        rows, stamps = rows[different], stamps[different]
        if not len(rows):
            return
        self._make_writable()
        spare = self._columns["stamp"][self._images :]
        for column in self._columns.values():
            column[rows] = 0
        self._reasons = {r: text for r, text in self._reasons.items() if self._columns["bad"][r]}
        self._columns["stamp"][rows] = stamps
        if not len(spare):
            return
        order = np.argsort(spare)
        found = np.minimum(np.searchsorted(spare, stamps, sorter=order), len(spare) - 1)
        source = self._images + order[found]
        is_found = spare[order[found]] == stamps
        rows, source = rows[is_found], source[is_found]
        for column in self._columns.values():
            column[rows] = column[source]
        for row, known in zip(rows.tolist(), source.tolist(), strict=True):
            if known in self._reasons:
                self._reasons[row] = self._reasons[known]
        self._columns["level"][source] = 0

    def row_of(self, row: int, stamp: int) -> int:
        """The row in which to record an image with this stamp; `row` if the table is aligned."""
        self._make_writable()
        if not self.is_aligned:
            (found,) = np.nonzero(self._columns["stamp"] == np.uint64(stamp))
            if not len(found):
                self._columns = {
                    name: np.concatenate([column, new])
                    for (name, column), new in zip(
                        self._columns.items(), _zeros(1).values(), strict=True
                    )
                }
            row = int(found[0]) if len(found) else len(self._columns["stamp"]) - 1
        self._columns["stamp"][row] = stamp
        return row

    def set(self, row: int, info: ImageInfo, level: int) -> None:
        """Record the result of a scan."""
        self._make_writable()
        self.is_changed = True
        if info.format not in self._formats:
            self._formats.append(info.format)
        columns = self._columns
        columns["size"][row] = info.height, info.width
        columns["format"][row] = self._formats.index(info.format)
        columns["plain"][row] = info.plain
        columns["bad"][row] = bool(info.reason)
        columns["level"][row] = level if info.permanent else 0
        self._reasons.pop(row, None)
        if info.reason:
            self._reasons[row] = info.reason

    def add_known(self, rows: np.ndarray, manifest: Manifest) -> None:
        """Fill in rows of level 0 from the manifest of their images."""
        new = self.unsure(rows, QUICK, bad=False)
        new[list(manifest.bad)] = False
        if not new.any():
            return
        self._make_writable()
        self.is_changed = True
        if _PACKED not in self._formats:
            self._formats.append(_PACKED)
        rows = rows[new]
        self._columns["size"][rows] = manifest.sizes[new]
        self._columns["plain"][rows] = manifest.plain[new]
        self._columns["format"][rows] = self._formats.index(_PACKED)
        self._columns["level"][rows] = QUICK

    def forget(self, rows: list[int]) -> None:
        """Let these images be scanned again."""
        if self.is_aligned:  # otherwise a changed image has another stamp
            self._make_writable()
            self.is_changed = True
            self._columns["level"][rows] = 0

    def manifest(self, rows: Rows, bad: Mapping[int, str]) -> Manifest:
        size, plain, stamp = (self._columns[name][rows] for name in ("size", "plain", "stamp"))
        return Manifest(size, plain, bad, stamp)

    def bad_images(self, rows: Rows) -> dict[int, str]:
        """Index of each bad image -> reason, ascending."""
        bad = np.flatnonzero(self._columns["bad"][rows])
        own = bad if isinstance(rows, slice) else rows[bad]
        pairs = zip(bad.tolist(), own.tolist(), strict=True)
        return {index: self._reasons[row] for index, row in pairs}

    def count_formats(self, rows: Rows) -> Counter[str]:
        """Number of good images of each format."""
        formats = self._columns["format"][rows][~self._columns["bad"][rows]]
        counts = np.bincount(formats, minlength=len(self._formats)).tolist()
        return Counter({n: c for n, c in zip(self._formats, counts, strict=True) if c})

    def packed(self) -> dict[str, np.ndarray]:
        """The arrays of a cache file: without errors of the storage, which may not come again, and
        without spare rows that are of no use."""
        known = self._columns["level"] > 0
        kept = known.copy()
        kept[: self._images] = True
        columns = {name: column[kept] for name, column in self._columns.items()}
        columns["bad"] &= columns["level"] > 0
        place = np.cumsum(kept) - 1
        reasons = {int(place[row]): r for row, r in self._reasons.items() if known[row]}
        texts = {"reasons": list(reasons.items()), "formats": self._formats}
        packed = {n: np.frombuffer(json.dumps(t).encode(), np.uint8) for n, t in texts.items()}
        return columns | packed

    def _make_writable(self) -> None:
        """A mapped table is copied before its first change."""
        if not self._columns["level"].flags.writeable:
            self._columns = {name: column.copy() for name, column in self._columns.items()}


def _about(name: str) -> str:
    return f"scan {VERSION} {PIL.__version__} {MAX_PIXELS} {os.path.abspath(name)}"


def _zeros(rows: int) -> dict[str, np.ndarray]:
    return {n: np.zeros((rows, *shape), kind) for n, (kind, shape) in _COLUMNS.items()}


def _unpack(stored: MappedArrays) -> ScanTable | None:
    """None: not a table."""
    try:
        images, columns = stored.about["images"], {name: stored.arrays[name] for name in _COLUMNS}
        reasons: dict[int, str] = dict(json.loads(stored.arrays["reasons"].tobytes()))
        formats: list[str] = json.loads(stored.arrays["formats"].tobytes())
        count = len(columns["level"])
        is_table = (
            all(
                columns[name].dtype == kind and columns[name].shape == (count, *shape)
                for name, (kind, shape) in _COLUMNS.items()
            )
            and count >= images
            and sorted(reasons) == np.flatnonzero(columns["bad"]).tolist()
            and (columns["format"] <= max(0, len(formats) - 1)).all()
        )
    except (KeyError, ValueError, TypeError):
        return None
    if not is_table:
        return None
    return ScanTable(columns, images, reasons=reasons, formats=formats, is_aligned=True)
