"""Files in folders that may come from a stranger, such as a run folder.

Links are not followed, pipes and devices are not opened, and a file is read up to a limit. The
folder itself may be a link: the user has named it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastaug.errors import ConfigError

JSON_BYTES = 256 * 1024
"""Most bytes of a JSON file that is read at once: a config.json or summary.json has 2 to 4 KB."""

# Windows has none of these but O_BINARY.
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class BadFileError(OSError):
    """Something else than a regular file, or one that is too large. strerror is the reason."""


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. Raises BadFileError for anything else, without opening it."""
    try:
        _check_regular(path, os.lstat(path))
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    descriptor = os.open(path, flags | _SAFE, 0o666)
    try:
        _check_regular(path, os.fstat(descriptor))  # it may have been replaced since
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def create_file(path: Path) -> int:
    """A descriptor of a new, empty file, in place of one with its name."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o666)


def read_file(path: Path, at_most: int) -> bytes:
    """The content of a regular file. Raises BadFileError if it has more bytes."""
    with open(open_regular(path), "rb") as file:
        check_size(path, os.fstat(file.fileno()).st_size, at_most)
        content = file.read(at_most + 1)
    check_size(path, len(content), at_most)  # it may have grown since
    return content


def check_size(path: Path, size: int, at_most: int) -> None:
    if size > at_most:
        reason = f"{size:,} bytes are too many; at most {at_most:,} are read"
        raise BadFileError(errno.EFBIG, reason, str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises OSError or ValueError."""
    try:
        value = json.loads(read_file(path, JSON_BYTES).decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def read_lines(path: Path, *, most_bytes: int, line_bytes: int, most_lines: int) -> Iterator[bytes]:
    """The lines of a regular file, each with its end; a line that is too long is cut off there and
    has none. Raises BadFileError if the file has more bytes or lines."""
    with open(open_regular(path), "rb") as file:
        check_size(path, os.fstat(file.fileno()).st_size, most_bytes)
        for _ in range(most_lines):
            if not (line := file.readline(line_bytes)):
                return
            yield line
            while len(line) == line_bytes and not line.endswith(b"\n"):
                line = file.readline(line_bytes)  # the rest of the line
        if file.read(1):
            raise BadFileError(errno.EFBIG, f"more than {most_lines:,} lines", str(path))


def check_real_folder(path: Path) -> None:
    """Raise BadFileError for a link to a folder, and for anything else that is not a folder."""
    if not stat.S_ISDIR((status := os.lstat(path)).st_mode):
        raise BadFileError(errno.ENOTDIR, f"{kind_of(status)} in place of a folder", str(path))


def check_entries(
    folder: Path, *, files: Collection[str] = (), folders: Collection[str] = ()
) -> None:
    """Raise ConfigError if something in a folder is neither a file nor a folder, such as a link, or
    if one of the given names is the wrong one of the two. A missing folder is empty."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror})") from error
    for name in names:
        with suppress(FileNotFoundError):  # removed since
            _check_entry(folder / name, os.lstat(folder / name), name in files, name in folders)


def _check_entry(path: Path, status: os.stat_result, as_file: bool, as_folder: bool) -> None:
    if stat.S_ISREG(status.st_mode) and not as_folder:
        return
    if stat.S_ISDIR(status.st_mode) and not as_file:
        return
    wrong = f"{kind_of(status)} in place of a {'folder' if as_folder else 'file'}"
    if stat.S_ISLNK(status.st_mode):
        wrong = "a link, and links inside this folder are not followed"
    raise ConfigError(f"{path}: {wrong}; remove it, or replace it with a copy of what you need")


def kind_of(status: os.stat_result) -> str:
    """What a path leads to: "a file", "a link", "a pipe"."""
    return _KINDS.get(stat.S_IFMT(status.st_mode), "a file")


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        reason = f"{kind_of(status)} in place of a file"
        raise BadFileError(errno.EINVAL, reason, str(path))
