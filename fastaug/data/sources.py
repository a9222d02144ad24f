"""Data sources: opens what --data names with the first reader in READERS that recognizes it.

To add a format, write readers/NAME.py with the names of `Reader` and list it in READERS.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet, Split
from fastaug.data.readers import cifar, folder, hugging_face, imagenet, npz, packed, shards, table
from fastaug.data.readers.imagenet_labels import WNID
from fastaug.data.readers.remote import RemoteReader
from fastaug.data.shapes import ensure_shapes
from fastaug.data.split import split_training
from fastaug.errors import DataError, few
from fastaug.urls import is_url, parse_url

log = logging.getLogger("fastaug")

TEST_SHARE = 0.1
"""Share of each class that becomes the test set of data without one, unless --validation is set."""


class Reader(Protocol):
    """What a module in readers/ provides. A reader reports a wrong layout with its own message."""

    DESCRIPTION: str
    """The paths that it reads, for error messages."""
    LAYOUT: tuple[tuple[str, str], ...]
    """What --data is, and what is in it: the rows of the table in docs/guide/data.md."""

    def matches(self, path: Path, /) -> bool:
        """Whether this reader is the one for an existing path."""

    def has_test(self, path: Path, /) -> bool:
        """Whether there are test images; else some are held out of the training images."""

    def open_split(self, path: Path, split: Split, config: DataConfig, /) -> ImageSet:
        """The training or the test images of the path. Test images may lack some classes."""


READERS: tuple[Reader, ...] = (
    cifar,
    imagenet,
    packed,
    shards,
    hugging_face,
    table,
    folder,
    npz,
)
"""Asked in this order: special folders before general ones. `folder` takes every folder."""


class DataSource:
    """The image sets that --data and the other settings of the data name."""

    def __init__(self, config: DataConfig, *, random_access: bool = True) -> None:
        """random_access: False if all images are read once and in order."""
        self._config = config
        self._random_access = random_access
        self._path = _existing_path(config.data)
        self._reader = _reader_of(self._path, config.data)

    @cached_property
    def has_test(self) -> bool:
        """Whether the test images are the data's own, rather than held-out training images."""
        return self._reader.has_test(self._path)

    def training(self) -> tuple[ImageSet, ImageSet | None]:
        """The images to train on, and those that --validation holds out of them, or None."""
        validation, images = self._config.validation, self.train
        if not self.has_test:
            validation, images = 0, self._held_out[0]
        return split_training(images, validation=validation, train_images=self._config.train_images)

    def test(self) -> ImageSet:
        """The test images, with their own classes: the data's own, or held-out training images."""
        return self._open("test") if self.has_test else self._held_out[1]

    @cached_property
    def train(self) -> ImageSet:
        """All training images."""
        images = self._open("train")
        if len(images.classes) < 2:
            raise DataError(f"{images.name}: found 1 class ({images.classes[0]}), need at least 2")
        return images

    @cached_property
    def _held_out(self) -> tuple[ImageSet, ImageSet]:
        """Training and test images of data without a test split."""
        images, share = self.train, self._config.validation or TEST_SHARE
        train, test = split_training(images, validation=share, train_images=0)
        assert test is not None
        log.info(
            "%s has no test split: %s of its %s images, %.3g%% of each class, are held out as one "
            "(--validation sets the share)",
            images.name,
            f"{len(test):,}",
            f"{len(images):,}",
            100 * share,
        )
        return train, test

    def _open(self, split: Split) -> ImageSet:
        images = self._reader.open_split(self._path, split, self._config)
        if len(images) == 0:
            raise DataError(f"{images.name}: no images")
        counts = np.bincount(images.labels, minlength=len(images.classes))
        if split == "train" and not counts.all():
            empty = [images.classes[label] for label in np.flatnonzero(counts == 0)]
            log.warning("%s: no images of %s", images.name, few(empty))
        if images.storage is None or not self._random_access:
            return images
        return replace(images, storage=images.storage.for_random_access())


def align_classes(images: ImageSet, classes: tuple[str, ...], owner: str) -> ImageSet:
    """The set with labels that are indices into the owner's classes; it may lack some of them."""
    if images.classes == classes:
        return images
    place = {_class_id(name): label for label, name in enumerate(classes)}
    if unknown := [name for name in images.classes if _class_id(name) not in place]:
        raise DataError(
            f"{images.name}: has images of {few(unknown)}, which {owner} does not know; its "
            f"{len(classes):,} classes are {few(classes)}"
        )
    labels = np.array([place[_class_id(name)] for name in images.classes], np.int64)
    return replace(images, classes=classes, labels=labels[images.labels])


def _class_id(name: str) -> str:
    """The name, or what identifies one of ImageNet's classes: "n01440764 tench" is "n01440764",
    the name of its folder."""
    wnid, _, _words = name.partition(" ")
    return wnid if WNID.fullmatch(wnid) else name


def open_flat(config: DataConfig) -> ImageSet | None:
    """The images of a folder without classes, for commands that only show images; None if --data is
    a data set."""
    path = _existing_path(config.data)
    return folder.open_flat(path) if _reader_of(path, config.data) is folder else None


def _existing_path(data: str) -> Path:
    if not data:
        raise DataError("this recipe has no default data: give --data PATH")
    if is_url(data):
        return Path(data)  # only a name: RemoteReader has the URL
    path = ensure_shapes() if data == "shapes" else Path(data).expanduser()
    if not path.exists():
        raise DataError(f"--data {data}: no such file or folder (and not the built-in 'shapes')")
    return path


def _reader_of(path: Path, data: str) -> Reader:
    if is_url(data):
        return RemoteReader(parse_url(data))
    reader = next((reader for reader in READERS if reader.matches(path)), None)
    if reader is None:
        known = "; ".join([*(r.DESCRIPTION for r in READERS), RemoteReader.DESCRIPTION])
        raise DataError(f"--data {data}: unknown format; give one of: {known}")
    return reader
