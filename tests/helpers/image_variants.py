"""Sound GIF, TIFF and WebP files of many kinds, as Pillow writes them, for tests of the scan."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
from mutants import encode, photo
from PIL import Image, features


def variants(kind: str, rng: np.random.Generator) -> dict[str, bytes]:
    """kind: GIF, TIFF or WEBP."""
    return dict({"GIF": _gif, "TIFF": _tiff, "WEBP": _webp}[kind](rng))


def _gif(rng: np.random.Generator) -> Iterator[tuple[str, bytes]]:
    rgb = photo(rng)
    frames = [photo(rng) for _ in range(3)]
    yield "plain", encode(rgb, "GIF")
    yield "large", encode(photo(rng, 640, 480), "GIF")
    yield "one pixel", encode(rgb.crop((0, 0, 1, 1)), "GIF")
    yield "two colors", encode(rgb.convert("1"), "GIF")
    yield "grey", encode(rgb.convert("L"), "GIF")
    for colors in (2, 4, 7, 64):
        yield f"{colors} colors", encode(rgb.quantize(colors), "GIF")
    for name, options in {
        "interlaced": {"interlace": True},
        "not interlaced": {"interlace": False},
        "optimized": {"optimize": True},
        "transparent": {"transparency": 3},
        "background": {"background": 5},
        "comment": {"comment": b"words" * 200},
        "local palette": {"include_color_table": True},
    }.items():
        yield name, encode(rgb.quantize(64), "GIF", **options)
    alpha = rgb.copy()
    alpha.putalpha(Image.fromarray(rng.integers(0, 256, (rgb.height, rgb.width), np.uint8)))
    yield "alpha", encode(alpha, "GIF")
    for disposal in (0, 1, 2, 3):
        options = {"save_all": True, "append_images": frames, "loop": disposal, "duration": 40}
        yield f"animated {disposal}", encode(rgb, "GIF", disposal=disposal, **options)
    plain = encode(rgb, "GIF")
    yield "bytes behind it", plain + bytes(500)
    yield "no trailer", plain[:-1]
    extension = b"\x21\xf9\x04\x00\x00\x00\x00\x00"
    if extension not in plain:
        table = 13 + 3 * 2 ** ((plain[10] & 7) + 1)
        yield "control extension", plain[:table] + extension + plain[table:]


def _tiff(rng: np.random.Generator) -> Iterator[tuple[str, bytes]]:
    rgb = photo(rng)
    modes = {mode: rgb.convert(mode) for mode in ("L", "1", "P", "CMYK", "RGBA", "LA", "YCbCr")}
    modes["I;16"] = Image.fromarray(rng.integers(0, 60_000, (40, 50), np.uint16))
    modes["F"] = Image.fromarray(rng.random((40, 50), np.float32))
    yield "plain", encode(rgb, "TIFF")
    yield "large", encode(photo(rng, 640, 480), "TIFF")
    yield "one pixel", encode(rgb.crop((0, 0, 1, 1)), "TIFF")
    for mode, image in modes.items():
        yield f"mode {mode}", encode(image, "TIFF")
    for name in ("raw", "tiff_lzw", "tiff_adobe_deflate", "tiff_deflate", "packbits", "jpeg"):
        yield name, encode(rgb, "TIFF", compression=name)
        yield f"{name}, strips", encode(rgb, "TIFF", compression=name, strip_size=900)
        yield f"{name}, big", encode(rgb, "TIFF", compression=name, big_tiff=True)
    for name in ("group3", "group4", "tiff_ccitt"):
        yield name, encode(modes["1"], "TIFF", compression=name)
    for name in ("lzma", "zstd", "webp"):
        try:
            yield name, encode(rgb, "TIFF", compression=name)
        except (OSError, RuntimeError):  # libtiff is built without it
            continue
    yield "predictor", encode(rgb, "TIFF", compression="tiff_lzw", tiffinfo={317: 2})
    yield "pages", encode(rgb, "TIFF", save_all=True, append_images=[rgb, rgb.convert("L")])
    yield "turned", encode(rgb, "TIFF", tiffinfo={274: 6})
    yield "described", encode(rgb, "TIFF", description="words" * 2000, icc_profile=rng.bytes(9000))
    yield "bytes behind it", encode(rgb, "TIFF") + bytes(500)
    yield "big-endian", _raw_tiff(rng, ">")
    yield "directory at the end", _raw_tiff(rng, "<")
    yield "planar", _raw_tiff(rng, "<", planar=True)
    yield "tiled", _raw_tiff(rng, "<", tiled=True)


def _raw_tiff(
    rng: np.random.Generator, order: str, *, planar: bool = False, tiled: bool = False
) -> bytes:
    """Uncompressed, 64 x 48 RGB, the directory behind the pixels, as libtiff writes it."""
    width, height, part = 64, 48, 3072
    pixels = rng.bytes(width * height * 3)
    if tiled:  # 16 x 16
        part = 16 * 16 * 3
    places = [8 + start for start in range(0, len(pixels), part)]
    arrays = 8 + len(pixels)
    bits = arrays + 8 * len(places)
    entries = [
        (256, 3, 1, width),
        (257, 3, 1, height),
        (258, 3, 3, bits),
        (259, 3, 1, 1),
        (262, 3, 1, 2),
        *([] if tiled else [(273, 4, len(places), arrays)]),
        (277, 3, 1, 3),
        *([] if tiled else [(278, 3, 1, part // (width * (1 if planar else 3)))]),
        *([] if tiled else [(279, 4, len(places), arrays + 4 * len(places))]),
        (284, 3, 1, 2 if planar else 1),
        *([(322, 3, 1, 16), (323, 3, 1, 16)] if tiled else []),
        *([(324, 4, len(places), arrays)] if tiled else []),
        *([(325, 4, len(places), arrays + 4 * len(places))] if tiled else []),
    ]
    directory = struct.pack(f"{order}H", len(entries))
    for tag, kind, count, value in entries:
        is_short = kind == 3 and count == 1
        directory += struct.pack(f"{order}HHI", tag, kind, count)
        directory += struct.pack(
            f"{order}HH" if is_short else f"{order}I", value, *([0] * is_short)
        )
    return b"".join(
        [
            b"II*\0" if order == "<" else b"MM\0*",
            struct.pack(f"{order}I", bits + 6),
            pixels,
            struct.pack(f"{order}{len(places)}I", *places),
            struct.pack(f"{order}{len(places)}I", *[part] * len(places)),
            struct.pack(f"{order}3H", 8, 8, 8),
            directory,
            struct.pack(f"{order}I", 0),
        ]
    )


def _webp(rng: np.random.Generator) -> Iterator[tuple[str, bytes]]:
    if not features.check("webp"):
        return
    rgb = photo(rng)
    alpha = rgb.copy()
    alpha.putalpha(Image.fromarray(rng.integers(0, 256, (rgb.height, rgb.width), np.uint8)))
    for name, image in {"plain": rgb, "alpha": alpha, "grey": rgb.convert("L")}.items():
        for lossless in (False, True):
            kind = "lossless" if lossless else "lossy"
            yield f"{name}, {kind}", encode(image, "WEBP", lossless=lossless)
            yield (
                f"{name}, {kind}, profile",
                encode(image, "WEBP", lossless=lossless, icc_profile=rng.bytes(5001)),
            )
    yield "large", encode(photo(rng, 640, 480), "WEBP")
    yield "large, lossless", encode(photo(rng, 640, 480), "WEBP", lossless=True)
    yield "one pixel", encode(rgb.crop((0, 0, 1, 1)), "WEBP")
    for quality, method in ((0, 0), (30, 3), (100, 6)):
        yield f"quality {quality}", encode(rgb, "WEBP", quality=quality, method=method)
        options = {"quality": quality, "method": method, "lossless": True}
        yield f"lossless {quality}", encode(rgb, "WEBP", **options)
    yield "exact", encode(alpha, "WEBP", lossless=True, exact=True)
    yield "raw alpha", encode(alpha, "WEBP", alpha_quality=0)
    turned = Image.Exif()
    turned[0x112] = 6
    yield "turned", encode(rgb, "WEBP", exif=turned, xmp=b"<x/>")
    for lossless in (False, True):
        options = {"save_all": True, "append_images": [photo(rng)], "lossless": lossless}
        yield f"animated {lossless}", encode(rgb, "WEBP", **options)
        yield f"animated {lossless}, alpha", encode(alpha, "WEBP", **options)
    yield "bytes behind it", encode(rgb, "WEBP") + bytes(500)
