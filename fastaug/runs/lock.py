"""A lock on the run folder: two processes would mix their files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fastaug.errors import ConfigError
from fastaug.runtime.file_lock import open_folder, try_lock

PATIENCE = 20.0
"""Seconds to wait for a process that still holds the folder, such as one that is ending."""
_POLL_SECONDS = 0.2


class FolderLock:
    """Holds a folder until release(), or until the process and its loader workers have exited,
    killed or not; workers notice the exit of their process within seconds."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.waited = False
        """True if another process held it until just now: what was read before is out of date."""
        self._descriptor = open_folder(folder)
        give_up = time.monotonic() + PATIENCE
        while not try_lock(self._descriptor):
            if not self.waited:
                say(f"{folder}: in use by another training; waiting for up to {PATIENCE:g} s")
            self.waited = True
            if time.monotonic() >= give_up:
                self.release()
                raise ConfigError(
                    f"{folder}: in use by another training; stop that one, or choose another --out"
                )
            time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        os.close(self._descriptor)


def wait_until_free(folder: Path, say: Callable[[str], None]) -> None:
    """Wait until no other process trains in a folder: its last checkpoint may change until then."""
    with suppress(OSError):  # a missing or unreadable folder is reported soon enough
        FolderLock(folder, say).release()


def is_locked(folder: Path) -> bool:
    """True if a process trains in a folder, as far as this machine knows."""
    descriptor = open_folder(folder)
    try:
        return not try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)
