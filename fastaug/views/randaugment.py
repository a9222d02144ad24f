"""RandAugment: the table of its operations, how they are drawn, and their reference with Pillow.

OPERATIONS is the one place that lists NFNet's 16 operations. To add one, add an entry here and its
code to cuda/operations.h; for --views-engine dali, also its graph to pipelines/randaugment.py.

Operations are drawn uniformly with replacement and always applied. Geometric operations take the
nearest pixel, and 128 outside the view. Color operations are Pillow's, which NFNet's TensorFlow
versions follow to within 1 of 255; except contrast, which there blends with the number of pixels /
256 where Pillow takes the mean gray value, as was intended. At the paper's magnitude of 5 that
operation changes nothing either way.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

FILL = (128, 128, 128)
MAX_MAGNITUDE = 10.0
REFERENCE_SIZE = 224
"""View size in pixels that translate and cutout are stated for; they scale with the view."""
NUMBERS_PER_LAYER = 3
"""Random numbers that a layer takes: the choice, and two for its sign or its place."""
MAX_ARGUMENTS = 4


@dataclass(frozen=True)
class Operation:
    """An operation with its final arguments: nothing random is left in it."""

    name: str
    arguments: tuple[float, ...] = ()


@dataclass(frozen=True)
class OperationSpec:
    """An operation of the table: how it is drawn, computed by the reference, and encoded."""

    name: str
    apply: Callable[..., Image.Image]
    """Reference implementation: (image, *arguments) -> image."""
    level: Callable[[float, int], float] = lambda strength, size: 0.0
    """(strength from 0 to 1, view size) -> the argument, without its sign."""
    arguments: int = 1
    """0; 1: the level; 4: left, top, right, bottom of a square that reaches `level` pixels in each
    direction from a random pixel."""
    signed: bool = False
    """The level is negative half of the time."""
    unchanged_at: float = math.nan
    """The argument at which the operation changes nothing; NaN: there is none."""
    encode: Callable[[np.ndarray, int], np.ndarray] | None = None
    """(first arguments [M], view size) -> [M, 1 to 6], what the kernels take instead of the
    arguments."""
    kernel: str = ""
    """Entry of `enum Operation` in cuda/operations.h; default: the name in capitals."""
    dali: str = ""
    """Graph in pipelines/randaugment.py that computes it; default: the name."""
    needs_second_buffer: bool = False
    """The kernel cannot work in place, as `needs_second_buffer` of cuda/operations.h says."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel", self.kernel or self.name.upper())
        object.__setattr__(self, "dali", self.dali or self.name)


def has_reference() -> bool:
    """True if Pillow is there. Drawing, encoding and the kernels do not need it."""
    return find_spec("PIL") is not None


def _pillow(module: str) -> Any:
    """A module of Pillow, imported on first use."""
    return import_module(f"PIL.{module}")


# --- geometric operations ---

_TIE = 2.0**-8
"""Pixels added to a shear or translation. A shear moves whole rows half way between two; this
resolves the tie to the upper one, in fp32 as in fp64."""


def _matrix(*entries: float | np.ndarray) -> np.ndarray:
    """a, b, c, d, e, f -> [..., 6]: pixel (x, y) comes from (a x + b y + c, d x + e y + f)."""
    return np.stack(np.broadcast_arrays(*entries), axis=-1).astype(np.float64)


def _rotation(degrees: np.ndarray, size: int) -> np.ndarray:
    """About the center of the view."""
    cos, sin, center = np.cos(np.radians(degrees)), np.sin(np.radians(degrees)), (size - 1) / 2
    return _matrix(cos, -sin, center * (1 - cos + sin), sin, cos, center * (1 - sin - cos))


def _geometric(
    name: str,
    level: Callable[[float, int], float],
    matrix: Callable[[np.ndarray, int], np.ndarray],
) -> OperationSpec:
    """An operation that moves pixels: each takes the nearest pixel to its source, or FILL.

    Not Pillow's transform, which computes in 1/65536 of a pixel and resolves ties differently.
    """

    def apply(image: Image.Image, value: float) -> Image.Image:
        size = image.width
        a, b, c, d, e, f = matrix(np.array(value, np.float64), size)
        x, y = np.arange(size), np.arange(size)[:, None]
        column = np.floor(a * x + b * y + (c + 0.5)).astype(np.intp)
        row = np.floor(d * x + e * y + (f + 0.5)).astype(np.intp)
        outside = (column < 0) | (column >= size) | (row < 0) | (row >= size)
        moved = np.asarray(image)[row.clip(0, size - 1), column.clip(0, size - 1)]
        moved[outside] = FILL
        return _pillow("Image").fromarray(moved)

    return OperationSpec(
        name,
        apply,
        level,
        signed=True,
        encode=matrix,
        kernel="MOVE",
        dali="move",
        needs_second_buffer=True,
    )


def _shear(strength: float, size: int) -> float:
    return 0.3 * strength


def _translation(strength: float, size: int) -> float:
    return 100 * strength * (size / REFERENCE_SIZE)


# --- color operations ---


def _of_image_ops(name: str) -> Callable[..., Image.Image]:
    return lambda image, *arguments: getattr(_pillow("ImageOps"), name)(image, *arguments)


def _blend(name: str, enhancer: str, in_place: bool = True) -> OperationSpec:
    """An operation that blends the image with another by a factor; 1 is the image itself."""
    return OperationSpec(
        name,
        lambda image, factor: getattr(_pillow("ImageEnhance"), enhancer)(image).enhance(factor),
        lambda strength, size: 0.1 + 1.8 * strength,
        unchanged_at=1.0,
        needs_second_buffer=not in_place,
    )


def _posterize(image: Image.Image, bits: float) -> Image.Image:
    mask = 0xFF << (8 - int(bits)) & 0xFF
    return image.point([value & mask for value in range(256)] * 3)


def _posterize_mask(bits: np.ndarray, size: int) -> np.ndarray:
    """The mask of the bits that are kept."""
    return 256 - 2.0 ** (8 - bits.clip(0, 8).astype(int))[:, None]


def _solarize_add(image: Image.Image, addition: float) -> Image.Image:
    return image.point([min(i + int(addition), 255) if i < 128 else i for i in range(256)] * 3)


def _cutout(image: Image.Image, *box: float) -> Image.Image:
    left, top, right, bottom = (int(edge) for edge in box)
    image = image.copy()
    image.paste(FILL, (left, top, right, bottom))
    return image


# The order is part of the random stream: a plan holds positions in this table.
OPERATIONS = (
    OperationSpec("auto_contrast", _of_image_ops("autocontrast"), arguments=0),
    OperationSpec("equalize", _of_image_ops("equalize"), arguments=0),
    OperationSpec("invert", _of_image_ops("invert"), arguments=0, dali="solarize"),  # from 0 on
    _geometric("rotate", lambda strength, size: 30 * strength, _rotation),
    OperationSpec(
        "posterize", _posterize, lambda strength, size: int(4 * strength), encode=_posterize_mask
    ),
    OperationSpec(
        "solarize", _of_image_ops("solarize"), lambda strength, size: int(256 * strength)
    ),
    OperationSpec("solarize_add", _solarize_add, lambda strength, size: int(110 * strength)),
    _blend("color", "Color"),
    _blend("contrast", "Contrast"),
    _blend("brightness", "Brightness"),
    _blend("sharpness", "Sharpness", in_place=False),
    _geometric("shear_x", _shear, lambda value, size: _matrix(1, value, _TIE, 0, 1, _TIE)),
    _geometric("shear_y", _shear, lambda value, size: _matrix(1, 0, _TIE, value, 1, _TIE)),
    _geometric("translate_x", _translation, lambda v, size: _matrix(1, 0, v + _TIE, 0, 1, _TIE)),
    _geometric("translate_y", _translation, lambda v, size: _matrix(1, 0, _TIE, 0, 1, v + _TIE)),
    OperationSpec(
        "cutout",
        _cutout,
        lambda strength, size: int(40 * strength * (size / REFERENCE_SIZE)),
        arguments=4,
    ),
)
NAMES = tuple(spec.name for spec in OPERATIONS)
DALI_NAMES = (
    *("translate_x", "translate_y", "shear_x", "shear_y", "rotate"),
    *("brightness", "contrast", "color", "sharpness"),
    *("posterize", "solarize", "equalize", "auto_contrast", "identity"),
)
"""Operations of DALI's own policy, in its order; pipelines/randaugment.py applies them."""
_BY_NAME = dict(zip(NAMES, OPERATIONS, strict=True))
_SIGNED = np.array([spec.signed for spec in OPERATIONS])
_UNCHANGED_AT = np.array([spec.unchanged_at for spec in OPERATIONS])


def table_fingerprint() -> str:
    """Identifies the table: with another one, the same random numbers draw other operations."""
    return f"{len(NAMES)} operations, {hashlib.sha256(' '.join(NAMES).encode()).hexdigest()[:8]}"


def draw_operations(
    numbers: np.ndarray, policy: str, magnitude: float, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Uniform numbers [..., N, 3] -> operations [..., N], arguments [..., N, 4] (unused ones 0).

    Positions in OPERATIONS with arguments; or in DALI_NAMES, with the sign of the magnitude.
    """
    names = NAMES if policy == "nfnet" else DALI_NAMES
    operations = (numbers[..., 0] * len(names)).astype(np.int32)
    sign = np.where(numbers[..., 1] < 0.5, 1.0, -1.0)
    arguments = np.zeros((*operations.shape, MAX_ARGUMENTS))
    if policy == "dali":
        arguments[..., 0] = sign
        return operations, arguments
    levels = np.array([float(spec.level(magnitude / MAX_MAGNITUDE, size)) for spec in OPERATIONS])
    level = levels[operations]
    arguments[..., 0] = np.where(_SIGNED[operations], sign * level, level)
    for place, spec in enumerate(OPERATIONS):
        if spec.arguments == 4:
            chosen = operations == place
            arguments[chosen] = _squares(numbers[chosen], int(levels[place]), size)
    return operations, arguments


def _squares(numbers: np.ndarray, reach: int, size: int) -> np.ndarray:
    """left, top, right, bottom of squares around random pixels, clipped to the view."""
    center = np.floor(numbers[..., [2, 1]] * size)
    return np.concatenate([center - reach, center + reach], axis=-1).clip(0, size)


def unchanged_mask(operations: np.ndarray, arguments: np.ndarray) -> np.ndarray:
    """[...], [..., 4] -> [...]: True where an operation changes nothing at its argument."""
    return arguments[..., 0] == _UNCHANGED_AT[operations]


def apply_operations(view: np.ndarray, operations: tuple[Operation, ...]) -> np.ndarray:
    """[H, W, 3] uint8 -> [H, W, 3] uint8, by the reference."""
    image = _pillow("Image").fromarray(view)
    for operation in operations:
        image = _BY_NAME[operation.name].apply(image, *operation.arguments)
    return np.asarray(image)
