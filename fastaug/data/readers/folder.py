"""Class folders: {train,val,test}/CLASS/**/*.jpg, the layout of ImageNet and torchvision."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fastaug.data.image_set import IMAGE_SUFFIXES, ImageSet, Split
from fastaug.errors import DataError

DESCRIPTION = "a folder with class folders in train/ and in val/ or test/"
_SPLITS = {"train": ("train",), "test": ("val", "valid", "validation", "test")}


def matches(path: Path) -> bool:
    return path.is_dir()


def open_split(root: Path, split: Split) -> ImageSet:
    folder = next((root / name for name in _SPLITS[split] if (root / name).is_dir()), None)
    if folder is None:
        wanted = " or ".join(f"{name}/" for name in _SPLITS[split])
        raise DataError(
            f"{root}: has no folder {wanted}; put class folders or shards (.tar, .tfrecord, .rec) "
            "into train/ and into val/ or test/"
        )
    # Hidden folders are those of tools, such as .ipynb_checkpoints.
    classes = sorted(e.name for e in folder.iterdir() if e.is_dir() and not e.name.startswith("."))
    if not classes:
        raise DataError(f"{folder}: has no class folders (one folder of images for each class)")
    files, labels = [], []
    for label, name in enumerate(classes):
        found = sorted(_images_below(folder / name))
        if not found:
            raise DataError(f"{folder / name}: has no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
        files += found
        labels += [label] * len(found)
    return ImageSet(str(folder), tuple(classes), np.array(labels, np.int64), tuple(files))


def open_flat(root: Path, split: Split) -> ImageSet | None:
    """The images directly in a folder, as one class; None if it has none, or has the split."""
    files = sorted(f for f in root.iterdir() if _is_image(f)) if root.is_dir() else []
    if not files or any((root / name).is_dir() for name in _SPLITS[split]):
        return None
    labels = np.zeros(len(files), np.int64)
    return ImageSet(str(root), (root.absolute().name,), labels, tuple(files))


def _images_below(folder: Path) -> Iterator[Path]:
    """The images at any depth, without those in hidden folders."""
    start = len(str(folder))
    for file in folder.rglob("*"):
        if _is_image(file) and f"{os.sep}." not in str(file)[start:]:
            yield file


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
