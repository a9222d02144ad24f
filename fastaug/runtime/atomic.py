"""Atomic file writes."""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

TEMPORARY = ".*.tmp*"
"""Glob pattern of the temporary files that a killed process leaves behind."""


@contextmanager
def atomic_write(path: Path, suffix: str = "") -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` once its content is on disk.

    If the context raises, `path` is unchanged: a reader finds the old file or the new one.
    suffix: end of the temporary name, for writers that depend on it. By default it is one that a
    search for *.pt does not find.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp{suffix}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: dict[str, Any], indent: int | None = 2) -> None:
    """Write a JSON file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")


def make_folder(path: Path) -> None:
    """Make a folder and its parents, as far as they are missing, and flush their names to disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with suppress(PermissionError):  # a parent that may be written and not read
            sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def sync(descriptor: int) -> None:
    """Flush a file or folder to disk, if its file system can."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # network file systems without it
            raise
