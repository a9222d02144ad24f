"""One process at a time in a run folder: two would mix their files."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fastaug.errors import ConfigError

PATIENCE = 20.0
"""Seconds to wait for a process that still has the folder, as one that was just ended."""
_LOOK_AGAIN = 0.2


class FolderLock:
    """Holds a folder until it is released. The system does that, too, when the process and its
    loader's workers have ended in whatever way; workers notice the end of theirs within seconds.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.waited = False
        """Whether another process had it until just now: what was read before is old."""
        self._descriptor = os.open(folder, os.O_RDONLY)
        give_up = time.monotonic() + PATIENCE
        while not self._is_taken():
            if not self.waited:
                say(f"{folder}: another process trains in it; waiting for up to {PATIENCE:g} s")
            self.waited = True
            if time.monotonic() >= give_up:
                self.release()
                raise ConfigError(
                    f"{folder}: another process trains in it; end that one, or choose another --out"
                )
            time.sleep(_LOOK_AGAIN)

    def release(self) -> None:
        os.close(self._descriptor)

    def _is_taken(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system that knows no locks
            pass
        return True


def wait_until_free(folder: Path, say: Callable[[str], None]) -> None:
    """Until no other process trains in it: only then is its last checkpoint the last one."""
    with suppress(OSError):  # a folder that is not there, or may not be read: said soon enough
        FolderLock(folder, say).release()
