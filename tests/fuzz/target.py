"""What a fuzz target is. Nothing here needs atheris: inputs are replayed without it, too."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
# Before any target imports fastaug.
sys.path[:0] = [str(SOURCES.parent / "helpers"), str(SOURCES.parents[1])]
os.environ.setdefault("OMP_NUM_THREADS", "1")


@dataclass(frozen=True)
class Target:
    """A reader of files that may come from anyone."""

    read: Callable[[bytes, Path], object]
    """Reads an input, with an empty folder for its files. It may return, or raise FastaugError."""
    seeds: Callable[[Path], Sequence[bytes]]
    """Valid inputs, from which mutation starts; made in an empty folder."""
    max_len: int = 4096
    """Bytes of an input."""
    slow: bool = False
    """An input takes tens of milliseconds."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder in memory, where there is one: a target writes several files for each input."""
    memory = "/dev/shm" if "TMPDIR" not in os.environ and os.path.isdir("/dev/shm") else None
    folder = tempfile.mkdtemp(prefix="fastaug-fuzz-", dir=memory)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replay(target: Target, content: bytes) -> None:
    """Read one input as the fuzzer does."""
    from fastaug.errors import FastaugError

    with scratch_folder() as folder, suppress(FastaugError):
        target.read(content, folder)


_times = itertools.count(10**18, 10**9)


def write(file: Path, content: bytes) -> Path:
    """Write a file with a modification time of its own, so that no cached index is taken for it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    now = next(_times)
    os.utime(file, ns=(now, now))
    return file


def join(*parts: bytes) -> bytes:
    """Several files as one input: each after its length, the last one without."""
    return b"".join(len(part).to_bytes(2, "little") + part for part in parts[:-1]) + parts[-1]


def split(content: bytes, count: int) -> list[bytes]:
    """The files in an input. Any bytes are valid: a length may reach beyond the end."""
    parts = []
    for _ in range(count - 1):
        end = 2 + int.from_bytes(content[:2], "little")
        parts.append(content[2:end])
        content = content[end:]
    return [*parts, content]
