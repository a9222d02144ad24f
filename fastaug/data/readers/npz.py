"""NumPy archives: one .npz with images and labels, with or without a test set.

np.load trusts an array's header (terabytes), the length of that header (4 GiB) and the zip, and
raises MemoryError or uses all memory. Here every claimed size is checked before allocation.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet, Split
from fastaug.data.labels import MAX_CLASSES, check_gaps
from fastaug.errors import DataError, few, parser_errors
from fastaug.runtime.device import memory_bound

DESCRIPTION = "an .npz with images and labels"
LAYOUT: tuple[tuple[str, str], ...] = (
    (
        "`.npz`",
        "`images` [N, H, W, 3] uint8 and `labels` [N], with `test_images` and `test_labels` or a "
        "tenth held out",
    ),
)
_NAMES = {
    "train": (("train_images", "train_labels"), ("x_train", "y_train"), ("images", "labels")),
    "test": (
        ("test_images", "test_labels"),
        ("x_test", "y_test"),
        ("val_images", "val_labels"),
    ),
}
_MAX_HEADER = 10_000  # characters, as numpy allows
_STEP = 2**20
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # those that numpy writes


def matches(path: Path) -> bool:
    return path.suffix == ".npz" and not path.is_dir()


def has_test(path: Path) -> bool:
    with _opened(path) as archive:
        return any(images in archive and labels in archive for images, labels in _NAMES["test"])


def open_split(path: Path, split: Split, _config: DataConfig) -> ImageSet:
    with _opened(path) as archive:
        image_name, label_name = _array_names(path, archive, split)
        images, labels = archive.read(image_name), archive.read(label_name)
        # The training labels define the classes of both splits.
        train_labels = archive.read(_array_names(path, archive, "train")[1])
        names = archive.read("classes") if "classes" in archive else None
    is_integer = np.issubdtype(train_labels.dtype, np.integer)
    count = (int(train_labels.max(initial=0)) if is_integer else 0) + 1
    if names is not None:
        count = names.size
    if count > MAX_CLASSES or (names is not None and names.ndim != 1):
        raise DataError(
            f"{path}: {count} classes; classes must be one row of at most {MAX_CLASSES}"
        )
    with parser_errors(f"{path}: classes cannot be read as text"):  # code points beyond Unicode
        classes = tuple(map(str, range(count) if names is None else names))
    images = _check_images(path, images)
    labels = _check_labels(path, labels, len(images))
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        raise DataError(
            f"{path}: {split} labels must be 0 to {len(classes) - 1}, as in training; "
            f"got {labels.min()} to {labels.max()}"
        )
    if names is None and split == "train":
        check_gaps(labels, str(path), "add an array `classes` with all names")
    return ImageSet(f"{path} ({split})", classes, labels, array=images)


@contextmanager
def _opened(path: Path) -> Iterator[_Archive]:
    with parser_errors(f"{path}: not a readable .npz"), zipfile.ZipFile(path) as file:
        yield _Archive(path, file)


def _check_images(path: Path, images: np.ndarray) -> np.ndarray:
    """[N, H, W, 3] uint8; gray images get three equal channels."""
    if images.ndim == 3 or (images.ndim == 4 and images.shape[-1] == 1):
        images = np.repeat(images.reshape(*images.shape[:3], 1), 3, axis=-1)
    has_no_pixels = len(images) > 0 and images.size == 0
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or has_no_pixels:
        raise DataError(
            f"{path}: images must be uint8 of shape [N, H, W, 3] or [N, H, W], "
            f"got {images.dtype} of shape {list(images.shape)}"
        )
    return images


def _check_labels(path: Path, labels: np.ndarray, count: int) -> np.ndarray:
    """[N] int64."""
    labels = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.shape != (count,) or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"{path}: labels must be integers of shape [{count}], one for each image, "
            f"got {labels.dtype} of shape {list(labels.shape)}"
        )
    return labels.astype(np.int64)


def _array_names(path: Path, archive: _Archive, split: Split) -> tuple[str, str]:
    """Names of the images and labels."""
    for images, labels in _NAMES[split]:
        if images in archive and labels in archive:
            return images, labels
    takes = ", ".join("/".join(pair) for pairs in _NAMES.values() for pair in pairs)
    raise DataError(
        f"{path}: found no arrays of images and labels, only {few(archive.names) or 'nothing'}; "
        f"name them {takes}"
    )


class _Archive:
    """Arrays by name, read on demand; together they may take a third of the machine's memory."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path, self._zip = path, archive
        self._bytes_left = memory_bound()
        entries = archive.infolist()
        self._entries = {entry.filename.removesuffix(".npy"): entry for entry in entries}
        if len(self._entries) < len(entries):
            raise self._error("two arrays have the same name")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def read(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        if entry.compress_type not in _COMPRESSIONS:
            raise self._error(f"{name} is compressed in a way that numpy does not use")
        with self._zip.open(entry) as file:
            shape, by_columns, dtype = _read_header(file)
            if dtype.hasobject:
                raise self._error(f"{name} holds Python objects, which only a pickle can contain")
            size = math.prod(shape) * dtype.itemsize
            if size != entry.file_size - file.tell():
                raise self._error(f"{name} claims {size} bytes, but the zip has another number")
            # Gray images get three channels.
            self._bytes_left -= size * (3 if len(shape) == 3 or shape[3:] == (1,) else 1)
            if self._bytes_left < 0:
                raise self._error(
                    f"with the {size} bytes of {name} it needs over a third of the memory"
                )
            return _read_array(file, shape, by_columns, dtype)

    def _error(self, reason: str) -> DataError:
        return DataError(f"{self._path}: not a readable .npz ({reason})")


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether it is in column order, and dtype. numpy parses it as a Python literal."""
    start = file.read(8)
    version = np.lib.format.read_magic(io.BytesIO(start))
    form = "<H" if version == (1, 0) else "<I"
    length = file.read(struct.calcsize(form))
    (size,) = struct.unpack(form, length)
    if size > _MAX_HEADER:
        raise ValueError(f"the header of an array has {size} characters")
    text = io.BytesIO(length + file.read(size))
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(text)
    return np.lib.format.read_array_header_2_0(text)


def _read_array(
    file: IO[bytes], shape: tuple[int, ...], by_columns: bool, dtype: np.dtype
) -> np.ndarray:
    """Filled as bytes arrive, so that no memory is touched for bytes that a zip only claims."""
    array = np.empty(math.prod(shape), dtype)
    content, position = memoryview(array.view(np.uint8).data) if array.size else memoryview(b""), 0
    while position < len(content):
        part = file.read(min(_STEP, len(content) - position))
        if not part:
            raise EOFError("the file ends within an array")
        content[position : position + len(part)] = part
        position += len(part)
    if file.read(1):  # the read at the end also makes the zip compare its checksum
        raise ValueError("data after the end of an array")
    return array.reshape(shape, order="F" if by_columns else "C")
