"""Held-out validation images, and smaller training sets.

Both depend only on the labels, so they are the same for every seed and on every machine.
"""

from __future__ import annotations

import math

import numpy as np

from fastaug.data.image_set import ImageSet
from fastaug.errors import ConfigError


def split_training(
    images: ImageSet, *, validation: float, train_images: int
) -> tuple[ImageSet, ImageSet | None]:
    """The images to train on, and the held-out ones or None.

    validation: share of each class to hold out, independent of train_images; 0: none.
    train_images: number of images to train on, taken evenly from all classes; 0: all.
    """
    if not (validation or train_images):
        return images, None
    out = held_out(images.labels, validation)
    rest = np.flatnonzero(~out)
    if train_images > len(rest):
        held = f" without the {int(out.sum()):,} that are held out" if validation else ""
        raise ConfigError(
            f"--train-images must be at most {len(rest):,}, the images of {images.name}{held}; "
            f"got {train_images:,}"
        )
    if train_images:
        rest = rest[_evenly(images.labels[rest], train_images)]
    counts, left = (
        np.bincount(labels, minlength=len(images.classes))
        for labels in (images.labels, images.labels[rest])
    )
    if len(missing := np.flatnonzero((counts > 0) & (left == 0))):
        raise ConfigError(
            f"--train-images {train_images:,} leaves no image of class "
            f"{images.classes[missing[0]]} to train on; give at least one image per class"
        )
    train = images.subset(rest, images.name)
    if not validation:
        return train, None
    if not out.any():
        raise ConfigError(
            f"--validation {validation:g} cannot hold out any image of {images.name}: every class "
            "has only 1 image"
        )
    return train, images.subset(np.flatnonzero(out), f"{images.name} (held out)")


def held_out(labels: np.ndarray, share: float) -> np.ndarray:
    """[N] bool: True for this share of each class, evenly spaced (0.1: every tenth image).

    The number is rounded to the nearest, ties down. It is at least 1, and at least 1 image of each
    class is not held out.
    """
    out = np.zeros(len(labels), bool)
    if share:
        for members in _by_class(labels):
            last = len(members) - 1
            count = min(max(1, math.ceil(len(members) * share - 0.5 - 1e-9)), last)
            places = np.floor(np.arange(1, count + 1) / share + 1e-9).astype(int) - 1
            out[members[np.minimum(places, last)]] = True  # rounded up: the last image
    return out


def _evenly(labels: np.ndarray, count: int) -> np.ndarray:
    """Indices of the first images of each class, `count` in all, spread evenly over the classes."""
    turn = np.zeros(len(labels), np.int64)
    for members in _by_class(labels):
        turn[members] = np.arange(len(members))
    return np.sort(np.lexsort((labels, turn))[:count])


def _by_class(labels: np.ndarray) -> list[np.ndarray]:
    """The indices of the images of each class that has any, ascending."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if len(labels) else []
