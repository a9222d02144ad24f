"""RandAugment: which operations a view gets, and NFNet's 16 of them on uint8 images.

Operations are drawn uniformly with replacement and always applied. Geometry takes the nearest
pixel, and 128 from outside. Color operations are Pillow's, which NFNet's TensorFlow versions
follow to within one level; except for contrast, which there blends with the number of pixels / 256
where Pillow takes the mean grey level, as was meant. At the paper's magnitude of 5 that operation
changes nothing either way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

FILL = (128, 128, 128)
MAX_LEVEL = 10.0
REFERENCE_SIZE = 224
"""Pixels that translate and cutout are stated for; other views scale them with their side."""
NUMBERS_PER_LAYER = 3
"""Random numbers that a layer takes: the choice, and two for its sign or its place."""

NAMES = (
    *("auto_contrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add"),
    *("color", "contrast", "brightness", "sharpness"),
    *("shear_x", "shear_y", "translate_x", "translate_y", "cutout"),
)
DALI_NAMES = (
    *("translate_x", "translate_y", "shear_x", "shear_y", "rotate"),
    *("brightness", "contrast", "color", "sharpness"),
    *("posterize", "solarize", "equalize", "auto_contrast", "identity"),
)
"""DALI's own list, in its order; pipelines/randaugment.py carries it out."""
MOVES = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
"""What moves pixels, by an amount that is positive or negative by chance."""


@dataclass(frozen=True)
class Operation:
    """An operation with its final arguments: nothing random is left in it."""

    name: str
    arguments: tuple[float, ...] = ()


def draw_operations(
    numbers: np.ndarray, policy: str, magnitude: float, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Uniform numbers [..., N, 3] -> operations [..., N], arguments [..., N, 4] (unused ones 0).

    Places in NAMES with NFNet's arguments; or in DALI_NAMES, with the sign of the magnitude alone.
    """
    names = NAMES if policy == "nfnet" else DALI_NAMES
    operations = (numbers[..., 0] * len(names)).astype(np.int32)
    sign = np.where(numbers[..., 1] < 0.5, 1.0, -1.0)
    arguments = np.zeros((*operations.shape, 4))
    if policy == "dali":
        arguments[..., 0] = sign
        return operations, arguments
    levels = _levels(magnitude / MAX_LEVEL, size)
    level = np.array([levels.get(name, 0.0) for name in names])[operations]
    signed = np.isin(operations, [names.index(name) for name in MOVES])
    arguments[..., 0] = np.where(signed, sign * level, level)
    is_cutout = operations == names.index("cutout")
    arguments[is_cutout] = _cutout_boxes(numbers[is_cutout], int(levels["cutout"]), size)
    return operations, arguments


def _levels(strength: float, size: int) -> dict[str, float]:
    """Each operation's argument at a strength of 0 to 1, without its sign."""
    factor = 0.1 + 1.8 * strength
    scale = size / REFERENCE_SIZE
    return {
        "rotate": 30 * strength,
        "posterize": int(4 * strength),
        "solarize": int(256 * strength),
        "solarize_add": int(110 * strength),
        **dict.fromkeys(("color", "contrast", "brightness", "sharpness"), factor),
        **dict.fromkeys(("shear_x", "shear_y"), 0.3 * strength),
        **dict.fromkeys(("translate_x", "translate_y"), 100 * strength * scale),
        "cutout": int(40 * strength * scale),
    }


def _cutout_boxes(numbers: np.ndarray, reach: int, size: int) -> np.ndarray:
    """left, top, right, bottom of squares around any pixel, clipped to the view."""
    center = np.floor(numbers[..., [2, 1]] * size)
    return np.concatenate([center - reach, center + reach], axis=-1).clip(0, size)


def argument_count(name: str) -> int:
    """How many of the four arguments an operation takes."""
    return {"auto_contrast": 0, "equalize": 0, "invert": 0, "cutout": 4}.get(name, 1)


def apply_operations(view: np.ndarray, operations: tuple[Operation, ...]) -> np.ndarray:
    """[H, W, 3] uint8 -> [H, W, 3] uint8, by NFNet's operations."""
    image = Image.fromarray(view)
    for operation in operations:
        image = _APPLY[operation.name](image, *operation.arguments)
    return np.asarray(image)


# --- what the operations do ---

_TIE = 2.0**-8
"""Of a pixel: a shear puts whole rows half way between two, which go to the upper one, in fp32 as
in fp64."""


def affine(name: str, value: np.ndarray | float, size: int) -> np.ndarray:
    """[...] -> [..., 2, 3]: pixel (x, y) comes from (a x + b y + c, d x + e y + f)."""
    value = np.asarray(value, np.float64)
    one, zero = np.ones_like(value), np.zeros_like(value)
    rows = {
        "shear_x": (one, value, zero, zero, one, zero),
        "shear_y": (one, zero, zero, value, one, zero),
        "translate_x": (one, zero, value, zero, one, zero),
        "translate_y": (one, zero, zero, zero, one, value),
    }
    if name == "rotate":  # about the center of the view
        cos, sin, center = np.cos(np.radians(value)), np.sin(np.radians(value)), (size - 1) / 2
        row = (cos, -sin, center * (1 - cos + sin), sin, cos, center * (1 - sin - cos))
    else:
        row = rows[name]
    matrix = np.stack(row, axis=-1).reshape(*value.shape, 2, 3)
    matrix[..., 2] += 0 if name == "rotate" else _TIE
    return matrix


def _move(name: str) -> Callable[[Image.Image, float], Image.Image]:
    """The pixel nearest to where the matrix points, FILL outside.

    Not Pillow's transform: it counts in 1/65536 of a pixel, which takes other pixels at ties.
    """

    def move(image: Image.Image, value: float) -> Image.Image:
        size = image.width
        (a, b, c), (d, e, f) = affine(name, value, size)
        x, y = np.arange(size), np.arange(size)[:, None]
        column = np.floor(a * x + b * y + (c + 0.5)).astype(np.intp)
        row = np.floor(d * x + e * y + (f + 0.5)).astype(np.intp)
        outside = (column < 0) | (column >= size) | (row < 0) | (row >= size)
        moved = np.asarray(image)[row.clip(0, size - 1), column.clip(0, size - 1)]
        moved[outside] = FILL
        return Image.fromarray(moved)

    return move


def _posterize(image: Image.Image, bits: float) -> Image.Image:
    mask = 0xFF << (8 - int(bits)) & 0xFF
    return image.point([level & mask for level in range(256)] * 3)


def _solarize_add(image: Image.Image, addition: float) -> Image.Image:
    return image.point([min(i + int(addition), 255) if i < 128 else i for i in range(256)] * 3)


def _cutout(image: Image.Image, *box: float) -> Image.Image:
    left, top, right, bottom = (int(edge) for edge in box)
    image = image.copy()
    image.paste(FILL, (left, top, right, bottom))
    return image


_APPLY: dict[str, Callable[..., Image.Image]] = {
    "auto_contrast": ImageOps.autocontrast,
    "equalize": ImageOps.equalize,
    "invert": ImageOps.invert,
    "posterize": _posterize,
    "solarize": ImageOps.solarize,
    "solarize_add": _solarize_add,
    "color": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "sharpness": lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
    "cutout": _cutout,
    **{name: _move(name) for name in MOVES},
}
