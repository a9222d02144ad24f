"""CIFAR-10 and CIFAR-100 in their python format: a folder or the .tar.gz, without unpickling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet, Split
from fastaug.data.readers.archive import ArchiveLimits, read_archive
from fastaug.data.readers.plain_pickle import read_plain_pickle
from fastaug.errors import DataError

DESCRIPTION = "CIFAR's cifar-10-python.tar.gz or cifar-100-python.tar.gz, packed or unpacked"
LAYOUT: tuple[tuple[str, str], ...] = (
    (
        "CIFAR-10, CIFAR-100",
        "the python version, as a folder or as the `.tar.gz` it comes in",
    ),
)
_MAX_FILE = 2**28  # bytes; CIFAR-100's train file has 155 MB
_LIMITS = ArchiveLimits("CIFAR", file=_MAX_FILE, archive=2**29)  # both archives have 186 MB
_MAX_CLASSES = 1000


class _Layout(NamedTuple):
    """File names and keys of one of the two data sets."""

    folder: str
    files: dict[Split, list[str]]
    label_key: str
    meta_file: str
    names_key: str
    """Key of the class names in the meta file."""


_LAYOUTS = (
    _Layout(
        "cifar-10-batches-py",
        {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]},
        "labels",
        "batches.meta",
        "label_names",
    ),
    _Layout(
        "cifar-100-python",
        {"train": ["train"], "test": ["test"]},
        "fine_labels",
        "meta",
        "fine_label_names",
    ),
)


def matches(path: Path) -> bool:
    if path.is_dir():
        return _find_folder(path) is not None
    return path.name.endswith((".tar.gz", ".tgz", ".tar"))


def has_test(_path: Path) -> bool:
    return True


def open_split(path: Path, split: Split, _config: DataConfig) -> ImageSet:
    found = _find_folder(path) if path.is_dir() else None
    return _open_archive(path, split) if found is None else _open_folder(*found, split)


def _find_folder(path: Path) -> tuple[Path, _Layout] | None:
    """The folder with CIFAR's files (the path or a folder in it), and its layout."""
    for layout in _LAYOUTS:
        for folder in (path / layout.folder, path):
            if (folder / layout.meta_file).is_file():
                return folder, layout
    return None


def _open_folder(folder: Path, layout: _Layout, split: Split) -> ImageSet:
    def read(name: str) -> bytes:
        file = folder / name
        if not file.is_file():
            raise DataError(f"{folder}: CIFAR's file {name} is missing")
        if (size := file.stat().st_size) > _MAX_FILE:
            raise DataError(f"{file}: too large for one of CIFAR's files ({size} bytes)")
        return file.read_bytes()

    return _assemble(f"{folder} ({split})", layout, split, read)


def _open_archive(path: Path, split: Split) -> ImageSet:
    """Read the archive in one pass, without unpacking it to disk."""
    wanted = {
        f"{layout.folder}/{file}"
        for layout in _LAYOUTS
        for file in (*layout.files[split], layout.meta_file)
    }
    names, contents = read_archive(path, wanted, _LIMITS)
    folders = {name.partition("/")[0] for name in names if "/" in name}
    layout = next((layout for layout in _LAYOUTS if layout.folder in folders), None)
    if layout is None:
        expected = " or ".join(layout.folder for layout in _LAYOUTS)
        raise DataError(
            f"{path}: not CIFAR's layout; expected {expected} inside, "
            f"found {', '.join(sorted(names)[:3]) or 'nothing'}"
        )

    def read(name: str) -> bytes:
        member = f"{layout.folder}/{name}"
        if member not in contents:
            raise DataError(f"{path}: {member} is missing from the archive")
        return contents[member]

    return _assemble(f"{path} ({split})", layout, split, read)


def _assemble(name: str, layout: _Layout, split: Split, read: Callable[[str], bytes]) -> ImageSet:
    meta = _unpickle(name, read(layout.meta_file))
    classes = _class_names(name, _field(name, meta, layout.names_key))
    images, labels = [], []
    for file in layout.files[split]:
        content = _unpickle(f"{name}: {file}", read(file))
        pixels = _field(name, content, "data")
        shape = list(pixels.shape) if isinstance(pixels, np.ndarray) else type(pixels).__name__
        if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != 3072:
            raise DataError(f"{name}: {file} must hold uint8 [N, 3072], got {shape}")
        images.append(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels.append(_labels(f"{name}: {file}", _field(name, content, layout.label_key)))
    array, label_array = np.ascontiguousarray(np.concatenate(images)), np.concatenate(labels)
    in_range = (label_array >= 0) & (label_array < len(classes))
    if len(array) != len(label_array) or not in_range.all():
        raise DataError(
            f"{name}: {len(array)} images need as many labels from 0 to {len(classes) - 1}, "
            f"got {len(label_array)} labels"
        )
    return ImageSet(name, classes, label_array, array=array)


def _field(name: str, content: Any, key: str) -> Any:
    """A value of a pickled dict, whose keys are bytes as Python 2 wrote them."""
    values = {_text(k): v for k, v in content.items()} if isinstance(content, dict) else {}
    if key not in values:
        raise DataError(f"{name}: no {key!r} in the pickle; is this CIFAR's python format?")
    return values[key]


# Only flat lists: nested ones, each with ten references to the one before, would grow without end.


def _class_names(name: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(v, (str, bytes)) for v in values):
        raise DataError(f"{name}: the class names must be a list of strings")
    if len(values) > _MAX_CLASSES:
        raise DataError(f"{name}: {len(values)} classes; CIFAR has 10 or 100")
    return tuple(map(_text, values))


def _labels(name: str, values: Any) -> np.ndarray:
    """[N] int64; -1 for a label that no class can have."""
    if not isinstance(values, list) or not all(type(v) is int for v in values):
        raise DataError(f"{name}: the labels must be a list of whole numbers")
    return np.array([v if 0 <= v < _MAX_CLASSES else -1 for v in values], np.int64)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


def _unpickle(name: str, content: bytes) -> Any:
    try:
        return read_plain_pickle(content)
    except DataError as error:
        raise DataError(f"{name}: not CIFAR's pickle ({error})") from error
