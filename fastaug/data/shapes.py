"""The built-in data set: ten classes of drawn shapes, 2,500 JPEG files, made on first use."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fastaug.data.shapes_drawing import OUTLINES, draw_picture
from fastaug.errors import DataError
from fastaug.runtime.cache import cache_dir, one_at_a_time, unfinished_folder

VERSION = 2
"""Part of the folder's name and of every seed; increase it when the drawing changes."""

CLASSES = tuple(sorted(OUTLINES))
IMAGES_PER_CLASS = {"train": 200, "test": 50}
LAYOUT = (
    "`shapes`",
    "the built-in set: ten classes of drawn shapes, 2,000 training and 500 test JPEGs of 64 px, "
    "made on first use",
)
"""Its row of the table in docs/guide/data.md."""


def ensure_shapes(cache: Path | None = None) -> Path:
    """The folder with {train,test}/<class>/NNNN.jpg; makes it (about 7 s) if it is missing."""
    root = (cache or cache_dir()) / f"shapes-v{VERSION}"
    try:
        if not root.is_dir():
            with one_at_a_time(root.parent):
                _make_atomically(root, IMAGES_PER_CLASS)
    except OSError as error:
        raise DataError(
            f"cannot write the built-in data set to {root} ({error.strerror or error}); "
            "free some space there, or set FASTAUG_CACHE to another folder"
        ) from error
    return root


def _make_atomically(root: Path, images_per_class: Mapping[str, int]) -> None:
    """Write to a temporary folder and rename it, so that `root` is complete if it exists."""
    if root.is_dir():  # made while this process waited
        return
    count = len(CLASSES) * sum(images_per_class.values())
    unfinished = unfinished_folder(root)
    try:
        print(f"fastaug: making the built-in data set, {count} images in {root}", file=sys.stderr)
        _write_images(unfinished, images_per_class)
        unfinished.rename(root)
    except OSError:
        # Another process was faster: its set is the same, byte for byte.
        if not root.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_images(root: Path, images_per_class: Mapping[str, int]) -> None:
    for split, count in images_per_class.items():
        for shape in CLASSES:
            folder = root / split / shape
            folder.mkdir(parents=True)
            for number in range(count):
                picture = draw_picture(shape, picture_rng(split, shape, number))
                picture.save(folder / f"{number:04d}.jpg", quality=90)


def picture_rng(split: str, shape: str, number: int) -> np.random.Generator:
    """A generator that depends only on the picture's name, not on those drawn before it."""
    return np.random.default_rng(
        [VERSION, list(IMAGES_PER_CLASS).index(split), CLASSES.index(shape), number]
    )
