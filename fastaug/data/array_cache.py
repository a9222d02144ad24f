"""Arrays in cache files, written atomically: an .npz, or a file to be memory-mapped."""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastaug.runtime.cache import cache_write, optional_write

_ALIGNMENT = 64
_CHUNK = 1 << 22
_MAX_HEADER = 1 << 16


def load_arrays(file: Path) -> dict[str, np.ndarray] | None:
    """The arrays that store_arrays wrote; None if the file is missing or damaged."""
    try:
        with file.open("rb") as content, np.load(content, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception:  # a damaged zip or header raises almost anything
        return None


def store_arrays(file: Path, **arrays: np.ndarray) -> None:
    """Write arrays to a file; does nothing if the folder cannot be written."""
    with optional_write(), cache_write(file) as unfinished, unfinished.open("wb") as out:
        np.savez(out, allow_pickle=False, **arrays)


class MappedArrays(NamedTuple):
    """The content of a file that store_mapped wrote."""

    about: dict[str, Any]
    arrays: dict[str, np.ndarray]
    """Read-only. Processes that map the same file share its memory."""


def map_arrays(file: Path, about: str) -> MappedArrays | None:
    """The arrays of a file; None if it is missing, damaged, or about something else."""
    try:
        with file.open("rb") as content:
            header = _read_header(content.readline(_MAX_HEADER))
            if header["about"]["file"] != about:
                return None
            begin, checksum = _aligned(content.tell()), 0
            content.seek(begin)
            while chunk := content.read(_CHUNK):  # not through the map: it would stay in memory
                checksum = zlib.crc32(chunk, checksum)
            if checksum != header["checksum"]:
                return None
            mapped = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)
        arrays = {}
        for name, dtype, shape in header["arrays"]:
            kind, count = np.dtype(dtype), int(np.prod(shape))
            array = np.frombuffer(mapped, kind, count, begin) if count else np.zeros(0, kind)
            arrays[name] = array.reshape(shape)
            begin = _aligned(begin + count * kind.itemsize)
        return MappedArrays(header["about"], arrays)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_mapped(
    file: Path, about: str, arrays: Mapping[str, np.ndarray], **facts: str | int
) -> bool:
    """Write arrays to be mapped; False if the folder cannot be written.

    about: what the arrays belong to. facts: kept in `MappedArrays.about`.
    """
    parts = [np.ascontiguousarray(array) for array in arrays.values()]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(bytes(_padding(part.nbytes)), zlib.crc32(part.data, checksum))
    header = {
        "about": {"file": about, **facts},
        "checksum": checksum,
        "arrays": [[n, a.dtype.str, a.shape] for n, a in zip(arrays, parts, strict=True)],
    }
    text = json.dumps(header).encode()
    line = b"%08x %s\n" % (zlib.crc32(text), text)
    if len(line) > _MAX_HEADER:
        return False
    with optional_write(), cache_write(file) as unfinished:
        with unfinished.open("wb") as out:
            out.write(line + bytes(_padding(len(line))))
            for part in parts:
                out.write(part.data)
                out.write(bytes(_padding(part.nbytes)))
        return True
    return False


def _read_header(line: bytes) -> dict[str, Any]:
    checksum, text = line.rstrip(b"\n").split(b" ", 1)
    if int(checksum, 16) != zlib.crc32(text):
        raise ValueError("damaged")
    return json.loads(text)


def _aligned(size: int) -> int:
    return size + _padding(size)


def _padding(size: int) -> int:
    return -size % _ALIGNMENT
