"""ImageNet (ILSVRC 2012) as it is distributed: Kaggle's folders, or the original tars.

The training images are class folders, or a tar of one tar for each class. The validation images are
in one folder or tar without classes; their labels are in a file (imagenet_labels.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet, Split
from fastaug.data.readers.folder import open_class_folders
from fastaug.data.readers.folder_index import is_image
from fastaug.data.readers.imagenet_labels import (
    DEVKIT,
    MAPPING,
    SOLUTION,
    WNID,
    image_number,
    read_class_names,
    read_labels,
)
from fastaug.data.readers.shard_file import Record, Shard
from fastaug.data.readers.shards import Format, read_indexes, spans_of
from fastaug.data.readers.tar_members import Member, tar_members
from fastaug.data.storage import Files, Storage
from fastaug.errors import DataError, few

log = logging.getLogger("fastaug")

_TRAIN_TAR, _VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DESCRIPTION = (
    f"ImageNet as downloaded: a folder with Kaggle's ILSVRC/, or with {_TRAIN_TAR} and {_VAL_TAR}"
)
LAYOUT: tuple[tuple[str, str], ...] = (
    (
        "ImageNet from Kaggle",
        f"the folder with `ILSVRC/` (or `ILSVRC/` or `Data/CLS-LOC` in it): `train/WNID/*.JPEG`, "
        f"flat `val/*.JPEG` with `{SOLUTION}`; `{MAPPING}` gives class names",
    ),
    (
        "ImageNet with a flat `val/`",
        f"`train/WNID/*.JPEG`, `val/ILSVRC2012_val_*.JPEG`, and next to them or to their folder "
        f"`{DEVKIT}` (folder or `.tar.gz`)",
    ),
    (
        "ImageNet's tars",
        f"`{_TRAIN_TAR}` (or `train/WNID.tar`, unpacked once), `{_VAL_TAR}`, and `{DEVKIT}` "
        "(folder or `.tar.gz`)",
    ),
)
_KAGGLE = "Data/CLS-LOC"
_THREADS = 8  # indexing waits for the storage


def matches(path: Path) -> bool:
    try:
        return path.is_dir() and _find_folder(path) is not None
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error


def has_test(path: Path) -> bool:
    folder = _folder(path)
    return (folder / "val").is_dir() or (folder / _VAL_TAR).is_file()


def open_split(path: Path, split: Split, _config: DataConfig) -> ImageSet:
    folder = _folder(path)
    images = _open_train(folder) if split == "train" else _open_val(folder)
    names = read_class_names(_label_folders(folder))
    return replace(images, classes=tuple(names.get(wnid, wnid) for wnid in images.classes))


def _find_folder(path: Path) -> Path | None:
    """The folder of the training and validation images; None if this is not ImageNet."""
    for below in (f"ILSVRC/{_KAGGLE}", _KAGGLE):
        if (path / below).is_dir():
            return path / below
    is_known = (
        path.resolve().match(_KAGGLE)
        or (path / _TRAIN_TAR).is_file()
        or _is_flat_val(path / "val")
        or _class_tars(path / "train")
    )
    return path if is_known else None


def _folder(path: Path) -> Path:
    folder = _find_folder(path)
    assert folder is not None
    return folder


def _label_folders(folder: Path) -> list[Path]:
    """Where labels and names of classes are looked for: up to the root of Kaggle's download."""
    place = folder.resolve()
    return [place, *place.parents[: 3 if place.match(_KAGGLE) else 1]]


def _is_flat_val(folder: Path) -> bool:
    """Whether there are validation images outside of class folders."""
    if not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        return any(image_number(entry.name) is not None for entry in entries)


def _class_tars(folder: Path) -> tuple[Path, ...]:
    """The tar of each class, unless there are class folders."""
    if not folder.is_dir():
        return ()
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if WNID.match(entry.name)]
    if any(entry.is_dir() for entry in found):
        return ()
    return tuple(folder / name for name in sorted(e.name for e in found) if _is_class_tar(name))


def _is_class_tar(name: str) -> bool:
    return WNID.fullmatch(name.removesuffix(".tar")) is not None and name.endswith(".tar")


# --- splits ---


def _open_train(folder: Path) -> ImageSet:
    tars, tar = _class_tars(folder / "train"), folder / _TRAIN_TAR
    if tars:
        return _training_set(folder / "train", *_index(tars, _read_class_tar))
    if (folder / "train").is_dir():
        return open_class_folders(folder / "train")
    if not tar.is_file():
        raise DataError(f"{folder}: has neither train/ nor {_TRAIN_TAR}")
    return _training_set(tar, *_index((tar,), _read_training_tar))


def _training_set(place: Path, numbers: np.ndarray, storage: Storage) -> ImageSet:
    """numbers: [N], of each image's class in WordNet."""
    known, labels = np.unique(numbers, return_inverse=True)
    return ImageSet(str(place), tuple(f"n{number:08}" for number in known), labels, storage)


def _open_val(folder: Path) -> ImageSet:
    val = folder / "val"
    if not val.is_dir():
        tar = folder / _VAL_TAR
        return _label(folder, tar, *_index((tar,), _read_validation_tar))
    if not _is_flat_val(val):
        return open_class_folders(val)
    names = sorted(name for name in os.listdir(val) if is_image(name))
    found = [image_number(name) for name in names]
    if None in found:
        odd = [name for name, number in zip(names, found, strict=True) if number is None]
        raise DataError(f"{val}: {few(odd)} must be named like ILSVRC2012_val_00000001.JPEG")
    return _label(folder, val, np.array(found, np.int64), Files.of(names, val))


def _label(folder: Path, place: Path, numbers: np.ndarray, storage: Storage) -> ImageSet:
    """The validation images with their labels."""
    labels = read_labels(_label_folders(folder), place)
    if unknown := [number for number in numbers.tolist() if number not in labels.wnid]:
        named = few(unknown, show=lambda number: f"ILSVRC2012_val_{number:08}.JPEG")
        raise DataError(f"{place}: {labels.place} has no label of {named}")
    if len(numbers) < len(labels.wnid):
        log.warning(
            "%s: has only %s of the %s images that %s lists",
            *(place, f"{len(numbers):,}", f"{len(labels.wnid):,}", labels.place),
        )
    wnids = np.array([labels.wnid[number] for number in numbers.tolist()])
    known, places = np.unique(wnids, return_inverse=True)
    return ImageSet(str(place), tuple(known.tolist()), places, storage)


# --- tars ---


def _index(
    tars: tuple[Path, ...], read: Callable[[Shard], Iterator[Record]]
) -> tuple[np.ndarray, Storage]:
    """The number that `read` has for each image, and where the images are."""
    format = Format("ImageNet", "", read)
    indexes = read_indexes(tars[0].parent, tars, format)
    numbers = np.concatenate([index.label for index in indexes])
    return numbers, spans_of(tars, indexes, format.separator)


def _read_training_tar(shard: Shard) -> Iterator[Record]:
    """Each image with the number of its class in WordNet. A member nNUMBER.tar has those of one
    class; it is contiguous, so its images are byte ranges of this tar."""
    inner = list(tar_members(shard))
    for member in inner:
        if not _is_class_tar(member.name):
            raise shard.invalid(member.offset, f"{member.name!r} is not the tar of a class")

    def read_class(member: Member) -> list[Record]:
        with Shard(shard.path) as own:  # the position of a Shard is not shared by threads
            images = _images_in(own, tar_members(own, member.offset, member.size))
            number = int(member.key[1:])
            return [Record(number, ((image.offset, image.size),)) for image in images]

    pool = ThreadPoolExecutor(_THREADS)
    try:
        for records in pool.map(read_class, inner):
            yield from records
    finally:  # a damaged tar or Ctrl-C: do not read the rest first
        pool.shutdown(cancel_futures=True)


def _read_class_tar(shard: Shard) -> Iterator[Record]:
    """Each image with the number in the name of the tar, nNUMBER.tar."""
    for image in _images_in(shard, tar_members(shard)):
        yield Record(int(shard.path.stem[1:]), ((image.offset, image.size),))


def _read_validation_tar(shard: Shard) -> Iterator[Record]:
    """Each image with the number in its name."""
    for image in _images_in(shard, tar_members(shard)):
        number = image_number(image.name.rpartition("/")[2])
        if number is None:
            raise shard.invalid(
                image.offset, f"{image.name!r} must be named like ILSVRC2012_val_00000001.JPEG"
            )
        yield Record(number, ((image.offset, image.size),))


def _images_in(shard: Shard, members: Iterator[Member]) -> Iterator[Member]:
    seen: set[str] = set()
    for member in members:
        if not is_image(member.name.rpartition("/")[2]):
            raise shard.invalid(member.offset, f"{member.name!r} is not an image")
        if member.name in seen:
            raise shard.invalid(member.offset, f"{member.name!r} is in the tar twice")
        seen.add(member.name)
        yield member
