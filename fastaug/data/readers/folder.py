"""Class folders: {train,val,test}/CLASS/**/*.jpg, the layout of ImageNet and torchvision."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fastaug.data.config import DataConfig
from fastaug.data.image_set import IMAGE_SUFFIXES, ImageSet, Split
from fastaug.data.readers.folder_index import index_class_folders, is_image
from fastaug.data.readers.splits import SPLIT_WORDS
from fastaug.data.storage import Files
from fastaug.errors import DataError

DESCRIPTION = "a folder with class folders, or with class folders in train/ and in val/ or test/"
LAYOUT: tuple[tuple[str, str], ...] = (
    (
        "a folder with splits",
        "`train/CLASS/*.jpg` and `val/CLASS/*.jpg`; `valid`, `validation` or `test` instead of "
        "`val` (the first of them); jpg, png, bmp, webp, ppm, tif, gif",
    ),
    (
        "a folder without test images",
        "`CLASS/*.jpg`, or only `train/CLASS/*.jpg`: a tenth of each class is held out for testing "
        "(`--validation` sets the share)",
    ),
)


def matches(path: Path) -> bool:
    return path.is_dir()


def has_test(root: Path) -> bool:
    return _test_folder(root) is not None


def open_split(root: Path, split: Split, _config: DataConfig) -> ImageSet:
    folder = _test_folder(root) if split == "test" else _training_folder(root)
    assert folder is not None
    return open_class_folders(folder)


def open_class_folders(folder: Path) -> ImageSet:
    """The images in CLASS/**."""
    classes = sorted(visible_folders(folder))
    if not classes:
        raise DataError(
            f"{folder}: has no class folders (one folder of images for each class) and no shards "
            "(.tar, .tfrecord, .rec)"
        )
    index = index_class_folders(folder, classes)
    if not len(index.labels):
        kinds = ", ".join(sorted(IMAGE_SUFFIXES))
        raise DataError(f"{folder}: the class folders have no images ({kinds})")
    storage = Files(str(folder), index.names, index.ends, index.snapshot)
    return ImageSet(str(folder), tuple(classes), index.labels, storage)


def open_flat(root: Path) -> ImageSet | None:
    """The images directly in a folder, as one class; None if it has none, or has splits."""
    names = sorted(name for name in os.listdir(root) if is_image(name))
    splits = (*SPLIT_WORDS["train"], *SPLIT_WORDS["test"])
    if not names or any((root / name).is_dir() for name in splits):
        return None
    labels = np.zeros(len(names), np.int64)
    return ImageSet(str(root), (root.absolute().name,), labels, Files.of(names, root))


def _test_folder(root: Path) -> Path | None:
    return next((root / name for name in SPLIT_WORDS["test"] if (root / name).is_dir()), None)


def _training_folder(root: Path) -> Path:
    """train/, or the folder itself if it has no splits."""
    if (root / "train").is_dir():
        return root / "train"
    if (test := _test_folder(root)) is not None:
        raise DataError(
            f"{root}: has {test.name}/, but no train/; put class folders or shards (.tar, "
            ".tfrecord, .rec) into train/"
        )
    return root


def visible_folders(folder: Path) -> Iterator[str]:
    """Names of the folders in a folder. Hidden ones are those of tools: .ipynb_checkpoints."""
    with os.scandir(folder) as entries:
        yield from (e.name for e in entries if not e.name.startswith(".") and e.is_dir())
