"""The folder for files that fastaug can make again.

No run fails because a file cannot be stored there: a kernel is compiled in a temporary folder
instead, and everything else is made again by the next run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from fastaug.errors import DataError
from fastaug.runtime.atomic import atomic_write
from fastaug.runtime.file_lock import open_folder, try_lock

log = logging.getLogger("fastaug")

ABANDONED_AFTER = 24 * 3600.0
"""Seconds after which a temporary file of another machine counts as abandoned. The longest writer,
a compiler, is stopped after 5 minutes."""
WAIT_FOR_OTHERS = 60.0
"""Seconds to wait for a file that another process makes. A kernel takes about 3."""
_PROBE = 1 << 20
"""Bytes; the largest kernel has 230 KB."""
_warned: set[Path] = set()
"""Cache folders that are known to be unwritable."""


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
def cache_write(file: Path) -> Iterator[Path]:
    """atomic_write for a file of the cache; makes its folder, and removes what killed processes
    have left there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(file.parent)
    with atomic_write(file, _owner()) as unfinished:
        yield unfinished


def unfinished_folder(folder: Path) -> Path:
    """A new folder next to `folder`, to be renamed once it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder.parent)
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp{_owner()}")
    unfinished.mkdir()
    return unfinished


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Lock a folder of the cache, so that processes which need the same file do not all make it.

    Without a lock after WAIT_FOR_OTHERS: the process that holds it may be suspended.
    """
    descriptor = None
    try:
        with suppress(OSError):  # a folder that cannot be made
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_folder(folder)
        give_up = time.monotonic() + WAIT_FOR_OTHERS
        while descriptor is not None and not try_lock(descriptor) and time.monotonic() < give_up:
            time.sleep(0.1)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def why_unwritable(folder: Path) -> OSError | None:
    """The error of writing a file as large as a kernel to a folder; quotas count, too."""
    probe = folder / f".probe.tmp{_owner()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(os.urandom(_PROBE))  # zeros would take no room on some file systems
    except OSError as error:
        return error
    finally:
        with suppress(OSError):
            probe.unlink()
    return None


@contextmanager
def optional_write() -> Iterator[None]:
    """The context writes a file that a run can do without: an OSError is logged, not raised."""
    try:
        yield
    except OSError as error:
        warn_unwritable(error)


def warn_unwritable(error: OSError) -> None:
    """Log once for each cache folder why it is not written."""
    folder = cache_dir()
    if folder not in _warned:
        _warned.add(folder)
        log.warning(
            "the cache %s cannot be written (%s): this run continues without storing files there; "
            "free some space, or set FASTAUG_CACHE to another folder",
            *(folder, error.strerror or error),
        )


# --- files of killed processes ---


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files and folders of processes that have ended, and any that are a day old.

    A process on another machine, which may share the folder, is not known to have ended.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") and ".tmp" in entry.name and _is_abandoned(entry):
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path)
                    else:
                        os.unlink(entry.path)


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    owner = re.search(r"\.tmp\.([0-9a-f]{16})-([0-9]+)$", entry.name)
    if owner is not None and owner[1] == _pid_namespace():
        return not _is_running(int(owner[2]))
    with suppress(OSError):
        return time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED_AFTER
    return False


def _owner() -> str:
    """End of a temporary name: the machine and the process that writes the file."""
    return f".{_pid_namespace()}-{os.getpid()}"


@cache
def _pid_namespace() -> str:
    """Identifies what process ids refer to: this boot of this machine, and this container."""
    facts = [os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        facts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _is_running(pid: int) -> bool:
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
