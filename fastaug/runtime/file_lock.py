"""Locks of files and folders between processes. They end with the process that holds them.

Without the module fcntl (Windows) and on file systems without locks, every lock is granted.
"""

from __future__ import annotations

import os
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:
    fcntl = None  # type: ignore[assignment]


def open_folder(folder: Path) -> int:
    """A descriptor of a folder, to lock it. os.close() releases the lock."""
    # Windows does not open folders.
    return os.open(folder if fcntl is not None else os.devnull, os.O_RDONLY)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file; False if another process holds a lock. shared: may be held by several."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def wait_for_lock(descriptor: int) -> None:
    """Lock an open file as soon as no other process holds a lock."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
