"""Index of class folders: names and labels of all files, found once and cached for later runs.

A folder is listed again only if its modification time has changed. The cached index is
memory-mapped, so that the ranks of a machine share its memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastaug.data.array_cache import MappedArrays, map_arrays, store_mapped
from fastaug.data.image_set import IMAGE_SUFFIXES
from fastaug.data.storage import SETTLED_AFTER_NS
from fastaug.runtime.cache import cache_dir

VERSION = 1
"""Part of the cache file's name; increase it when the content changes."""
_THREADS = 8
"""They wait for a network file system together."""


class _Folder(NamedTuple):
    """A class folder, or one below it, as it was when it was listed."""

    name: str
    mtime_ns: int
    inode: int
    is_settled: bool
    """False: it may have changed again since, at the same modification time."""


@dataclass(frozen=True)
class _ClassFiles:
    """The images of a class."""

    folders: list[_Folder]
    names: np.ndarray
    """[bytes] uint8, sorted names below the root, one after the other."""
    lengths: np.ndarray
    """[n] int64."""


@dataclass(frozen=True)
class FolderIndex:
    """The N images of class folders, class by class, sorted."""

    names: np.ndarray
    """[bytes] uint8, file names below the root, one after the other."""
    ends: np.ndarray
    """[N] int64, where each name ends."""
    labels: np.ndarray
    """[N] int64."""
    snapshot: str
    """Digest of all names and modification times of folders; empty if it cannot be trusted yet."""

    def is_equal(self, other: FolderIndex) -> bool:
        mine, others = (self.names, self.ends), (other.names, other.ends)
        return self.snapshot == other.snapshot and all(map(np.array_equal, mine, others))


def is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES and not name.startswith(".")


def index_class_folders(root: Path, classes: Sequence[str]) -> FolderIndex:
    """The images in root/CLASS at any depth; an unchanged folder is not listed again."""
    file, about = _cache_file(root)
    index, known = _load(file, about, classes)

    def find(name: str) -> _ClassFiles:
        files = known.get(name)
        if files is not None and all(_is_unchanged(root, folder) for folder in files.folders):
            return files
        return _list_class(root, name)

    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(find, classes))
    if index is not None and all(
        files is known.get(name) for name, files in zip(classes, found, strict=True)
    ):
        return index
    made = _join(found)
    folders = [[label, *folder] for label, files in enumerate(found) for folder in files.folders]
    arrays = {
        "names": made.names,
        "ends": made.ends,
        "labels": made.labels,
        "classes": _as_json(list(classes)),
        "folders": _as_json(folders),
    }
    if store_mapped(file, about, arrays, snapshot=made.snapshot):
        index, _ = _load(file, about, classes)
        if index is not None and index.is_equal(made):
            return index  # in the memory that other ranks share
    return made


def _cache_file(root: Path) -> tuple[Path, str]:
    about = f"index {VERSION} of {os.path.abspath(root)}"
    about += f" {' '.join(sorted(IMAGE_SUFFIXES))}"
    digest = hashlib.sha256(os.fsencode(about)).hexdigest()[:32]
    return cache_dir() / "indexes" / f"{digest}.files", about


def _load(
    file: Path, about: str, classes: Sequence[str]
) -> tuple[FolderIndex | None, dict[str, _ClassFiles]]:
    """The stored index, unless it is of other classes, and the files of each class."""
    stored = map_arrays(file, about)
    try:
        return _unpack(stored, classes) if stored else (None, {})
    except (KeyError, ValueError, TypeError, IndexError):  # not an index
        return None, {}


def _unpack(
    stored: MappedArrays, classes: Sequence[str]
) -> tuple[FolderIndex | None, dict[str, _ClassFiles]]:
    arrays = stored.arrays
    names, ends, labels = arrays["names"], arrays["ends"], arrays["labels"]
    if len(ends) != len(labels) or (ends[-1:] != len(names)).any():
        raise ValueError("not an index")
    named: list[str] = json.loads(arrays["classes"].tobytes())
    folders: list[list[_Folder]] = [[] for _ in named]
    for label, *folder in json.loads(arrays["folders"].tobytes()):
        folders[label].append(_Folder(*folder))
    first = np.searchsorted(labels, np.arange(len(named) + 1)).tolist()
    known = {}
    for label, name in enumerate(named):
        own = ends[first[label] : first[label + 1]]
        begin = int(ends[first[label] - 1]) if first[label] else 0
        end = int(own[-1]) if len(own) else begin
        known[name] = _ClassFiles(folders[label], names[begin:end], np.diff(own, prepend=begin))
    index = FolderIndex(names, ends, labels, stored.about["snapshot"])
    return index if named == list(classes) else None, known


def _join(classes: list[_ClassFiles]) -> FolderIndex:
    names = np.concatenate([files.names for files in classes])
    ends = np.cumsum(np.concatenate([files.lengths for files in classes]), dtype=np.int64)
    labels = np.repeat(np.arange(len(classes)), [len(files.lengths) for files in classes])
    digest = hashlib.sha256()
    is_settled = True
    for files in classes:
        for folder in files.folders:
            digest.update(os.fsencode(f"{folder}\n"))
            is_settled &= folder.is_settled
    for array in (names, ends, labels):
        digest.update(np.ascontiguousarray(array).data)
    return FolderIndex(names, ends, labels, digest.hexdigest() if is_settled else "")


def _list_class(root: Path, name: str) -> _ClassFiles:
    folders: list[_Folder] = []
    names = [os.fsencode(image) for image in sorted(_images_below(root, name, folders))]
    lengths = np.array([len(image) for image in names], np.int64)
    return _ClassFiles(folders, np.frombuffer(b"".join(names), np.uint8), lengths)


def _images_below(root: Path, below: str, folders: list[_Folder]) -> Iterator[str]:
    """Names of the images in root/below at any depth, from `root` on, except hidden ones. Adds the
    folders that were listed."""
    # Its state before it is listed: a change in between will be found.
    folders.append(_state(root, below))
    with os.scandir(os.path.join(root, below)) as entries:
        for entry in entries:
            name = f"{below}/{entry.name}"
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _images_below(root, name, folders)
            elif is_image(entry.name):
                yield name


def _state(root: Path, name: str) -> _Folder:
    now = time.time_ns()
    status = os.stat(os.path.join(root, name))
    is_settled = status.st_mtime_ns < now - SETTLED_AFTER_NS
    return _Folder(name, status.st_mtime_ns, status.st_ino, is_settled)


def _is_unchanged(root: Path, folder: _Folder) -> bool:
    try:
        return folder.is_settled and _state(root, folder.name)[:3] == folder[:3]
    except OSError:
        return False


def _as_json(value: list) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)
