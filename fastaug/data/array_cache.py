"""Arrays in cache files, written atomically."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from fastaug.runtime.atomic import atomic_write


def load_arrays(file: Path) -> dict[str, np.ndarray] | None:
    """The arrays that store_arrays wrote; None if the file is missing or damaged."""
    try:
        with file.open("rb") as content, np.load(content, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception:  # a damaged zip or header raises almost anything
        return None


def store_arrays(file: Path, **arrays: np.ndarray) -> None:
    """Write arrays to a file; does nothing if the folder cannot be written."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as unfinished, unfinished.open("wb") as out:
            np.savez(out, allow_pickle=False, **arrays)
