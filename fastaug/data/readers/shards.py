"""Sharded sets: a folder of WebDataset, TFRecord or RecordIO files, each with many images.

The shards of a split are in DIR/SPLIT/, or in DIR with the name of the split in their names. To add
a shard format, write a function like `webdataset.read_samples` and list it in FORMATS.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet, Split
from fastaug.data.labels import MAX_CLASSES
from fastaug.data.readers.recordio import MAGIC, read_records
from fastaug.data.readers.shard_file import Record, Shard
from fastaug.data.readers.shard_index import ShardIndex, load_index, make_index
from fastaug.data.readers.splits import SPLIT_WORDS, split_word
from fastaug.data.readers.tfrecord import RecordSpans, read_examples
from fastaug.data.readers.webdataset import read_samples
from fastaug.data.storage import Spans
from fastaug.errors import DataError

log = logging.getLogger("fastaug")

DESCRIPTION = "a folder with shards (.tar, .tfrecord, .rec) in train/ and in val/ or test/"
LAYOUT: tuple[tuple[str, str], ...] = (
    (
        "WebDataset",
        "tar shards with `KEY.jpg` and `KEY.cls`, in `train/` and `val/` or `test/`, or named by "
        "split: `x-train-0000.tar`",
    ),
    (
        "TFRecord",
        "`image/encoded` and `image/class/label`, for example ImageNet's `train-00000-of-01024`; "
        "folders or names as above",
    ),
    (
        "RecordIO",
        "MXNet's `.rec`, for example `train.rec` and `val.rec`; folders or names as above",
    ),
)
_MAX_NAMES = 2**26  # bytes of classes.txt
_THREADS = 8  # indexing waits for the storage


@dataclass(frozen=True)
class Format:
    """A shard format."""

    name: str
    pattern: str
    """Regular expression for its file names, in lower case."""
    read: Callable[[Shard], Iterator[Record]]
    """Finds the label and the position of each image in a shard."""
    separator: bytes = b""
    """Bytes to insert between the parts of an image that is stored in several."""


FORMATS = (
    # Compressed tars match too, so that they get their own error message.
    Format("WebDataset (.tar)", r"\.(tar|tar\.\w+|tgz|tbz2?|txz)$", read_samples),
    Format("TFRecord", r"\.(tfrecords?|tfrec)(\.gz)?$|-\d+-of-\d+$", read_examples),
    Format("RecordIO (.rec)", r"\.rec$", read_records, MAGIC),
)


def matches(path: Path) -> bool:
    return path.is_dir() and bool(find_shards(path, "train"))


def has_test(root: Path) -> bool:
    return bool(find_shards(root, "test"))


def open_split(root: Path, split: Split, _config: DataConfig) -> ImageSet:
    shards, format = _shards(root, split)
    indexes = read_indexes(root, shards, format)
    labels = np.concatenate([index.label for index in indexes])
    # The training labels define the classes of both splits.
    train_shards, train_format = _shards(root, "train")
    train_indexes = indexes if split == "train" else read_indexes(root, train_shards, train_format)
    _check_range(train_shards, train_indexes)
    known = np.unique(np.concatenate([index.label for index in train_indexes]))
    name = f"{root} ({split})"
    places = np.searchsorted(known, labels).clip(max=len(known) - 1)
    unknown = np.unique(labels[known[places] != labels])
    if len(unknown):
        raise DataError(
            f"{name}: label {unknown[0]} and {len(unknown) - 1} others are not among the "
            f"{len(known)} training labels ({known[0]} to {known[-1]}); both splits must be of the "
            "same data set"
        )
    classes = _class_names(root, known)
    return ImageSet(name, classes, places, storage=spans_of(shards, indexes, format.separator))


def _check_range(shards: tuple[Path, ...], indexes: list[ShardIndex]) -> None:
    """Raise for a label that cannot number a class: -1 often means that there is none."""
    for shard, index in zip(shards, indexes, strict=True):
        (wrong,) = np.nonzero((index.label < 0) | (index.label >= MAX_CLASSES))
        if len(wrong):
            raise DataError(
                f"{shard}, image at byte {index.offset[wrong[0]]}: the label must be from 0 to "
                f"{MAX_CLASSES - 1:,}, got {index.label[wrong[0]]} ({len(wrong):,} such images in "
                "this shard); remove these images, or number their classes"
            )


def find_shards(root: Path, split: Split) -> tuple[Path, ...]:
    """The shards of a split, sorted by name; none if the split has class folders."""
    try:
        for name in SPLIT_WORDS[split]:
            folder = root / name
            if folder.is_dir():
                if any(e.is_dir() and not e.name.startswith(".") for e in folder.iterdir()):
                    return ()
                if found := _shards_in(folder):
                    return found
            if found := tuple(s for s in _shards_in(root) if split_word(s.name) == name):
                return found
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error
    return ()


def _shards_in(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(e for e in folder.iterdir() if _format_of(e) and not e.is_dir()))


def _format_of(file: Path) -> Format | None:
    if file.name.startswith("."):
        return None
    return next((f for f in FORMATS if re.search(f.pattern, file.name.lower())), None)


def _shards(root: Path, split: Split) -> tuple[tuple[Path, ...], Format]:
    """The shards of a split and their common format."""
    shards = find_shards(root, split)
    if not shards:
        words = " or ".join(SPLIT_WORDS[split])
        raise DataError(
            f"{root}: found no shards of the {split} split ({', '.join(f.name for f in FORMATS)}); "
            f"put them into a folder {words}, or put that word into their names"
        )
    formats = {format.name: (format, shard) for shard in shards if (format := _format_of(shard))}
    if len(formats) > 1:
        mixed = " and ".join(f"{shard.name} ({name})" for name, (_, shard) in formats.items())
        raise DataError(
            f"{shards[0].parent}: all shards of a split must have the same format, got {mixed}"
        )
    return shards, next(format for format, _ in formats.values())


def read_indexes(root: Path, shards: tuple[Path, ...], format: Format) -> list[ShardIndex]:
    """The index of each shard, from the cache or newly made."""
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            indexes = list(pool.map(load_index, shards))
            missing = [shard for shard, index in zip(shards, indexes, strict=True) if index is None]
            if missing:
                log.info("indexing %s shards of %s", f"{len(missing):,}", root)
            made = pool.map(lambda shard: make_index(shard, format.read), missing)
            return [next(made) if index is None else index for index in indexes]
        except BaseException:  # a bad shard or Ctrl-C: do not read the rest first
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _class_names(root: Path, labels: np.ndarray) -> tuple[str, ...]:
    file = root / "classes.txt"
    if not file.is_file():
        return tuple(map(str, labels))
    try:
        if (size := file.stat().st_size) > _MAX_NAMES:
            raise DataError(f"{file}: {size} bytes are too many for class names")
        names = tuple(line.strip() for line in file.read_text("utf-8").rstrip().split("\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as UTF-8 text ({error})") from error
    if len(names) != len(labels) or not all(names):
        raise DataError(
            f"{file}: must have one line for each of the {len(labels)} training classes, got "
            f"{len(names)} lines, {names.count('')} of them empty; fix or remove it"
        )
    return names


def spans_of(shards: tuple[Path, ...], indexes: list[ShardIndex], separator: bytes) -> Spans:
    counts = [len(index.label) for index in indexes]
    further: dict[int, list[tuple[int, int]]] = {}
    for first, index in zip(np.cumsum([0, *counts[:-1]]).tolist(), indexes, strict=True):
        for image, offset, size in index.continued.tolist():
            further.setdefault(first + image, []).append((offset, size))
    shard = np.repeat(np.arange(len(shards), dtype=np.int32), counts)
    offset = np.concatenate([index.offset for index in indexes])
    size = np.concatenate([index.size for index in indexes])
    if len(checked := np.concatenate([index.checked for index in indexes])):
        return RecordSpans(shards, shard, offset, size, record=checked)
    parts = {image: tuple(parts) for image, parts in further.items()}
    return Spans(shards, shard, offset, size, parts, separator)
