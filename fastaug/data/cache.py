"""Where fastaug keeps what it can make again, and arrays in it that are whole or not there."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np

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


def load_arrays(file: Path) -> dict[str, np.ndarray] | None:
    """What store_arrays wrote; None where there is nothing, or nothing whole."""
    try:
        with file.open("rb") as content, np.load(content, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception:  # a damaged zip or header raises almost anything; the arrays are made anew
        return None


def store_arrays(file: Path, **arrays: np.ndarray) -> None:
    """Keep arrays, all or none of them; a folder that cannot be written keeps none."""
    unfinished = file.with_name(f".{file.name}-{uuid.uuid4().hex}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("wb") as out:
                np.savez(out, allow_pickle=False, **arrays)
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)
