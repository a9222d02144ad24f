"""The folder that is packed into: whether it may be used, its lock, its text files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastaug.data.readers.packed_index import INDEX_FILES, JOURNAL
from fastaug.errors import ConfigError, DataError, printable
from fastaug.runtime.atomic import atomic_write
from fastaug.runtime.file_lock import open_folder, try_lock


def check_folder(source: str, root: Path) -> None:
    """Raise unless a folder is missing, empty, or was begun by fastaug.pack."""
    if root.exists() and not root.is_dir():
        raise ConfigError(f"OUT {root}: is a file; give a new or an empty folder")
    place = Path(source).expanduser()
    if place.is_dir() and root.resolve().is_relative_to(place.resolve()):
        raise ConfigError(f"OUT {root}: is inside SOURCE {source}; give a folder outside of it")
    own = {JOURNAL, *INDEX_FILES.values()}
    names = {name for name in os.listdir(root) if name[0] != "."} if root.is_dir() else set()
    if names and not names & own:
        raise ConfigError(
            f"OUT {root}: has other files ({min(names)}, ...); give a new or an empty folder"
        )


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Errors of the file system as one line; those of the source are DataErrors already."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(
            f"{root}: cannot be written ({reason}); fix that, and run the same command again"
        ) from error


@contextmanager
def locked(root: Path) -> Iterator[None]:
    descriptor = open_folder(root)
    try:
        if not try_lock(descriptor):
            raise ConfigError(f"OUT {root}: another fastaug.pack is writing it")
        yield
    finally:
        os.close(descriptor)


def write_lines(path: Path, lines: list[str]) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text("".join(f"{printable(line)}\n" for line in lines), encoding="utf-8")
