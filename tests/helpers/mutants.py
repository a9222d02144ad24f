"""Damaged and odd images for the fuzz test: real ones in many formats, then broken in many ways."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image


def photo(rng: np.random.Generator, width: int = 75, height: int = 58) -> Image.Image:
    """Slopes and noise: enough detail that every byte of the file says something."""
    y, x = np.mgrid[:height, :width]
    slopes = np.stack([3 * x % 256, 4 * y % 256, 2 * (x + y) % 256], axis=-1)
    noisy = slopes + rng.integers(0, 40, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def with_thumbnail(image: Image.Image) -> bytes:
    """A JPEG whose header holds 6 KB with an end marker in them, as a camera's thumbnail does."""
    jpeg = encode(image, "JPEG")
    thumbnail = b"Exif\0\0" + bytes(6000) + b"\xff\xd9"
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail + jpeg[2:]


def chunk(kind: bytes, content: bytes, claim: int | None = None) -> bytes:
    """A chunk of a PNG, its check sum right; claim: another length than its own."""
    length = struct.pack(">I", len(content) if claim is None else claim)
    return length + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(
    size: tuple[int, int],
    pixels: bytes,
    *,
    depth: int = 8,
    color: int = 2,
    claim: int | None = None,
    extra: bytes = b"",
) -> bytes:
    """A PNG of rows that are made already, whatever its header says of them."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, depth, color, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(pixels), claim)
    return b"\x89PNG\r\n\x1a\n" + header + extra + data + chunk(b"IEND", b"")


def whole_images(rng: np.random.Generator, width: int = 75, height: int = 58) -> dict[str, bytes]:
    """One sound image of each kind."""
    rgb = photo(rng, width, height)
    alpha = rgb.copy()
    alpha.putalpha(Image.fromarray(rng.integers(0, 256, (rgb.height, rgb.width), np.uint8)))
    deep = Image.fromarray(rng.integers(0, 65536, (40, 50), np.uint16))
    more = [photo(rng, width, height), photo(rng, width, height)]
    return {
        "jpeg": encode(rgb, "JPEG", subsampling=2),
        "jpeg-444": encode(rgb, "JPEG", quality=95, subsampling=0),
        "jpeg-progressive": encode(rgb, "JPEG", progressive=True),
        "jpeg-restart": encode(rgb, "JPEG", restart_marker_blocks=2),
        "jpeg-grey": encode(rgb.convert("L"), "JPEG"),
        "jpeg-cmyk": encode(rgb.convert("CMYK"), "JPEG"),
        "jpeg-thumbnail": with_thumbnail(rgb),
        "png": encode(rgb, "PNG"),
        "png-palette": encode(rgb.convert("P"), "PNG"),
        "png-alpha": encode(alpha, "PNG"),
        "png-16": encode(deep, "PNG"),
        "apng": encode(rgb, "PNG", save_all=True, append_images=more),
        "gif-animated": encode(rgb, "GIF", save_all=True, append_images=more),
        "webp": encode(rgb, "WEBP"),
        "webp-alpha": encode(alpha, "WEBP", lossless=True),
        "bmp": encode(rgb, "BMP"),
        "bmp-palette": encode(rgb.convert("P"), "BMP"),
        "ppm": encode(rgb, "PPM"),
        "tiff": encode(rgb, "TIFF", compression="tiff_lzw"),
    }


def flip_bits(content: bytes, begin: int, end: int, count: int, rng: np.random.Generator) -> bytes:
    damaged = bytearray(content)
    for place in rng.integers(begin, max(begin + 1, min(end, len(content))), count):
        damaged[place] ^= 1 << int(rng.integers(8))
    return bytes(damaged)


def damage(content: bytes, rng: np.random.Generator, rounds: int) -> Iterator[tuple[str, bytes]]:
    """(what was done, the image afterwards), `rounds` times each."""
    size = len(content)
    for _ in range(rounds):
        yield "cut", content[: int(rng.integers(1, size))]
        yield "cut-end", content[: -int(rng.integers(1, 20))]
        yield "flip-header", flip_bits(content, 0, 64, int(rng.integers(1, 4)), rng)
        yield "flip-tables", flip_bits(content, 64, 640, int(rng.integers(1, 6)), rng)
        yield "flip-data", flip_bits(content, size // 3, size, int(rng.integers(1, 8)), rng)
        begin, length = int(rng.integers(0, size)), int(rng.integers(1, 200))
        yield "zeros", content[:begin] + bytes(length) + content[begin + length :]
        yield "hole", content[:begin] + content[begin + length :]
        yield "inserted", content[:begin] + rng.bytes(length) + content[begin:]
        yield "appended", content + rng.bytes(int(rng.integers(1, 6000)))


def claims(rng: np.random.Generator) -> Iterator[tuple[str, bytes]]:
    """Headers that promise other sizes than the file has."""
    jpeg = encode(photo(rng), "JPEG")
    frame = jpeg.index(b"\xff\xc0") + 5
    rows = bytes(40 * (1 + 3 * 50))
    sides = (0, 1, 49, 51, 4_000, 13_000, 65_500, 65_535)
    for height in sides:
        for width in sides:
            size = struct.pack(">HH", height, width)
            yield f"jpeg-{width}x{height}", jpeg[:frame] + size + jpeg[frame + 4 :]
    for side in (0, 1, 49, 51, 65_500, 2**16, 2**31 - 1, 2**31, 2**32 - 1):
        for size in ((side, 40), (50, side), (side, side)):
            yield f"png-{size[0]}x{size[1]}", png(size, rows)
    for claim in (0, 1, 2**20, 2**31 - 1, 2**32 - 1):
        yield f"png-idat-{claim}", png((50, 40), rows, claim=claim)
    for kind in (b"iCCP", b"zTXt", b"iTXt", b"tEXt", b"PLTE", b"acTL", b"fcTL", b"eXIf", b"tRNS"):
        yield f"png-{kind.decode()}", png((50, 40), rows, extra=chunk(kind, rng.bytes(30)))
        huge = chunk(kind, b"x\0\0" + zlib.compress(bytes(50_000_000), 1)[:60_000])
        yield f"png-{kind.decode()}-bomb", png((50, 40), rows, extra=huge)
    for side in (100, 65_500):
        yield f"ppm-{side}", b"P6\n%d %d\n255\n" % (side, side) + bytes(300)
        yield f"gif-{side}", b"GIF89a" + struct.pack("<HHBBB", side, side, 0, 0, 0) + bytes(100)
        size = struct.pack("<ii", side, side)
        yield f"bmp-{side}", (bmp := encode(photo(rng), "BMP"))[:18] + size + bmp[26:]


def not_images(rng: np.random.Generator) -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    yield "byte", b"\xff"
    yield "text", b"<html>429 too many requests</html>\n" * 30
    yield "postscript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nloop\n"
    yield "zip", b"PK\x03\x04" + rng.bytes(500)
    for start in (b"", b"\xff\xd8", b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"BM", b"GIF89a"):
        for length in (0, 10, 1_000, 20_000):
            yield "random", start + rng.bytes(length)
    for start in (b"RIFF\0\1\0\0WEBPVP8 ", b"II*\0\x08\0\0\0", b"MM\0*\0\0\0\x08"):
        for length in (0, 10, 1_000, 20_000):
            yield "random", start + rng.bytes(length)


def mutants(seed: int, rounds: int) -> Iterator[tuple[str, bytes]]:
    """(kind, content): the sound images first, each damaged, then what never was one."""
    rng = np.random.default_rng(seed)
    whole = whole_images(rng)
    for kind, content in whole.items():
        yield f"{kind} whole", content
        for how, damaged in damage(content, rng, rounds):
            yield f"{kind} {how}", damaged
    yield from ((f"claim {name}", content) for name, content in claims(rng))
    yield from ((f"none {name}", content) for name, content in not_images(rng))
