"""Structure of GIF, TIFF and WebP files: are all parts of the image there, where the file says?

No pixels are decoded. False only means that something is unusual, and that the image should be
decoded to find out: some encoders write files that are unusual and sound.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from math import ceil

from PIL import ImageFile

_MAX_WHOLE = 1 << 20
"""Larger files are not read as a whole for their structure; what lies outside of the bytes that
were read counts as intact."""


class MoreBytesError(Exception):
    """The structure can only be checked with the whole file."""


class FileBytes:
    """The bytes of a file that were read: its head and its tail, or all of them."""

    def __init__(self, head: bytes, tail: bytes, size: int) -> None:
        self.size = size
        self._head, self._tail, self._tail_start = head, tail, size - len(tail)

    def at(self, start: int, count: int) -> bytes | None:
        """Bytes [start, start + count); fewer at the end of the file; None if the file is too large
        to be read as a whole."""
        end = min(start + count, self.size)
        if end <= len(self._head):
            return self._head[start:end]
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : end - self._tail_start]
        if self.size <= _MAX_WHOLE:
            raise MoreBytesError
        return None


def is_intact(image: ImageFile.ImageFile, file: FileBytes) -> bool:
    """Whether a GIF, TIFF or WebP has the usual structure. Raises MoreBytesError if that cannot be
    checked with the bytes that were read."""
    check = _CHECKS.get(image.format or "")
    try:
        return check is not None and check(image, file)
    except (ArithmeticError, LookupError, TypeError, ValueError, struct.error):
        return False  # numbers of impossible kinds or sizes


# --- GIF: blocks up to the trailer ---


def _is_gif(image: ImageFile.ImageFile, file: FileBytes) -> bool:
    header = file.at(0, 13)
    if header is None or len(header) < 13:
        return False
    place, frames = 13 + _color_table(header[10]), 0
    while block := file.at(place, 11):
        if block[0] == 0x3B:  # the trailer
            return frames > 0
        if block[0] == 0x21:  # an extension
            if (behind := _behind_blocks(file, place + 2, even=False)) is None:
                return False
            place = behind
            continue
        if block[0] != 0x2C or len(block) < 11:
            return False
        left, top, width, height, flags = struct.unpack("<HHHHB", block[1:10])
        data = place + 10 + _color_table(flags)
        code_size = file.at(data, 1)
        is_inside = left + width <= image.width and top + height <= image.height
        if not is_inside or width * height == 0 or not code_size or not 1 <= code_size[0] <= 8:
            return False
        frames += 1
        if (behind := _behind_blocks(file, data + 1, even=True)) is None:
            return False
        place = behind
    return block is None  # too large to see all of it


def _color_table(flags: int) -> int:
    """Bytes of the color table that the flags of a screen or frame announce."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _behind_blocks(file: FileBytes, place: int, *, even: bool) -> int | None:
    """Where a chain of blocks has ended; None if it does not end in the file.

    even: whether all blocks but the last must have the same length, as those of pixels have. Where
    bytes are missing or were added, lengths are those of other bytes.
    """
    first = last = 0
    while length := file.at(place, 1):
        if length[0] == 0:
            return place + 1
        first = first or length[0]
        if even and (length[0] > first or 0 < last < first):
            return None
        last = length[0]
        place += 1 + last
    return None if length is not None else file.size


# --- TIFF: the directory of the first page ---

_TIFF_TYPES: dict[int, tuple[int, ...]] = {
    256: (3, 4),  # width
    257: (3, 4),  # height
    258: (3,),  # bits per sample
    259: (3,),  # compression
    262: (3,),  # photometric interpretation
    266: (3,),  # fill order
    273: (3, 4, 16),  # strip offsets
    277: (3,),  # samples per pixel
    278: (3, 4),  # rows per strip
    279: (3, 4, 16),  # strip byte counts
    284: (3,),  # planar configuration
    317: (3,),  # predictor
    322: (3, 4),  # tile width
    323: (3, 4),  # tile height
    324: (4, 16),  # tile offsets
    325: (3, 4, 16),  # tile byte counts
    339: (3,),  # sample format
}
_TIFF_SIZES = dict(zip(range(1, 14), (1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4), strict=True)) | {
    16: 8,
    17: 8,
    18: 8,
}
"""Bytes of a value, by its type."""
_MAX_TAGS = 4096
_TIFF_STARTS: dict[int, Callable[[bytes], bool]] = {
    1: lambda part: True,
    5: lambda part: part[0] == 0x80,  # LZW begins with the code that clears its table
    7: lambda part: part[:2] == b"\xff\xd8",
    8: lambda part: part[0] & 15 == 8 and int.from_bytes(part[:2], "big") % 31 == 0,
    32773: lambda part: True,
}
"""Start of a strip or tile, by compression. Others are decoded."""


def _is_tiff(image: ImageFile.ImageFile, file: FileBytes) -> bool:
    if not _is_directory(file):
        return False
    tags = image.tag_v2  # type: ignore[attr-defined]
    types = tags.tagtype
    if any(types[tag] not in _TIFF_TYPES.get(tag, (types[tag],)) for tag in tags):
        return False
    is_tiled = 322 in tags
    offsets, counts = (_numbers(tags.get(tag)) for tag in ((324, 325) if is_tiled else (273, 279)))
    samples, compression = tags.get(277, 1), tags.get(259, 1)
    planes = samples if tags.get(284, 1) == 2 else 1
    columns, height = tags[256], tags[257]  # not image.size, which may be turned
    rows = height
    across = down = 1
    if is_tiled:
        if not tags.get(322) or not tags.get(323):
            return False
        across, columns = ceil(columns / tags[322]), tags[322]
        down, rows = ceil(rows / tags[323]), tags[323]
    elif tags.get(278, rows) < rows:
        if not tags[278]:
            return False
        down, rows = ceil(rows / tags[278]), tags[278]
    bits = _numbers(tags.get(258, 1))
    if len(offsets) != len(counts) or len(offsets) != across * down * planes:
        return False
    if min(offsets) < 8 or min(counts) <= 0 or compression not in _TIFF_STARTS:
        return False
    if len(set(bits)) != 1 or len(bits) not in (1, samples) or tags.get(266, 1) != 1:
        return False
    if any(offset + count > file.size for offset, count in zip(offsets, counts, strict=True)):
        return False
    if compression == 1:
        row = (columns * bits[0] * (samples if planes == 1 else 1) + 7) // 8
        last = rows if is_tiled else height - (down - 1) * rows
        return min(counts[:-1], default=row * rows) >= row * rows and counts[-1] >= row * last
    starts = _TIFF_STARTS[compression]
    for offset, count in zip(offsets, counts, strict=True):
        part = file.at(offset, 2)
        if part is not None and (len(part) < 2 or count < 2 or not starts(part)):
            return False
        if compression == 7 and file.at(offset + count - 2, 2) not in (b"\xff\xd9", None):
            return False
    return True


def _is_directory(file: FileBytes) -> bool:
    """Whether the first directory and its values are in the file, and its tags ascend."""
    header = file.at(0, 16)
    if header is None or len(header) < 16:
        return False
    order = "<" if header[:2] == b"II" else ">"
    is_big = 43 in header[2:4]
    counts, entry, pointer = ("Q", "HHQ", 8) if is_big else ("H", "HHI", 4)
    (place,) = struct.unpack_from(order + ("Q" if is_big else "I"), header, 8 if is_big else 4)
    width = struct.calcsize(f"={counts}")
    if place + width > file.size or (start := file.at(place, width)) is None:
        return False
    (count,) = struct.unpack(order + counts, start)
    size = struct.calcsize(f"={entry}") + pointer
    if count > _MAX_TAGS or place + width + count * size + pointer > file.size:
        return False
    directory, previous = file.at(place + width, count * size), 0
    if directory is None:
        return True
    for at in range(0, len(directory), size):
        tag, kind, values = struct.unpack_from(order + entry, directory, at)
        length = _TIFF_SIZES.get(kind, 0) * values
        where = int.from_bytes(
            directory[at + size - pointer : at + size], "little" if order == "<" else "big"
        )
        if tag <= previous or not length or (length > pointer and where + length > file.size):
            return False
        previous = tag
    return True


def _numbers(value: int | Sequence[int] | None) -> Sequence[int]:
    if value is None:
        return ()
    return value if isinstance(value, (tuple, list)) else (value,)


# --- WebP: chunks of a RIFF file ---


def _is_webp(image: ImageFile.ImageFile, file: FileBytes) -> bool:
    head = file.at(0, 12)
    if head is None or len(head) < 12 or int.from_bytes(head[4:8], "little") + 8 != file.size:
        return False
    place, frames = 12, 0
    while place < file.size:
        chunk = file.at(place, 24)
        if chunk is None:
            return True
        kind, length = chunk[:4], int.from_bytes(chunk[4:8], "little")
        if place + 8 + length > file.size:
            return False
        if kind == b"ANMF":
            place += 24  # the frame's own chunks follow
            continue
        if kind in (b"VP8 ", b"VP8L"):
            frames += 1
            is_frame = _is_vp8 if kind == b"VP8 " else _is_vp8l
            if not is_frame(chunk[8:], length, image.size):
                return False
        elif not kind.rstrip().isalnum():
            return False
        place += 8 + length + length % 2
    return frames > 0


def _is_vp8(frame: bytes, length: int, canvas: tuple[int, int]) -> bool:
    """Frame tag, start code and size of a lossy frame."""
    if len(frame) < 10:
        return False
    tag = int.from_bytes(frame[:3], "little")
    width, height = (int.from_bytes(frame[at : at + 2], "little") & 0x3FFF for at in (6, 8))
    is_key_frame, version, is_shown, first_partition = (
        not tag & 1,
        tag >> 1 & 7,
        tag >> 4 & 1,
        tag >> 5,
    )
    return (
        (is_key_frame and version <= 3 and is_shown == 1)
        and 0 < first_partition <= length - 10
        and frame[3:6] == b"\x9d\x01\x2a"
        and (0 < width <= canvas[0] and 0 < height <= canvas[1])
    )


def _is_vp8l(frame: bytes, length: int, canvas: tuple[int, int]) -> bool:
    """Signature, size and version of a lossless frame."""
    if len(frame) < 5 or length < 6:
        return False
    bits = int.from_bytes(frame[1:5], "little")
    width, height, version = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), bits >> 29
    return frame[0] == 0x2F and version == 0 and width <= canvas[0] and height <= canvas[1]


_CHECKS: dict[str, Callable[[ImageFile.ImageFile, FileBytes], bool]] = {
    "GIF": _is_gif,
    "TIFF": _is_tiff,
    "WEBP": _is_webp,
}
