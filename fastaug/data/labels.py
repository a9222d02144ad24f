"""Labels as users give them: class names, or whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np

from fastaug.errors import DataError, few

_MAX_CLASSES = 2**20  # a label of 2**62 would need as many class names


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
    if count > _MAX_CLASSES:
        raise DataError(f"{owner}: {count:,} classes, at most {_MAX_CLASSES:,} are allowed")
    (wrong,) = np.nonzero((values < 0) | (values >= count))
    if len(wrong):
        raise DataError(
            f"{owner}: a label must be from 0 to {count - 1} ({count} classes), image {wrong[0]} "
            f"has {values[wrong[0]]}"
        )
    names = tuple(map(str, range(count))) if classes is None else tuple(classes)
    return names, values.astype(np.int64)


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
