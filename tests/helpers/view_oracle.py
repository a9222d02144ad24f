"""Views from their definition, in float64 numpy: the oracle of whatever makes views.

A view takes a box of the image, resizes it to S x S, flips it, and, if it has operations, is cut to
whole levels and goes through them; then it is normalized. Of the product nothing is used but the
names of the operations and the class that holds plans.

- The box may reach beyond the image; np.pad says what is there.
- Along an axis, output i of S is centerd at (i + 0.5) n / S of the n pixels of the box, and pixel j
  weighs f((j + 0.5 - center) / widen); f is the triangle of radius 1 or Keys' cubic with a = -0.5,
  widen is 1, or with antialiasing max(n / S, 1). Weights sum to 1; beyond the box its edge pixel is
  repeated, so what a weight out there would take, the edge pixel takes. As a matrix [S, n] it is
  slow, and there is nothing in it to get wrong.
- Operations are Pillow's, from integer formulas (float32 or float64 where Pillow has them, in its
  order of operations, because a level more or less hangs on the last digit).
  tests/unit/test_view_operations.py compares them with Pillow itself. Moves are not Pillow's, which
  counts in 1/65536 of a pixel: they take the pixel that the float64 matrix points to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fastaug.views.plan import ViewPlans
from fastaug.views.randaugment import NAMES

Layers = Sequence[tuple[str, tuple[float, ...]]]
"""Operations of a view, one after another: names and arguments."""

PAD_MODES = {"reflect": "reflect", "mirror": "symmetric", "edge": "edge", "fill": "constant"}
INTERPOLATIONS = ("bicubic", "bilinear")
NORMALIZATION = {
    "imagenet": ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    "cifar": ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
    None: ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
FILL = 128
LEVEL_TIE = 0.003
"""Of a level: sums of weights are not quite 1 in fp32, and a flat image is to keep its level."""
MOVE_TIE = 2.0**-8
"""Of a pixel: what a shear puts half way between two rows goes to the upper one."""


def view_levels(
    image: np.ndarray,
    box: Sequence[int],
    size: int,
    flip: bool = False,
    layers: Layers = (),
    *,
    interpolation: str = "bicubic",
    antialias: bool = False,
    border: str = "reflect",
) -> np.ndarray:
    """[H, W, 3] uint8 -> the view [S, S, 3] in levels: float64, whole ones if it has layers."""
    box_levels = crop(image, box, border).astype(np.float64)
    down = weights(box_levels.shape[0], size, interpolation, antialias)
    across = weights(box_levels.shape[1], size, interpolation, antialias)
    view = np.tensordot(across, np.tensordot(down, box_levels, 1), (1, 1)).transpose(1, 0, 2)
    if flip:
        view = view[:, ::-1]
    return operate(cut(view), layers).astype(np.float64) if len(layers) else view


def normalized(levels: np.ndarray, kind: str | None) -> np.ndarray:
    mean, deviation = NORMALIZATION[kind]
    return (levels - mean) / deviation


# --- box and resizing ---


def crop(image: np.ndarray, box: Sequence[int], border: str) -> np.ndarray:
    """The pixels of the box top, left, height, width; np.pad makes those beyond the image."""
    top, left, height, width = (int(number) for number in box)
    above, before = max(0, -top), max(0, -left)
    below, after = max(0, top + height - len(image)), max(0, left + width - len(image[0]))
    how: dict = {"constant_values": FILL} if border == "fill" else {}
    pads = ((above, below), (before, after), (0, 0))
    padded = np.pad(image, pads, mode=PAD_MODES[border], **how)
    return padded[top + above :, left + before :][:height, :width]


def weights(length: int, size: int, interpolation: str, antialias: bool) -> np.ndarray:
    """[size, length]: what each source pixel gives to each output."""
    scale = length / size
    widen = max(scale, 1) if antialias else 1
    reach = math.ceil(2 * widen) + 1
    pixel = np.arange(-reach, length + reach)
    center = (np.arange(size)[:, None] + 0.5) * scale
    found = _filter(np.abs(pixel + 0.5 - center) / widen, interpolation)
    found /= found.sum(axis=1, keepdims=True)
    folded = np.zeros((size, length))
    np.add.at(folded, (slice(None), pixel.clip(0, length - 1)), found)
    return folded


def _filter(x: np.ndarray, interpolation: str) -> np.ndarray:
    if interpolation == "bilinear":
        return np.maximum(1 - x, 0)
    near = 1.5 * x**3 - 2.5 * x**2 + 1
    far = -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def cut(levels: np.ndarray) -> np.ndarray:
    """To whole levels, as operations take them; in the dtype of what is given."""
    tie = levels.dtype.type(LEVEL_TIE)
    return np.floor(levels.clip(0, 255) + tie).clip(0, 255).astype(np.uint8)


# --- operations: [S, S, 3] uint8 -> [S, S, 3] uint8 ---


def operate(image: np.ndarray, layers: Layers) -> np.ndarray:
    for name, arguments in layers:
        image = operation(image, name, *arguments)
    return image


def operation(image: np.ndarray, name: str, *args: float) -> np.ndarray:
    levels = image.astype(np.int64)
    match name:
        case "invert":
            found = 255 - levels
        case "posterize":
            lost = 2 ** (8 - int(args[0]))
            found = levels // lost * lost
        case "solarize":
            found = np.where(levels < args[0], levels, 255 - levels)
        case "solarize_add":
            found = np.where(levels < 128, (levels + int(args[0])).clip(0, 255), levels)
        case "auto_contrast" | "equalize":
            table = _stretched if name == "auto_contrast" else _equalized
            found = np.stack([table(levels[..., c])[levels[..., c]] for c in range(3)], axis=-1)
        case "color":
            found = _blend(_grey(levels)[..., None], levels, args[0])
        case "contrast":
            grey = _grey(levels)
            mean = (2 * grey.sum() + grey.size) // (2 * grey.size)  # halves go up
            found = _blend(mean, levels, args[0])
        case "brightness":
            found = _blend(np.int64(0), levels, args[0])
        case "sharpness":
            found = _blend(_smooth(levels), levels, args[0])
        case "cutout":
            left, top, right, bottom = (int(edge) for edge in args)
            found = levels.copy()
            found[top:bottom, left:right] = FILL
        case _:
            found = _moved(levels, _matrix(name, args[0], len(image)))
    return found.astype(np.uint8)


def _stretched(levels: np.ndarray) -> np.ndarray:
    """Table of 256: the darkest level to 0, the lightest to 255. Pillow's own roundings, by which
    the lightest may become 254."""
    low, high = int(levels.min()), int(levels.max())
    if low == high:
        return np.arange(256)
    scale = 255.0 / (high - low)
    return np.array([int(level * scale + -low * scale) for level in range(256)]).clip(0, 255)


def _equalized(levels: np.ndarray) -> np.ndarray:
    """Table of 256: pixels below a level in steps of 1/255 of those below the lightest one."""
    counts = np.bincount(levels.ravel(), minlength=256)
    step = (levels.size - counts[levels.max()]) // 255
    if step == 0:
        return np.arange(256)
    below = counts.cumsum() - counts
    return ((below + step // 2) // step).clip(0, 255)


def _grey(levels: np.ndarray) -> np.ndarray:
    return (levels @ np.array([19595, 38470, 7471]) + 32768) >> 16


def _smooth(levels: np.ndarray) -> np.ndarray:
    """Of 3 x 3 pixels, the middle one counted five times, / 13, to the nearest; edges stay."""
    rows = levels[:-2] + levels[1:-1] + levels[2:]
    around = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:] + 4 * levels[1:-1, 1:-1]
    found = levels.copy()
    found[1:-1, 1:-1] = (2 * around + 13) // 26
    return found


def _blend(degenerate: np.ndarray, levels: np.ndarray, factor: float) -> np.ndarray:
    start = degenerate.astype(np.float32)
    mixed = start + np.float32(factor) * (levels.astype(np.float32) - start)
    return np.trunc(mixed.clip(0, 255))


def _matrix(name: str, value: float, size: int) -> tuple[float, ...]:
    """a, b, c, d, e, f: pixel (x, y) comes from (a x + b y + c, d x + e y + f)."""
    if name == "rotate":  # about the center of the view
        cos, sin, center = np.cos(np.radians(value)), np.sin(np.radians(value)), (size - 1) / 2
        return (cos, -sin, center * (1 - cos + sin), sin, cos, center * (1 - sin - cos))
    return {
        "shear_x": (1, value, MOVE_TIE, 0, 1, MOVE_TIE),
        "shear_y": (1, 0, MOVE_TIE, value, 1, MOVE_TIE),
        "translate_x": (1, 0, value + MOVE_TIE, 0, 1, MOVE_TIE),
        "translate_y": (1, 0, MOVE_TIE, 0, 1, value + MOVE_TIE),
    }[name]


def _moved(levels: np.ndarray, matrix: tuple[float, ...]) -> np.ndarray:
    """The pixel nearest to where the matrix points, FILL from outside."""
    a, b, c, d, e, f = matrix
    size = len(levels)
    y, x = np.mgrid[:size, :size]
    column, row = np.floor(a * x + b * y + (c + 0.5)), np.floor(d * x + e * y + (f + 0.5))
    inside = (column >= 0) & (column < size) & (row >= 0) & (row < size)
    found = np.full_like(levels, FILL)
    found[inside] = levels[row[inside].astype(int), column[inside].astype(int)]
    return found


# --- plans and pictures for tests ---


def plans_of(
    boxes: Sequence[Sequence[Sequence[int]]],
    size: int,
    flips: Sequence[Sequence[bool]] | None = None,
    layers: Sequence[Sequence[Layers]] | None = None,
) -> ViewPlans:
    """[B, K] boxes, flips and layers (of the same number for every view) -> plans."""
    shape = np.shape(boxes)[:2]
    count = len(layers[0][0]) if layers else 0
    operations = np.zeros((*shape, count), np.int32)
    arguments = np.zeros((*shape, count, 4))
    for b, k, n in np.ndindex(operations.shape):
        name, given = layers[b][k][n]  # type: ignore[index]
        operations[b, k, n] = NAMES.index(name)
        arguments[b, k, n, : len(given)] = given
    return ViewPlans(
        boxes=np.asarray(boxes, np.int32),
        flips=np.zeros(shape, bool) if flips is None else np.asarray(flips, bool),
        operations=operations,
        arguments=arguments,
        size=size,
    )


def photograph(seed: int, height: int, width: int) -> np.ndarray:
    """Slopes and noise, and not over the full range, so that every operation shows."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / max(height, width)
    smooth = np.stack([x, y, (x + y) / 2], axis=-1) * 150 + 40
    return (smooth + rng.normal(0, 10, smooth.shape)).clip(0, 255).astype(np.uint8)


def noise(seed: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def pictures(side: int) -> dict[str, np.ndarray]:
    """[side, side, 3] uint8 each: what is easy, and what operations divide by zero on."""
    rng = np.random.default_rng(side)
    shape = (side, side, 3)
    slope = np.linspace(0, 255, side * side).reshape(side, side, 1)
    return {
        "photograph": photograph(side, side, side),
        "noise": noise(side, side, side),
        "dark noise": rng.integers(3, 30, shape).astype(np.uint8),
        "gradient": np.broadcast_to(slope, shape).astype(np.uint8),
        "two levels": rng.choice([60, 200], shape).astype(np.uint8),
        "black": np.zeros(shape, np.uint8),
        "white": np.full(shape, 255, np.uint8),
        "grey": np.full(shape, 77, np.uint8),
    }


# Operations and arguments that reach both ends of each range.
OPERATION_CASES = [
    ("auto_contrast", ()),
    ("equalize", ()),
    ("invert", ()),
    *(("posterize", (bits,)) for bits in (0, 1, 2, 4)),
    *(("solarize", (threshold,)) for threshold in (0, 128, 256)),
    *(("solarize_add", (addition,)) for addition in (0, 55, 110)),
    *((n, (f,)) for n in ("color", "contrast", "brightness", "sharpness") for f in (0.1, 1.0, 1.9)),
    *(("rotate", (angle,)) for angle in (0.0, 15.0, -15.0, 30.0)),
    *((n, (s,)) for n in ("shear_x", "shear_y") for s in (0.15, -0.3)),
    *((n, (p,)) for n in ("translate_x", "translate_y") for p in (5.0, -7.3)),
    ("cutout", (3, 0, 11, 8)),
]
