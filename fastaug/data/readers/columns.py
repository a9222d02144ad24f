"""Columns of tables: which one has the images, which one the labels, and the classes in it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fastaug.errors import DataError, few

IMAGE_COLUMNS = (
    *("path", "file", "filepath", "filename", "image", "imagepath", "imagefile", "imagename"),
    *("img", "imgpath", "imgname", "images", "relpath", "fname", "imageid", "imgid", "idcode"),
    *("id", "name"),
)
"""Usual names, the most specific ones first; compared without case, spaces and punctuation."""
LABEL_COLUMNS = (
    *("label", "labels", "class", "classname", "labelname", "category", "target", "classid"),
    *("labelid", "categoryid", "species", "breed", "classes", "y"),
)
SPLIT_COLUMNS = ("split", "subset", "set", "dataset", "partition", "phase", "usage")


def usual_column(names: Sequence[str], usual: Sequence[str]) -> int | None:
    """Index of the column whose name comes first among the usual ones."""
    plain = ["".join(filter(str.isalnum, name.lower())) for name in names]
    return next((plain.index(name) for name in usual if name in plain), None)


def named_column(names: Sequence[str], given: str, flag: str, owner: str) -> int:
    """Index of the column that a flag gives by its name or its number, which starts at 1."""
    if given in names:
        return names.index(given)
    if given.isdecimal() and 1 <= int(given) <= len(names):
        return int(given) - 1
    raise DataError(
        f"{flag} {given}: {owner} has no such column; give one of {few(names, 20)}, or its number "
        f"from 1 to {len(names)}"
    )


def sort_classes(names: Collection[str]) -> tuple[str, ...]:
    """Names in their order in the alphabet, or by value if all of them are whole numbers."""
    try:
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    except ValueError:
        return tuple(sorted(names))
