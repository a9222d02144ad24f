"""The scan of one stored image: is it complete, how large, and does DALI decode it like Pillow?"""

from __future__ import annotations

import ctypes
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from PIL import ImageFile

from fastaug.data.image_set import ImageSet, is_storage_error, open_image
from fastaug.data.image_structure import FileBytes, is_intact
from fastaug.errors import DataError

# If the header is longer, for example with a thumbnail in it, the whole file is read.
_ENDS = 4096
# Bytes near the end of a complete file.
_END = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Channels, by the color type of a PNG."""
_MAX_BYTES = 1 << 30
"""Larger files are not read into memory to check whether they are images."""
_LARGE = 1 << 25
"""Bytes that are worth returning to the system immediately."""
_BYTES_PER_PIXEL = 10
"""Pillow's peak: 4, plus 6 of coefficients for a progressive JPEG."""


class ImageInfo(NamedTuple):
    """Result of scanning one image. It is bad if it has a reason."""

    height: int = 0
    width: int = 0
    plain: bool = False
    format: str = ""
    reason: str = ""
    permanent: bool = True
    """False: the storage failed and may work next time."""


class MemoryBudget:
    """Bytes that all threads together may hold. A request for more than the total waits until
    nothing else is held."""

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
                # glibc keeps memory that a thread freed for that thread: 3 GB in eight threads.
                with suppress(AttributeError):
                    ctypes.CDLL(None).malloc_trim(0)
            with self._freed:
                self._held -= count
                self._freed.notify_all()


def memory_to_decode(info: ImageInfo) -> int:
    """Bytes that Pillow needs to decode an image, at most."""
    return _BYTES_PER_PIXEL * info.height * info.width


def scan_image(images: ImageSet, index: int, *, full: bool, budget: MemoryBudget) -> ImageInfo:
    """Check header, size and end of an image; decode it if full, or if its end is missing."""
    try:
        assert images.storage is not None
        head, tail, size = images.storage.ends(index, _ENDS)
        if size > _MAX_BYTES:
            return ImageInfo(reason=f"{size / 2**30:.1f} GiB, too large for an image")
        info, is_complete = _read_header(images, index, head, tail, size, budget)
        if full or not is_complete:
            with budget.hold(size + memory_to_decode(info)):
                info = _decode_fully(bytes(images.encoded(index)), info)
    except OSError as error:
        return ImageInfo(reason=f"cannot be read ({error.strerror or error})", permanent=False)
    except DataError as error:
        reason = _reason(error, images.where(index))
        return ImageInfo(reason=reason, permanent=not is_storage_error(error))
    return info


def scan_content(content: bytes, *, full: bool) -> ImageInfo:
    """The same for an image that is already in memory."""
    try:
        if len(content) > _MAX_BYTES:
            raise DataError(f"{len(content) / 2**30:.1f} GiB, too large for an image")
        info, is_complete = _parse(content, content[-_ENDS:], len(content))
        return info if is_complete and not full else _decode_fully(content, info)
    except DataError as error:
        return ImageInfo(reason=_reason(error, ""))


def _read_header(
    images: ImageSet, index: int, head: bytes, tail: bytes, size: int, budget: MemoryBudget
) -> tuple[ImageInfo, bool]:
    """Contents of the header, and whether the end of the file is there."""
    try:
        return _parse(head, tail, size)
    except DataError:  # perhaps it needs more bytes, also MoreBytesError
        if size <= len(head):
            raise
    with budget.hold(size):
        return _parse(bytes(images.encoded(index)), tail, size)


def _parse(content: bytes, tail: bytes, size: int) -> tuple[ImageInfo, bool]:
    with open_image(content, "") as image:
        assert isinstance(image, ImageFile.ImageFile)
        if image.width * image.height == 0:
            raise DataError(f"{image.width} x {image.height} pixels")
        if image.format == "EPS":  # Pillow would run Ghostscript, which may never end
            raise DataError("PostScript is a program, not an image")
        header = content[: image.fp.tell() if image.fp else 0]
        is_complete = _is_complete(image, content, len(header), tail, size)
        # DALI accepts an end mark further to the front; _decode_fully() searches for it.
        plain = (is_complete or image.format in _END) and _is_plain(image, header)
        return ImageInfo(image.height, image.width, plain, image.format or ""), is_complete


def _is_complete(
    image: ImageFile.ImageFile, content: bytes, header: int, tail: bytes, size: int
) -> bool:
    """Whether the end of the file is there, as far as its format can tell."""
    if end := _END.get(image.format or ""):
        # A thumbnail in the header has the same end mark, so search only behind the header.
        return end in tail[max(0, header - (size - len(tail))) :]
    if image.format in ("BMP", "PPM"):
        return _raw_pixels(image)[1] <= size
    # Random bytes may start like a rare format: only decoding can tell.
    return is_intact(image, FileBytes(content, tail, size))


def _raw_pixels(image: ImageFile.ImageFile) -> tuple[str, int]:
    """Storage mode of a BMP's or PPM's pixels, and where they end; "", 0 if they are encoded."""
    tile = image.tile[0]
    if tile.codec_name != "raw":
        return "", 0
    kind, stride, *_ = tile.args if isinstance(tile.args, tuple) else (tile.args, 0)
    bits = 1 if image.mode == "1" else 8 * len(image.getbands())
    return str(kind), tile.offset + image.height * (stride or (image.width * bits + 7) // 8)


def _is_plain(image: ImageFile.ImageFile, header: bytes) -> bool:
    """Whether DALI decodes it to Pillow's pixel values (compared in tests/unit/test_scan_image.py).

    Never for TIFF: DALI fails on bilevel, 2-bit, 4-bit and signed ones, and treats orientation,
    palettes, premultiplied alpha, LA, LAB and 16 bits differently.
    """
    if image.mode.startswith(("I", "F")):
        return False
    if image.format == "JPEG":
        return image.mode in ("RGB", "L") and _is_strict_jpeg(header)  # CMYK is off by one
    if image.format == "PNG":
        return header[24] <= 8 and b"acTL" not in header  # bits per channel; animation
    if image.format == "WEBP":
        # DALI's parser does not find the EXIF behind a chunk of odd length.
        return "exif" not in image.info and getattr(image, "n_frames", 1) == 1
    if image.format in ("BMP", "PPM"):
        # Not plain: encoded pixels (run lengths, text, a maximum other than 255); BGR;15 and BGR;16
        # (16 bits per pixel); a PPM with a comment, which DALI accepts only at the start of a line.
        kind, _ = _raw_pixels(image)
        if image.format == "PPM" and b"#" in header:
            return False
        return kind != "" and not kind.startswith("BGR;")
    return False


def _is_strict_jpeg(header: bytes) -> bool:
    """Whether a JPEG follows the standard: segment after segment, and a common kind of frame.

    Where a marker is missing, Pillow searches for the next one; DALI's parser gives up.
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


def _decode_fully(content: bytes, info: ImageInfo) -> ImageInfo:
    """The info, or a reason why not every pixel can be decoded. The pixels are freed on return."""
    try:
        with open_image(content, "") as image:
            assert isinstance(image, ImageFile.ImageFile)
            header = image.fp.tell() if image.fp else 0
            image.load()
        # To a JPEG decoder, zeros in place of the rest are pixels.
        if info.format in _END and content.find(_END[info.format], header) < 0:
            raise DataError("image file is truncated (its end is missing)")
        if info.format == "PNG":
            del image
            _check_png(content)
    except DataError as error:
        return ImageInfo(reason=_reason(error, ""))
    return info


def _check_png(content: bytes) -> None:
    """Raise for a wrong checksum or missing rows: Pillow accepts them, DALI's libpng does not."""
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
        raise DataError(f"only {found // row} of its {height} rows are there")


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
    """The reason in one line, without the place and without open_image()'s own words."""
    text = str(error).removeprefix(where).removeprefix(": ")
    if text.startswith(prefix := "cannot be decoded ("):
        text = text.removeprefix(prefix).removesuffix(")")
    return " ".join(text.split())[:200]
