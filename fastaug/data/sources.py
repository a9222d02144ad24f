"""Data sources: opens what --data names with the first reader in READERS that recognizes it.

To add a format, write readers/NAME.py with the three names of `Reader` and list it in READERS.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from fastaug.data.image_set import ImageSet, Split
from fastaug.data.readers import cifar, folder, npz, shards
from fastaug.data.shapes import ensure_shapes
from fastaug.errors import DataError, few


class Reader(Protocol):
    """What a module in readers/ provides. A reader reports a wrong layout with its own message."""

    DESCRIPTION: str
    """The paths that it reads, for error messages."""

    def matches(self, path: Path) -> bool:
        """Whether this reader is the one for an existing path."""

    def open_split(self, path: Path, split: Split) -> ImageSet:
        """The training or the test images of the path."""


READERS: tuple[Reader, ...] = (cifar, shards, folder, npz)
"""Asked in this order; `folder` takes every folder."""


def open_source(data: str) -> tuple[ImageSet, ImageSet]:
    """Training and test images of --data; their classes must agree."""
    train, test = open_split(data, "train"), open_split(data, "test")
    check_classes(test, train.classes, train.name)
    return train, test


def check_classes(images: ImageSet, classes: tuple[str, ...], owner: str) -> None:
    """Raise unless the set has the owner's classes, in the same order."""
    if images.classes == classes:
        return
    extra = sorted(set(images.classes) - set(classes))
    missing = sorted(set(classes) - set(images.classes))
    parts = [f"only {images.name} has {few(extra)}"] if extra else []
    parts += [f"{images.name} lacks {few(missing)}"] if missing else []
    raise DataError(
        f"the classes of {owner} and {images.name} differ: {'; '.join(parts) or 'another order'}"
    )


def open_split(data: str, split: Split) -> ImageSet:
    """One split of --data."""
    if not data:
        raise DataError("this recipe has no default data: give --data PATH")
    path = ensure_shapes() if data == "shapes" else Path(data).expanduser()
    if not path.exists():
        raise DataError(f"--data {data}: no such file or folder (and not the built-in 'shapes')")
    reader = next((reader for reader in READERS if reader.matches(path)), None)
    if reader is None:
        known = "; ".join(reader.DESCRIPTION for reader in READERS)
        raise DataError(f"--data {data}: unknown format; give one of: {known}")
    images = reader.open_split(path, split)
    if len(images) == 0:
        raise DataError(f"{images.name}: no images")
    if len(images.classes) < 2:
        raise DataError(f"{images.name}: found 1 class ({images.classes[0]}), need at least 2")
    return images


def open_split_or_flat(data: str, split: Split) -> ImageSet:
    """One split; or, for commands that only show images, a folder of images without splits."""
    path = Path(data).expanduser()
    if next((reader for reader in READERS if reader.matches(path)), None) is folder:
        flat = folder.open_flat(path, split)
        if flat is not None:
            return flat
    return open_split(data, split)
