"""Data sources: what --data names, as two image sets. Each wrong layout has its own message."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from fastaug.data.image_set import ImageSet
from fastaug.data.readers.cifar import ARCHIVES, cifar_folder, read_cifar, read_cifar_tar
from fastaug.data.readers.npz import NpzFile, open_npz
from fastaug.data.readers.shards import find_shards, open_shards
from fastaug.data.readers.webdataset import IMAGE_SUFFIXES
from fastaug.data.shapes import ensure_shapes
from fastaug.data.split import held_out
from fastaug.errors import DataError, few

Split = Literal["train", "test"]

_FOLDERS = {"train": ("train",), "test": ("val", "test")}
_ARRAYS = {
    "train": (("train_images", "train_labels"), ("x_train", "y_train"), ("images", "labels")),
    "test": (
        ("test_images", "test_labels"),
        ("x_test", "y_test"),
        ("val_images", "val_labels"),
    ),
}
_MAX_CLASSES = 2**20
"""Of an .npz: a label of 2**62 would take as many names."""
_HELD_OUT = 0.1
"""Of each class: the test set of an .npz that has none."""


def open_source(data: str) -> tuple[ImageSet, ImageSet]:
    """The training and the test images of --data, checked against each other."""
    train, test = open_split(data, "train"), open_split(data, "test")
    check_classes(test, train.classes, train.name)
    return train, test


def check_classes(images: ImageSet, classes: tuple[str, ...], owner: str) -> None:
    """Refuse a set whose classes are not those of the owner, by name and by order."""
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
        raise DataError("this recipe has no data of its own: give --data PATH")
    if data == "shapes":
        return _open_folder(ensure_shapes(), split)
    path = Path(data).expanduser()
    if not path.exists():
        raise DataError(f"--data {data}: no such file or folder (and not the built-in 'shapes')")
    if path.is_dir():
        if found := cifar_folder(path):
            images = read_cifar(found, split)
        elif find_shards(path, "train"):
            images = open_shards(path, split)
        else:
            images = _open_folder(path, split)
    elif path.suffix == ".npz":
        images = _open_npz(path, split)
    elif path.name.endswith((".tar.gz", ".tgz", ".tar")):
        images = read_cifar_tar(path, split)
    else:
        raise DataError(
            f"--data {data}: not a kind of data that is known; give a folder of class folders "
            f"or of shards, CIFAR's {' or '.join(ARCHIVES)}, or an .npz"
        )
    if len(images) == 0:
        raise DataError(f"{images.name}: no images")
    if len(images.classes) < 2:
        raise DataError(f"{images.name}: only one class ({images.classes[0]}); two are the least")
    return images


def open_split_or_flat(data: str, split: Split) -> ImageSet:
    """One split; or, to look at, all images right in a folder that has no splits: one class."""
    root = Path(data).expanduser()
    files = sorted(f for f in root.iterdir() if _is_image(f)) if root.is_dir() else []
    if not files or any((root / name).is_dir() for name in _FOLDERS[split]):
        return open_split(data, split)
    labels = np.zeros(len(files), np.int64)
    return ImageSet(str(root), (root.absolute().name,), labels, tuple(files))


def _open_folder(root: Path, split: Split) -> ImageSet:
    folder = next((root / name for name in _FOLDERS[split] if (root / name).is_dir()), None)
    if folder is None:
        wanted = " or ".join(f"{name}/" for name in _FOLDERS[split])
        raise DataError(
            f"{root}: no folder {wanted} in it; class folders or shards (.tar, .tfrecord, .rec) "
            "go into train/ and into val/ or test/"
        )
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not classes:
        raise DataError(f"{folder}: no class folders in it (one folder for each class of images)")
    files, labels = [], []
    for label, name in enumerate(classes):
        found = sorted(f for f in (folder / name).rglob("*") if _is_image(f))
        if not found:
            raise DataError(
                f"{folder / name}: no images in it ({', '.join(sorted(IMAGE_SUFFIXES))})"
            )
        files += found
        labels += [label] * len(found)
    return ImageSet(str(folder), tuple(classes), np.array(labels, np.int64), tuple(files))


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")


def _open_npz(path: Path, split: Split) -> ImageSet:
    with open_npz(path) as file:
        image_name, label_name, has_no_test = _npz_names(path, file, split)
        images, labels = file.read(image_name), file.read(label_name)
        # The training labels number the classes, for both splits alike.
        numbers = file.read(_npz_names(path, file, "train")[1])
        names = file.read("classes") if "classes" in file else None
    is_whole = np.issubdtype(numbers.dtype, np.integer)
    highest = int(numbers.max(initial=0)) if is_whole else 0
    count = highest + 1 if names is None else names.size
    if count > _MAX_CLASSES or (names is not None and names.ndim != 1):
        raise DataError(f"{path}: {count} classes; {_MAX_CLASSES} in one row are the most")
    if images.ndim == 3 or (images.ndim == 4 and images.shape[-1] == 1):
        images = np.repeat(images.reshape(*images.shape[:3], 1), 3, axis=-1)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or _is_flat(images):
        raise DataError(
            f"{path}: images must be uint8 of shape [N, H, W, 3] or [N, H, W], "
            f"got {images.dtype} of shape {list(images.shape)}"
        )
    labels = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"{path}: labels must be integers of shape [{len(images)}], one for each image, "
            f"got {labels.dtype} of shape {list(labels.shape)}"
        )
    labels = labels.astype(np.int64)
    classes = tuple(str(i) for i in range(highest + 1)) if names is None else tuple(map(str, names))
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        raise DataError(
            f"{path}: {split} labels must be 0 to {len(classes) - 1}, as in training; "
            f"got {labels.min()} to {labels.max()}"
        )
    if has_no_test:
        keep = held_out(labels, _HELD_OUT) == (split == "test")
        images, labels = images[keep], labels[keep]
    return ImageSet(f"{path} ({split})", classes, labels, array=images)


def _is_flat(images: np.ndarray) -> bool:
    """[N, H, W, 3] whose images have no pixel."""
    return len(images) > 0 and images.size == 0


def _npz_names(path: Path, file: NpzFile, split: Split) -> tuple[str, str, bool]:
    """Names of images and labels, and whether the test set must be held out of them."""
    for images, labels in _ARRAYS[split]:
        if images in file and labels in file:
            alone = not any(name in file for name, _ in _ARRAYS["test"])
            return images, labels, alone
    if split == "test":
        return _npz_names(path, file, "train")
    takes = ", ".join("/".join(pair) for side in _ARRAYS.values() for pair in side)
    raise DataError(
        f"{path}: no arrays of images and labels; it has {few(file.names)} and needs one of {takes}"
    )
