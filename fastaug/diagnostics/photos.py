"""Generated JPEGs that cost decoders and crops what photographs do.

Overlapping leaves of all sizes, each with its color and roughness, under noise with the falling
spectrum of photographs. Fitted to 100 photographs of ImageNet; medians of both: 0.60 and 0.59
bytes a pixel, 7.5 and 8.0 ns a pixel to decode by Pillow, 6.3 and 6.1 by DALI (one thread); power
falls with the frequency to the -2.7 and -2.4. cifar_like() cuts small images out of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from fastaug.errors import DataError
from fastaug.runtime.cache import cache_dir, cache_write, unfinished_folder

VERSION = 1
"""Part of the folder's name and of every seed; increase it when the drawing changes."""
CLASSES = ("bark", "field", "market", "shore")
PER_CLASS = {"train": 64, "val": 2}
LONG, SHORT = (488, 512), (351, 399)
"""Ranges of the sides in pixels, around 500 x 375; one picture in four is upright."""
SHARE_WHOLE = 0.66
"""Share of pictures at quality 96 and 4:4:4; the others have quality 80 and 4:2:0."""
LEAVES = 110
DETAIL = (32.0, 0.7)
"""Standard deviation of the noise where it is roughest: median over pictures, spread of its log."""
TILE = 512
SMALL, SMALL_COUNTS = 32, {"train": 50_000, "test": 100}
"""Side and number of the small images: the same as CIFAR's, more than a core's cache holds."""
REDUCED = 4
"""Factor by which photos are reduced before small images are cut out of them."""


def photo_folder(cache: Path | None = None) -> Path:
    """The folder with {train,val}/<class>/NN.jpg; generated (about 5 s) if missing."""
    root = (cache or cache_dir()) / f"photos-v{VERSION}"
    with _errors_named(root):
        if not root.is_dir():
            _make_photos(root)
    return root


def cifar_like(cache: Path | None = None) -> Path:
    """An .npz of 32-pixel crops of the photos, with CIFAR's number of images, cached."""
    file = (cache or cache_dir()) / f"cifar-like-v{VERSION}.npz"
    with _errors_named(file):
        if not file.is_file():
            _make_small(file, photo_folder(cache))
    return file


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write pictures to {path} ({error.strerror or error}); "
            "free some space there, or set FASTAUG_CACHE to another folder"
        ) from error


def _make_small(file: Path, photos: Path) -> None:
    print(f"generating {SMALL_COUNTS['train']:,} images of {SMALL} px, once, in {file}", flush=True)
    arrays: dict[str, np.ndarray] = {"classes": np.array(CLASSES)}
    for place, (split, folder) in enumerate({"train": "train", "test": "val"}.items()):
        rng = np.random.default_rng([VERSION, SMALL, place])
        sources = []
        for path in sorted((photos / folder).glob("*/*.jpg")):
            with Image.open(path) as photo:
                label = CLASSES.index(path.parent.name)
                sources.append((np.asarray(photo.reduce(REDUCED)), label))
        images = np.empty((SMALL_COUNTS[split], SMALL, SMALL, 3), np.uint8)
        labels = np.empty(len(images), np.int64)
        for i, image in enumerate(images):
            source, labels[i] = sources[i % len(sources)]
            top, left = (int(rng.integers(side - SMALL + 1)) for side in source.shape[:2])
            image[:] = source[top : top + SMALL, left : left + SMALL]
        arrays |= {f"{split}_images": images, f"{split}_labels": labels}
    with cache_write(file) as unfinished, unfinished.open("wb") as out:
        np.savez(out, **arrays)  # type: ignore[arg-type]


def _make_photos(root: Path) -> None:
    """Write to a sibling of root and rename it, so that root is complete whenever it exists."""
    unfinished = unfinished_folder(root)
    count = len(CLASSES) * PER_CLASS["train"]
    try:
        print(f"generating {count} photo-like pictures, once, in {root}", flush=True)
        for place, (split, number) in enumerate(PER_CLASS.items()):
            for label, name in enumerate(CLASSES):
                folder = unfinished / split / name
                folder.mkdir(parents=True)
                for i in range(number):
                    save_picture(folder / f"{i:02}.jpg", (place, label, i))
        unfinished.rename(root)
    except OSError:
        if not root.is_dir():  # otherwise another process was first, with the same pictures
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def save_picture(file: Path, name: tuple[int, ...]) -> None:
    """A picture depends only on its name, not on the order of generation."""
    rng = np.random.default_rng([VERSION, *name])
    quality, subsampling = (96, "4:4:4") if rng.random() < SHARE_WHOLE else (80, "4:2:0")
    draw_picture(rng).save(file, quality=quality, subsampling=subsampling)


def draw_picture(rng: np.random.Generator) -> Image.Image:
    width, height = (int(rng.integers(*side, endpoint=True)) for side in (LONG, SHORT))
    if rng.random() < 0.25:
        width, height = height, width
    colors, roughness = _leaves(rng, width, height)
    colors = colors.filter(ImageFilter.GaussianBlur(0.6))  # as sharp as a lens draws an edge
    detail = DETAIL[0] * np.exp(rng.normal(0, DETAIL[1]))
    texture = _texture(rng, width, height)
    texture *= np.asarray(roughness, np.float32)[..., None] * (detail / 255)
    return Image.fromarray((np.asarray(colors) + texture).clip(0, 255).astype(np.uint8))


def _leaves(rng: np.random.Generator, width: int, height: int) -> tuple[Image.Image, Image.Image]:
    """Color, and roughness from 0 to 255, of each pixel: large leaves first, small ones on top."""
    shades = rng.choice((0, 60, 130, 200, 255), (6, 1))
    palette = 0.6 * shades + 0.4 * rng.integers(0, 256, (6, 3))
    ground = tuple(int(level) for level in palette[0])
    colors = Image.new("RGB", (width, height), ground)
    roughness = Image.new("L", (width, height), 80)
    draw_color, draw_roughness = ImageDraw.Draw(colors), ImageDraw.Draw(roughness)
    radii = np.sort(8 / rng.random(LEAVES).clip(8 / 300, 1))[::-1]
    for radius in radii:
        x, y = rng.random(2) * (width, height)
        reach = radius * rng.uniform(0.5, 1, 2)
        box = (x - reach[0], y - reach[1], x + reach[0], y + reach[1])
        color = palette[rng.integers(len(palette))] + rng.integers(-20, 21, 3)
        draw_color.ellipse(box, tuple(int(level) for level in color.clip(0, 255)))
        draw_roughness.ellipse(box, int(255 * (0.12 + 0.88 * rng.random() ** 2)))
    return colors, roughness.filter(ImageFilter.GaussianBlur(2))


def _texture(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """[height, width, 3] fp32 with standard deviation 1: a part of the tile, which wraps around."""
    shift = tuple(rng.integers(0, TILE, 2))
    return np.roll(_tile(), shift, (0, 1))[:height, :width].copy()


@lru_cache(maxsize=1)
def _tile() -> np.ndarray:
    """[TILE, TILE, 3] fp32: noise, its amplitude falling with the frequency, almost grey."""
    rng = np.random.default_rng(VERSION)
    frequency = np.hypot(np.fft.fftfreq(TILE)[:, None], np.fft.rfftfreq(TILE))
    amplitude = 1 / frequency.clip(1 / TILE) ** 0.8
    noise = rng.normal(size=(4, TILE, TILE))
    grey, *colors = np.fft.irfft2(np.fft.rfft2(noise) * amplitude)
    tile = grey[..., None] + 0.1 * np.stack(colors, -1)
    return (tile / tile.std()).astype(np.float32)
