"""Names of splits, in the names of files and folders."""

from __future__ import annotations

import re

from fastaug.data.image_set import Split

SPLIT_WORDS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "test": ("val", "valid", "validation", "test"),
}
"""The first one that exists. "test" comes last: ImageNet's has no labels."""
_WORDS = "|".join(word for words in SPLIT_WORDS.values() for word in words)


def split_word(name: str) -> str | None:
    """The first word of a name that is a split, else the split that the name starts with:
    x-train-00, val2."""
    name = name.lower()
    found = re.search(rf"(?<![^-_. ])({_WORDS})(?![^-_. ])", name) or re.match(_WORDS, name)
    return found[0] if found else None
