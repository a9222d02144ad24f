"""A struct array of a MATLAB file (version 5), the format of ImageNet's class list.

Not scipy's reader: a few bytes of a hostile file make it allocate or loop over whatever they claim.
Here the work is bounded by the size of the file and by _MAX_INFLATED.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fastaug.errors import parser_errors

_MAX_INFLATED = 2**24  # bytes; ImageNet's 1,860 synsets have about 1.5 MB
_HEADER = 128  # bytes
_MATRIX, _COMPRESSED = 14, 15
_STRUCT, _CHAR = 2, 4
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8"}
_NUMBERS |= {12: "i8", 13: "u8"}
_TEXTS = {1: "utf-8", 2: "utf-8", 4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32"}

Value = str | int | None
"""A text, the first of some numbers, or None for a value of another kind."""


def read_struct_array(content: bytes, variable: str, where: Path | str) -> list[dict[str, Value]]:
    """The structs of an array, each as field -> value; a DataError names where they came from."""
    with parser_errors(f"{where}: not a readable MATLAB file of version 5", "; download it again"):
        order = {b"IM": "<", b"MI": ">"}[content[126:_HEADER]]
        for kind, element in _elements(memoryview(content)[_HEADER:], order):
            if kind == _COMPRESSED:
                ((kind, element),) = _elements(_inflate(element), order)
            if kind == _MATRIX:
                found = _structs(element, order, variable)
                if found is not None:
                    return found
        raise ValueError(f"it has no struct array {variable!r}")


def _inflate(content: memoryview) -> memoryview:
    inflate = zlib.decompressobj()
    inflated = inflate.decompress(content, _MAX_INFLATED)
    if not inflate.eof:
        raise ValueError(f"truncated, or more than {_MAX_INFLATED} bytes")
    return memoryview(inflated)


def _elements(content: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Type and content of each data element."""
    place = 0
    while place < len(content):
        kind, size = struct.unpack(f"{order}II", content[place : place + 8])
        start = place + 8
        if kind >> 16:  # up to 4 bytes, in the place of the size
            kind, size, start = kind & 0xFFFF, kind >> 16, place + 4
        if start + size > len(content) or (start == place + 4 and size > 4):
            raise ValueError(f"an element of {size} bytes is truncated")
        yield kind, content[start : start + size]
        place = start + size
        if kind != _COMPRESSED:
            place += -place % 8


def _structs(matrix: memoryview, order: str, variable: str) -> list[dict[str, Value]] | None:
    """The structs, unless the matrix is another variable."""
    elements = _elements(matrix, order)
    (_, flags), _dimensions, (_, name) = (next(elements) for _ in range(3))
    if bytes(name).decode() != variable or _class_of(flags, order) != _STRUCT:
        return None
    (_, width), (_, names) = next(elements), next(elements)
    (step,) = struct.unpack(f"{order}i", width)
    if step < 1:
        raise ValueError(f"field names of {step} bytes")
    fields = [
        bytes(names[start : start + step]).rstrip(b"\0").decode()
        for start in range(0, len(names), step)
    ]
    values = [_value(element, order) for _, element in elements]
    if not fields or len(values) % len(fields):
        raise ValueError(f"{len(values)} values of {len(fields)} fields")
    return [
        dict(zip(fields, values[start : start + len(fields)], strict=True))
        for start in range(0, len(values), len(fields))
    ]


def _value(matrix: memoryview, order: str) -> Value:
    elements = list(_elements(matrix, order))
    if len(elements) < 4:
        return None
    (_, flags), _dimensions, _name, (kind, content) = elements[:4]
    if _class_of(flags, order) == _CHAR:
        codec = _TEXTS[kind]
        ending = {"<": "-le", ">": "-be"}[order] if codec != "utf-8" else ""
        return bytes(content).decode(codec + ending)
    if kind in _NUMBERS and content:
        return int(np.frombuffer(content, order + _NUMBERS[kind], 1)[0])
    return None


def _class_of(flags: memoryview, order: str) -> int:
    return int(struct.unpack(f"{order}II", flags)[0]) & 0xFF
