"""Where fastaug keeps what it can make again, and files in it that are whole or not there."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastaug.errors import DataError


def cache_dir() -> Path:
    """$FASTAUG_CACHE, or fastaug in the user's cache folder."""
    try:
        if own := os.environ.get("FASTAUG_CACHE"):
            return Path(own).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastaug"
    except RuntimeError as error:
        raise DataError(
            f"no cache folder ({error}); set FASTAUG_CACHE to one that exists"
        ) from error


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Where to write: it takes the file's place when it is done. OSError where it cannot."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{uuid.uuid4().hex}-{file.name}")
    try:
        yield unfinished
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
