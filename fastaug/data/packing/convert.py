"""What packing does to one image: copies it, or shrinks it to a JPEG."""

from __future__ import annotations

import io
import os
import zlib
from typing import NamedTuple

import numpy as np
from PIL import Image

from fastaug.data.image_set import decode, open_image
from fastaug.data.packing.config import PackConfig
from fastaug.data.scan_image import ImageInfo, MemoryBudget, memory_to_decode, scan_content
from fastaug.errors import DataError, first_line

_SUFFIXES = {
    "JPEG": ".jpg",
    "MPO": ".jpg",
    "PNG": ".png",
    "BMP": ".bmp",
    "WEBP": ".webp",
    "PPM": ".ppm",
    "TIFF": ".tif",
    "GIF": ".gif",
}
"""Formats that are copied. An image of another one becomes a PNG."""
_REDUCING_GAP = 2
"""The image may be reduced by whole factors while it is at least this many times the new size:
four times faster for 12 megapixels, and no visible difference, since Lanczos does the rest."""


class PackedImage(NamedTuple):
    """An image as it is stored. It is bad, and not stored, if info has a reason."""

    info: ImageInfo
    content: bytes = b""
    suffix: str = ""
    crc32: int = 0


def convert(source: bytes | np.ndarray, config: PackConfig, budget: MemoryBudget) -> PackedImage:
    """source: the stored bytes of an image, or its pixels, [H, W, 3] uint8."""
    if isinstance(source, np.ndarray):
        size = _new_size(source.shape[1], source.shape[0], config.max_side)
        return _stored(_encode(Image.fromarray(source), size, config.quality))
    info = scan_content(source, full=config.full)
    if info.reason:
        return PackedImage(info)
    size = _new_size(info.width, info.height, config.max_side)
    if size is None and info.format in _SUFFIXES:
        return PackedImage(info, source, _SUFFIXES[info.format], zlib.crc32(source))
    with budget.hold(memory_to_decode(info)):
        try:
            with open_image(source, "") as image:
                if size is not None:
                    image.draft(None, (_REDUCING_GAP * size[0], _REDUCING_GAP * size[1]))
                return _stored(_encode(_as_trained_on(image, source), size, config.quality))
        except DataError as error:
            return PackedImage(ImageInfo(reason=first_line(error).removeprefix(": ")[:200]))


def _new_size(width: int, height: int, max_side: int) -> tuple[int, int] | None:
    """Width and height after shrinking; None if the image is small enough."""
    shorter = min(width, height)
    if not max_side or shorter <= max_side:
        return None
    return round(width * max_side / shorter), round(height * max_side / shorter)


def _as_trained_on(image: Image.Image, content: bytes) -> Image.Image:
    """The pixels that a loader would decode. EXIF orientation and color profiles are ignored."""
    if image.mode == "L":
        return image
    if image.mode.startswith("I"):
        return Image.fromarray(decode(content, ""))
    return image.convert("RGB")


def _encode(image: Image.Image, size: tuple[int, int] | None, quality: int) -> bytes:
    """A JPEG of this size, or a PNG of the same size."""
    if size is None:
        return _saved(image, "PNG")
    small = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=_REDUCING_GAP)
    return _saved(small, "JPEG", quality=quality)


def _saved(image: Image.Image, kind: str, **options: int) -> bytes:
    image.info.clear()  # Pillow would store a PNG's comments and color profile again
    if not hasattr(os, "memfd_create"):
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        return buffer.getvalue()
    # Pillow lets other threads run while it encodes to a file, but not to a buffer.
    with os.fdopen(os.memfd_create("image"), "w+b", buffering=0) as file:
        image.save(file, kind, **options)
        return os.pread(file.fileno(), file.tell(), 0)


def _stored(content: bytes) -> PackedImage:
    info = scan_content(content, full=False)
    return PackedImage(info, content, _SUFFIXES[info.format], zlib.crc32(content))
