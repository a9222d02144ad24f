"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEMPORARY = ".*.tmp*"
"""What a process that was killed leaves of them, as a pattern of names."""


@contextmanager
def atomic_write(path: Path, suffix: str = "") -> Iterator[Path]:
    """A temporary file beside the path, to be written; it gets the path's name once it is on the
    disk, if nothing is raised: a reader finds the old file or the new one, never a half.

    suffix: of the temporary name, for writers that go by it. By default a search for *.pt does not
    find what is half written.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp{suffix}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: dict[str, Any], indent: int | None = 2) -> None:
    """Write a JSON file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")


def _sync_folder(folder: Path) -> None:
    """The new names in a folder, on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # network file systems without it
            raise
    finally:
        os.close(descriptor)
