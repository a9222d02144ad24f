"""Kernel sources in cuda/, and the cache of their compiled files."""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import torch

from fastaug.errors import FastaugError, KernelUnavailableError
from fastaug.runtime.cache import (
    cache_dir,
    cache_write,
    one_at_a_time,
    warn_unwritable,
    why_unwritable,
)

log = logging.getLogger("fastaug")

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
"""Dtypes of compiled kernels -> suffix of the kernel names on a GPU. Libraries for a CPU number
them in this order."""


@cache
def source_folder() -> Path:
    """cuda/: inside the installed package, or next to it in a source tree."""
    package = Path(__file__).parents[1]
    for folder in (package / "cuda", package.parent / "cuda"):
        if (folder / "objective.h").is_file():
            return folder
    raise KernelUnavailableError(
        f"kernel sources (cuda/objective.h) are neither in {package} nor next to it; "
        "reinstall fastaug"
    )


@cache
def enum_codes(header: str, enum: str) -> dict[str, int]:
    """Entries of an enum in cuda/, name -> number from 0."""
    text = re.sub(r"//.*", "", (source_folder() / header).read_text())
    found = re.search(rf"enum {enum} \{{([\w\s,]+)\}}", text)
    if found is None:
        raise KernelUnavailableError(f"cuda/{header} has no enum {enum}; reinstall fastaug")
    return {name: code for code, name in enumerate(re.findall(r"\w+", found[1]))}


@cache
def headers_of(source: str) -> tuple[str, ...]:
    """Names of the files in cuda/ that a source includes, directly or not."""
    found: dict[str, None] = {}
    unread = [source]
    while unread:
        text = (source_folder() / unread.pop()).read_text()
        new = [name for name in re.findall(r'#include "(.+?)"', text) if name not in found]
        found |= dict.fromkeys(new)
        unread += new
    return tuple(sorted(found))


def digest(files: Iterable[Path], *more: str) -> str:
    """A hash of files and strings."""
    found = hashlib.sha256(repr(more).encode())
    for file in files:
        found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def built(name: str, make: Callable[[Path], None]) -> Path:
    """The file of this name in the cache; if there is none, make(path) writes it.

    The name must determine the content. If the cache is full or cannot be written, the file is made
    in a temporary folder of this process.
    """
    folder = _cache_folder()
    if folder is None:
        return _own_file(name, make)
    file = folder / name
    if file.is_file():
        return file
    with one_at_a_time(folder):
        if file.is_file():
            return file
        if (unwritable := why_unwritable(folder)) is None:
            try:
                with cache_write(file) as unfinished:
                    make(unfinished)
                return file
            except (OSError, KernelUnavailableError) as error:
                # A compiler does not report in a reliable way that it had no room.
                unwritable = why_unwritable(folder)
                if unwritable is None and isinstance(error, OSError):
                    unwritable = error
                if unwritable is None:
                    raise _named(error) from error
    warn_unwritable(unwritable)
    return _own_file(name, make)


def _cache_folder() -> Path | None:
    try:
        return cache_dir() / "kernels"
    except FastaugError as error:
        log.info("kernels are compiled for this run only: %s", error)
        return None


def _own_file(name: str, make: Callable[[Path], None]) -> Path:
    """The file of this name in a temporary folder of this process."""
    try:
        file = Path(_own_folder().name) / name
        if not file.is_file():
            make(file)
        return file
    except (OSError, KernelUnavailableError) as error:
        raise _named(error) from error


def _named(error: Exception) -> KernelUnavailableError:
    """The reason why nothing was made: compilers need room for temporary files, too."""
    try:
        full = why_unwritable(Path(tempfile.gettempdir()))
    except OSError as reason:  # the search for a folder that can be written
        full = reason
    if full is not None:
        return KernelUnavailableError(
            f"cannot be compiled: the folder for temporary files cannot be written ({full}); free "
            "some space there, or set TMPDIR to another folder"
        )
    return KernelUnavailableError(str(error))


@cache
def _own_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="fastaug-")
