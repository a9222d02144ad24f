"""A look at one stored image: is it whole, how large, and would DALI see what Pillow sees?"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from PIL import ImageFile

from fastaug.data.image_set import ImageSet, open_image
from fastaug.errors import DataError

# Where the header is longer, as with a thumbnail in it, the whole file is read.
_HEAD = 4096
_TAIL = 4096
# What a whole file of a format has near its end.
_END = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Numbers in a pixel, by the color type of a PNG."""
_MAX_BYTES = 1 << 30
"""A larger file is not read into memory to see whether it is an image."""
_LARGE = 1 << 25
"""Bytes that are worth giving back to the system at once."""
_PIXEL = 10
"""Bytes that Pillow takes a pixel at its peak: 4, and 6 of coefficients for a progressive JPEG."""


class Look(NamedTuple):
    """What a look has found. An image is bad if there is a reason."""

    height: int = 0
    width: int = 0
    plain: bool = False
    format: str = ""
    reason: str = ""
    lasting: bool = True
    """False: a failure of the storage, which may have gone the next time."""


class Budget:
    """Bytes that threads may hold at once. One that asks for more than all of them goes alone."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._held = 0
        self._freed = threading.Condition()

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        count = min(count, self._total)
        with self._freed:
            self._freed.wait_for(lambda: self._held + count <= self._total)
            self._held += count
        try:
            yield
        finally:
            if count > _LARGE:
                # glibc keeps what a thread has freed for that thread: 3 GB in eight of them.
                with suppress(AttributeError):
                    ctypes.CDLL(None).malloc_trim(0)
            with self._freed:
                self._held -= count
                self._freed.notify_all()


def look(images: ImageSet, index: int, *, full: bool, budget: Budget) -> Look:
    """Quick: header, size and end; what looks cut off, or everything if full, is decoded."""
    try:
        head, tail, size = _ends(images, index)
        if size > _MAX_BYTES:
            return Look(reason=f"{size / 2**30:.1f} GiB are too many for an image")
        found, is_whole = _header(images, index, head, tail, size, budget)
        if full or not is_whole:
            with budget.hold(size + _PIXEL * found.height * found.width):
                found = _decoded(images.encoded(index), found)
    except OSError as error:
        return Look(reason=f"cannot be read ({error.strerror or error})", lasting=False)
    except DataError as error:
        # Pillow raises OSError too, but without a number: that is the image's fault.
        is_storage = isinstance(error.__cause__, OSError) and error.__cause__.errno is not None
        return Look(reason=_reason(error, images.where(index)), lasting=not is_storage)
    return found


def _ends(images: ImageSet, index: int) -> tuple[bytes, bytes, int]:
    """The first and the last bytes of an image as it is stored, and how many it has."""
    spans = images.spans
    if spans is not None and index in spans.continued:
        content = spans.read(index)
        return content[:_HEAD], content[-_TAIL:], len(content)
    path = images.files[index] if spans is None else spans.shards[spans.shard[index]]
    # Without O_NONBLOCK a named pipe would be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError("not a file")
        if spans is None:
            offset, size = 0, status.st_size
        else:
            offset, size = int(spans.offset[index]), int(spans.size[index])
            if offset + size > status.st_size:
                raise DataError("its shard ends before it does")
        head = os.pread(descriptor, min(_HEAD, size), offset)
        start = max(0, size - _TAIL)
        tail = os.pread(descriptor, size - start, offset + start) if start else head
    finally:
        os.close(descriptor)
    return head, tail, size


def _header(
    images: ImageSet, index: int, head: bytes, tail: bytes, size: int, budget: Budget
) -> tuple[Look, bool]:
    """What the header says, and whether the end is where it should be."""
    try:
        return _parse(head, tail, size)
    except DataError:
        if size <= len(head):
            raise
    with budget.hold(size):
        return _parse(images.encoded(index), tail, size)


def _parse(content: bytes, tail: bytes, size: int) -> tuple[Look, bool]:
    with open_image(content, "") as image:
        assert isinstance(image, ImageFile.ImageFile)
        if image.width * image.height == 0:
            raise DataError(f"{image.width} x {image.height} pixels")
        if image.format == "EPS":  # Pillow would run Ghostscript on it, and that may never end
            raise DataError("PostScript is a program")
        header = content[: image.fp.tell() if image.fp else 0]
        is_whole = _is_whole(image, len(header), tail, size)
        # What has its end further to the front is no trouble for DALI; _decoded() looks for it.
        plain = (is_whole or image.format in _END) and _is_plain(image, header)
        return Look(image.height, image.width, plain, image.format or ""), is_whole


def _is_whole(image: ImageFile.ImageFile, header: int, tail: bytes, size: int) -> bool:
    """Whether the end is where it should be, as far as a format tells."""
    if end := _END.get(image.format or ""):
        # An embedded thumbnail ends as a photograph does: only what follows the header counts.
        return end in tail[max(0, header - (size - len(tail))) :]
    if image.format in ("BMP", "PPM"):
        return _raw_pixels(image)[1] <= size
    # A rare format may be random bytes that begin like one: decoding it tells.
    return image.format in ("WEBP", "TIFF", "GIF")


def _raw_pixels(image: ImageFile.ImageFile) -> tuple[str, int]:
    """How the pixels of a BMP or PPM are stored, and where they end; "", 0 if they are coded."""
    tile = image.tile[0]
    if tile.codec_name != "raw":
        return "", 0
    kind, stride, *_ = tile.args if isinstance(tile.args, tuple) else (tile.args, 0)
    bits = 1 if image.mode == "1" else 8 * len(image.getbands())
    return str(kind), tile.offset + image.height * (stride or (image.width * bits + 7) // 8)


def _is_plain(image: ImageFile.ImageFile, header: bytes) -> bool:
    """Whether DALI decodes it, and to Pillow's levels; tests/unit/test_scan.py compares the two.

    TIFF never is: DALI fails on bilevel, 2 and 4 bits and signed ones, and sees orientation,
    palettes, premultiplied alpha, LA, LAB and 16 bits in another way.
    """
    if image.mode.startswith(("I", "F")):
        return False
    if image.format == "JPEG":
        return image.mode in ("RGB", "L") and _is_orderly(header)  # CMYK: one level off, with black
    if image.format == "PNG":
        return header[24] <= 8 and b"acTL" not in header  # bits a channel; animation
    if image.format == "WEBP":
        # DALI's parser loses its way to the EXIF behind a chunk of odd length.
        return "exif" not in image.info and getattr(image, "n_frames", 1) == 1
    if image.format in ("BMP", "PPM"):
        # Coded: run lengths, text, levels that do not end at 255. BGR;15 and BGR;16: 16 bits a
        # pixel. A comment in a PPM: DALI takes it at the start of a line alone.
        kind, _ = _raw_pixels(image)
        if image.format == "PPM" and b"#" in header:
            return False
        return kind != "" and not kind.startswith("BGR;")
    return False


def _is_orderly(header: bytes) -> bool:
    """Whether a JPEG is one by the letter: segment after segment, a common kind of frame.

    Pillow looks for the next marker where there is none; DALI's parser gives up.
    """
    place = 2
    while place + 4 <= len(header) and header[place] == 0xFF:
        marker = header[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
        elif marker == 0xDA:  # the first scan
            return True
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC0, 0xC1, 0xC2, 0xC4):
            return False  # lossless, arithmetic, hierarchical
        else:
            place += 2 + int.from_bytes(header[place + 2 : place + 4], "big")
    return False


def _decoded(content: bytes, found: Look) -> Look:
    """The same look after every pixel was decoded. Its memory is free when this returns."""
    try:
        with open_image(content, "") as image:
            assert isinstance(image, ImageFile.ImageFile)
            header = image.fp.tell() if image.fp else 0
            image.load()
        # Zeros in place of the rest are pixels to a JPEG decoder.
        if found.format in _END and content.find(_END[found.format], header) < 0:
            raise DataError("image file is truncated (its end is missing)")
        if found.format == "PNG":
            del image
            _check_png(content)
    except DataError as error:
        return Look(reason=_reason(error, ""))
    return found


def _check_png(content: bytes) -> None:
    """Pillow does not mind a wrong check sum, nor rows that are missing; DALI's libpng does."""
    with open_image(content, "") as image:
        image.verify()
    pixels, place = [], 8
    while (kind := content[place + 4 : place + 8]) and kind != b"IEND":
        length = int.from_bytes(content[place : place + 4], "big")
        if kind == b"IDAT":
            pixels.append(content[place + 8 : place + 8 + length])
        place += length + 12
    width, height, depth, color, *_, interlaced = struct.unpack(">IIBBBBB", content[16:29])
    row = 1 + (width * depth * _CHANNELS[color] + 7) // 8
    if not interlaced and (found := _inflated_size(b"".join(pixels))) < height * row:
        raise DataError(f"{found // row} of its {height} rows are there")


def _inflated_size(content: bytes) -> int:
    inflate, size = zlib.decompressobj(), 0
    try:
        for start in range(0, len(content), 1 << 16):
            part = content[start : start + (1 << 16)]
            while part:
                size += len(inflate.decompress(part, 1 << 20))
                part = inflate.unconsumed_tail
    except zlib.error as error:
        raise DataError(f"broken data stream ({error})") from error
    return size


def _reason(error: DataError, where: str) -> str:
    """What is wrong, in one line, without where and without decode()'s frame around it."""
    said = str(error).removeprefix(where).removeprefix(": ")
    if said.startswith(frame := "cannot be decoded ("):
        said = said.removeprefix(frame).removesuffix(")")
    return " ".join(said.split())[:200]
