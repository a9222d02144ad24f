"""The kernel sources, and what is compiled of them: made once, kept in the cache."""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from fastaug.errors import FastaugError, KernelUnavailableError
from fastaug.runtime.atomic import atomic_write
from fastaug.runtime.cache import cache_dir

log = logging.getLogger("fastaug")


@cache
def source_folder() -> Path:
    """cuda/: installed, a folder of the package; in a source tree, the one beside it."""
    package = Path(__file__).parents[1]
    for folder in (package / "cuda", package.parent / "cuda"):
        if (folder / "objective.h").is_file():
            return folder
    raise KernelUnavailableError(
        f"kernel sources (cuda/objective.h) are neither in {package} nor beside it; "
        "install fastaug again"
    )


@cache
def enum_codes(header: str, enum: str) -> dict[str, int]:
    """Entries of an enum in cuda/ that numbers them from 0, by name."""
    text = re.sub(r"//.*", "", (source_folder() / header).read_text())
    found = re.search(rf"enum {enum} \{{([\w\s,]+)\}}", text)
    if found is None:
        raise KernelUnavailableError(f"cuda/{header} has no enum {enum}; install fastaug again")
    return {name: code for code, name in enumerate(re.findall(r"\w+", found[1]))}


def digest(files: Iterable[Path], *more: str) -> str:
    """Names the content of files and some words: another content is another name."""
    found = hashlib.sha256(repr(more).encode())
    for file in files:
        found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def built(name: str, make: Callable[[Path], None]) -> Path:
    """The file of this name in the cache; where there is none, make(path) writes it first.

    The name says all that decides the content. Without a cache that can be written, the file is
    made for this process alone.
    """
    try:
        file = cache_dir() / "kernels" / name
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as unfinished:
                make(unfinished)
        return file
    except (OSError, FastaugError) as error:
        if isinstance(error, KernelUnavailableError):
            raise
        file = Path(_own_folder().name) / name
        if not file.is_file():
            log.info("%s is compiled for this run alone: %s", name, error)
            make(file)
        return file


@cache
def _own_folder() -> tempfile.TemporaryDirectory:
    """Goes with the process."""
    return tempfile.TemporaryDirectory(prefix="fastaug-")
