"""RandAugment with NFNet's 16 operations, on uint8 images of the size of a view.

Operations are drawn uniformly with replacement and always applied. Geometry takes the nearest
pixel, and 128 from outside. Colour operations are Pillow's, which NFNet's TensorFlow versions
follow to within one level; except for contrast, which there blends with the number of pixels / 256
where Pillow takes the mean grey level, as was meant. At the paper's magnitude of 5 that operation
changes nothing either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from fastaug.data.stream import Stream

FILL = (128, 128, 128)
MAX_LEVEL = 10.0
REFERENCE_SIZE = 224
"""Pixels that translate and cutout are stated for; other views scale them with their side."""


@dataclass(frozen=True)
class Operation:
    """An operation with its final arguments: nothing random is left in it."""

    name: str
    arguments: tuple[float, ...] = ()


def draw_operations(
    stream: Stream, size: int, layers: int, magnitude: float
) -> tuple[Operation, ...]:
    """N operations of strength M for a view of size x size pixels."""
    drawn = []
    for _ in range(layers):
        name = NAMES[stream.below(len(NAMES))]
        drawn.append(Operation(name, _ARGUMENTS[name](stream, magnitude / MAX_LEVEL, size)))
    return tuple(drawn)


def apply_operations(view: np.ndarray, operations: tuple[Operation, ...]) -> np.ndarray:
    """[H, W, 3] uint8 -> [H, W, 3] uint8."""
    image = Image.fromarray(view)
    for operation in operations:
        image = _APPLY[operation.name](image, *operation.arguments)
    return np.asarray(image)


# --- arguments: (stream, strength 0..1, side) -> the operation's arguments ---

Draw = Callable[[Stream, float, int], tuple[float, ...]]


def _nothing(stream: Stream, strength: float, size: int) -> tuple[float, ...]:
    return ()


def _whole(largest: int) -> Draw:
    return lambda stream, strength, size: (int(largest * strength),)


def _either_sign(largest: float) -> Draw:
    return lambda stream, strength, size: (_signed(stream, largest * strength),)


def _pixels_either_sign(largest: float) -> Draw:
    def draw(stream: Stream, strength: float, size: int) -> tuple[float, ...]:
        return (_signed(stream, largest * strength * size / REFERENCE_SIZE),)

    return draw


def _factor(stream: Stream, strength: float, size: int) -> tuple[float, ...]:
    return (0.1 + 1.8 * strength,)


def _cutout_box(stream: Stream, strength: float, size: int) -> tuple[float, ...]:
    """left, top, right, bottom of a square around any pixel, clipped to the view."""
    reach = int(40 * strength * size / REFERENCE_SIZE)
    y, x = stream.below(size), stream.below(size)
    return max(0, x - reach), max(0, y - reach), min(size, x + reach), min(size, y + reach)


def _signed(stream: Stream, value: float) -> float:
    return value if stream.uniform() < 0.5 else -value


_ARGUMENTS: dict[str, Draw] = {
    "auto_contrast": _nothing,
    "equalize": _nothing,
    "invert": _nothing,
    "rotate": _either_sign(30.0),
    "posterize": _whole(4),
    "solarize": _whole(256),
    "solarize_add": _whole(110),
    "color": _factor,
    "contrast": _factor,
    "brightness": _factor,
    "sharpness": _factor,
    "shear_x": _either_sign(0.3),
    "shear_y": _either_sign(0.3),
    "translate_x": _pixels_either_sign(100.0),
    "translate_y": _pixels_either_sign(100.0),
    "cutout": _cutout_box,
}
NAMES = tuple(_ARGUMENTS)


# --- what the operations do ---


def _posterize(image: Image.Image, bits: int) -> Image.Image:
    mask = 0xFF << (8 - bits) & 0xFF
    return image.point([level & mask for level in range(256)] * 3)


def _solarize_add(image: Image.Image, addition: int) -> Image.Image:
    return image.point([min(i + addition, 255) if i < 128 else i for i in range(256)] * 3)


def _cutout(image: Image.Image, left: int, top: int, right: int, bottom: int) -> Image.Image:
    image = image.copy()
    image.paste(FILL, (left, top, right, bottom))
    return image


def _rotate(image: Image.Image, degrees: float) -> Image.Image:
    """About the centre of the view."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x, y = (image.width - 1) / 2, (image.height - 1) / 2
    return _affine(image, cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y)


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    """Pixel (x, y) comes from the pixel nearest to (a x + b y + c, d x + e y + f), FILL outside.

    Not Pillow's transform: it counts in 1/65536 of a pixel, which takes other pixels at ties.
    """
    a, b, c, d, e, f = matrix
    x, y = np.arange(image.width), np.arange(image.height)[:, None]
    column = np.floor(a * x + b * y + (c + 0.5)).astype(np.intp)
    row = np.floor(d * x + e * y + (f + 0.5)).astype(np.intp)
    outside = (column < 0) | (column >= image.width) | (row < 0) | (row >= image.height)
    moved = np.asarray(image)[row.clip(0, image.height - 1), column.clip(0, image.width - 1)]
    moved[outside] = FILL
    return Image.fromarray(moved)


_APPLY: dict[str, Callable[..., Image.Image]] = {
    "auto_contrast": ImageOps.autocontrast,
    "equalize": ImageOps.equalize,
    "invert": ImageOps.invert,
    "rotate": _rotate,
    "posterize": _posterize,
    "solarize": ImageOps.solarize,
    "solarize_add": _solarize_add,
    "color": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "sharpness": lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
    "shear_x": lambda image, slope: _affine(image, 1, slope, 0, 0, 1, 0),
    "shear_y": lambda image, slope: _affine(image, 1, 0, 0, slope, 1, 0),
    "translate_x": lambda image, pixels: _affine(image, 1, 0, pixels, 0, 1, 0),
    "translate_y": lambda image, pixels: _affine(image, 1, 0, 0, 0, 1, pixels),
    "cutout": _cutout,
}
