"""The arrays of an .npz, with every claim of size checked before memory is given to it.

np.load believes the header of an array (terabytes), the length of that header (4 GiB) and the zip,
and raises MemoryError or takes all there is.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from fastaug.errors import DataError, first_line
from fastaug.runtime.device import memory_bound

_MAX_HEADER = 10_000  # characters, as numpy allows
_STEP = 2**20
_KINDS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy writes


class NpzFile:
    """Arrays by name, read when they are asked for; together they have a third of the memory."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path, self._zip = path, archive
        self._left = memory_bound()
        entries = archive.infolist()
        self._entries = {entry.filename.removesuffix(".npy"): entry for entry in entries}
        if len(self._entries) < len(entries):
            raise self._wrong("two arrays have one name")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def read(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        if entry.compress_type not in _KINDS:
            raise self._wrong(f"{name} is packed in a way that numpy does not use")
        with self._zip.open(entry) as file:
            shape, by_columns, dtype = _header(file)
            if dtype.hasobject:
                raise self._wrong(f"{name} holds Python objects, which only a pickle could give")
            size = math.prod(shape) * dtype.itemsize
            if size != entry.file_size - file.tell():
                raise self._wrong(f"{name} claims {size} bytes, and the zip has another number")
            # Grey images become color ones.
            self._left -= size * (3 if len(shape) == 3 or shape[3:] == (1,) else 1)
            if self._left < 0:
                raise self._wrong(
                    f"with {name} of {size} bytes it takes over a third of the memory"
                )
            return _content(file, shape, by_columns, dtype)

    def _wrong(self, what: str) -> DataError:
        return DataError(f"{self._path}: not a readable .npz ({what})")


@contextmanager
def open_npz(path: Path) -> Iterator[NpzFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield NpzFile(path, archive)
    except DataError:
        raise
    except Exception as error:  # a damaged zip or header raises almost anything; MemoryError too
        reason = first_line(error)
        raise DataError(f"{path}: not a readable .npz ({reason})") from error


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether columns come first, and type. Python's own parser of literals reads it."""
    start = file.read(8)
    version = np.lib.format.read_magic(io.BytesIO(start))
    form = "<H" if version == (1, 0) else "<I"
    length = file.read(struct.calcsize(form))
    (size,) = struct.unpack(form, length)
    if size > _MAX_HEADER:
        raise ValueError(f"the header of an array has {size} characters")
    text = io.BytesIO(length + file.read(size))
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(text)
    return np.lib.format.read_array_header_2_0(text)


def _content(
    file: IO[bytes], shape: tuple[int, ...], by_columns: bool, dtype: np.dtype
) -> np.ndarray:
    """Filled as it comes: of what a zip only claims, no page is touched."""
    array = np.empty(math.prod(shape), dtype)
    content, place = memoryview(array.view(np.uint8).data) if array.size else memoryview(b""), 0
    while place < len(content):
        part = file.read(min(_STEP, len(content) - place))
        if not part:
            raise EOFError("it ends within an array")
        content[place : place + len(part)] = part
        place += len(part)
    if file.read(1):  # also has the zip compare its check sum
        raise ValueError("more than an array")
    return array.reshape(shape, order="F" if by_columns else "C")
