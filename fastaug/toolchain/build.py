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
from fastaug.runtime.atomic import atomic_write
from fastaug.runtime.cache import cache_dir

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

    The name must determine the content. Without a writable cache, the file is made in a temporary
    folder of this process.
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
            log.info("%s is compiled for this run only: %s", name, error)
            make(file)
        return file


@cache
def _own_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="fastaug-")
