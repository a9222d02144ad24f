"""The folder for files that fastaug can make again."""

from __future__ import annotations

import os
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
