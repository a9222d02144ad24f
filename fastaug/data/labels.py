"""Labels as users give them: class names, or whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np

from fastaug.errors import DataError, few

MAX_CLASSES = 2**20
"""A label of 2**62 would need as many class names."""
_FEW_CLASSES = 100
"""A set with so many classes may lack most of them: it may be a small part of another one."""


def index_labels(
    labels: Sequence[Any] | np.ndarray, classes: Sequence[str] | None, owner: str
) -> tuple[tuple[str, ...], np.ndarray]:
    """The classes, and the labels as [N] int64 indices into them.

    classes: their names; None: the sorted labels, or "0", "1", ... up to the largest number.
    owner: what has the labels, for messages.
    """
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes or ()):
        raise DataError(f"{owner}: classes must be a list of names, got {str(classes)[:60]!r}")
    if classes is not None and len(set(classes)) < len(classes):
        raise DataError(f"{owner}: the same class name is given twice, of {few(classes, 20)}")
    given = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    kind = str if isinstance(given[0], str) else Integral
    for index, label in enumerate(given):
        if not isinstance(label, kind) or isinstance(label, bool):
            raise DataError(
                f"{owner}: labels must be whole numbers, or all of them class names (str); image "
                f"{index} has {str(label)[:40]!r} ({type(label).__name__})"
            )
    values = np.array(given)
    if kind is str:
        return _named(values, classes, owner)
    if values.dtype.kind not in "iu":
        raise DataError(f"{owner}: a label is too large: {max(map(abs, given))}")
    count = len(classes) if classes is not None else int(values.max()) + 1
    if count > MAX_CLASSES:
        raise DataError(f"{owner}: {count:,} classes, at most {MAX_CLASSES:,} are allowed")
    (wrong,) = np.nonzero((values < 0) | (values >= count))
    if len(wrong):
        raise DataError(
            f"{owner}: a label must be from 0 to {count - 1} ({count} classes), image {wrong[0]} "
            f"has {values[wrong[0]]}"
        )
    if classes is None:
        check_gaps(values, owner, "give `classes`")
    names = tuple(map(str, range(count))) if classes is None else tuple(classes)
    return names, values.astype(np.int64)


def check_gaps(labels: np.ndarray, owner: str, name_them: str) -> None:
    """Raise if most of many classes have no image: a single wrong label would make a network of
    thousands of classes.

    labels: [N] from 0. name_them: how the user names the classes, which allows any gap.
    """
    used = np.unique(labels)
    count = int(used.max(initial=0)) + 1
    if count > _FEW_CLASSES and count > 2 * len(used):
        raise DataError(
            f"{owner}: labels go up to {count - 1:,}, but only {len(used):,} of these {count:,} "
            f"classes have images; number them from 0 to {len(used) - 1:,} without gaps, or "
            f"{name_them}"
        )


def _named(
    values: np.ndarray, classes: Sequence[str] | None, owner: str
) -> tuple[tuple[str, ...], np.ndarray]:
    found, labels = np.unique(values, return_inverse=True)
    if classes is None:
        return tuple(found.tolist()), labels.astype(np.int64)
    place = {name: label for label, name in enumerate(classes)}
    if unknown := [name for name in found.tolist() if name not in place]:
        raise DataError(
            f"{owner}: labels {few(unknown)} are not among the classes, {few(classes, 20)}"
        )
    return tuple(classes), np.array([place[name] for name in found.tolist()], np.int64)[labels]
