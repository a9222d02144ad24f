"""Arrays in the cache that are whole or not there."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from fastaug.runtime.atomic import atomic_write


def load_arrays(file: Path) -> dict[str, np.ndarray] | None:
    """What store_arrays wrote; None where there is nothing, or nothing whole."""
    try:
        with file.open("rb") as content, np.load(content, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception:  # a damaged zip or header raises almost anything; the arrays are made anew
        return None


def store_arrays(file: Path, **arrays: np.ndarray) -> None:
    """Keep arrays, all or none of them; a folder that cannot be written keeps none."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as unfinished, unfinished.open("wb") as out:
            np.savez(out, allow_pickle=False, **arrays)
