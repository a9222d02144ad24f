"""View plans: the random decisions of views, as data.

Plans are drawn separately from the views, so that every engine makes the same ones: the plan of
view k of image i in epoch e depends only on (seed, e, i, k) and the image's size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fastaug.errors import DataError
from fastaug.views.config import ViewConfig
from fastaug.views.philox import uniforms_at
from fastaug.views.randaugment import NUMBERS_PER_LAYER, OPERATIONS, Operation, draw_operations

# A header can claim any size; 180 megapixels (Pillow's own bomb limit) are 0.5 GB decoded.
MAX_PIXELS = 180_000_000
PAD = 4
"""Pixels of reflection around the image for crop="pad"."""
ATTEMPTS = 10
RATIO = (3 / 4, 4 / 3)
LEAST_COVERED = 0.1
"""Minimum share of the image that a crop of TensorFlow's sampling covers."""
CENTRAL = 224 / 256
"""Side of the central crop relative to the shorter side of the image."""
_FLIP, _BOX = 0, 1
_LAYERS = _BOX + 4 * ATTEMPTS
"""Positions of the random numbers of flip, box and layers: RandAugment does not change the crop."""
_BOX_NUMBERS = {"pad": 2, "dali": 2 * ATTEMPTS + 2, "tf": 4 * ATTEMPTS}
"""Random numbers that each way of drawing a box takes."""


@dataclass(frozen=True)
class ViewPlan:
    """Crop a box of the image, resize it to the view, flip it, apply the operations.

    The box is in pixels of the image. With crop="pad" it may reach up to PAD pixels beyond the
    image, which is reflected at its edges.
    """

    top: int
    left: int
    height: int
    width: int
    flip: bool = False
    operations: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class ViewPlans:
    """The plans of K views of each of B images."""

    boxes: np.ndarray
    """[B, K, 4] int32: top, left, height, width in pixels of the image; see ViewPlan."""
    flips: np.ndarray
    """[B, K] bool."""
    operations: np.ndarray
    """[B, K, N] int32: indices into the policy's operations; N is 0 without RandAugment."""
    arguments: np.ndarray
    """[B, K, N, 4] float64."""
    size: int
    """Side of the views in pixels."""

    def of_image(self, place: int) -> list[ViewPlan]:
        """The K plans of one image, with NFNet's operations by name."""
        boxes, flips = self.boxes[place].tolist(), self.flips[place].tolist()
        operations = map(_named, self.operations[place], self.arguments[place])
        return [
            ViewPlan(top, left, height, width, flip, own)
            for (top, left, height, width), flip, own in zip(boxes, flips, operations, strict=True)
        ]


def _named(operations: np.ndarray, arguments: np.ndarray) -> tuple[Operation, ...]:
    specs = [OPERATIONS[operation] for operation in operations]
    return tuple(
        Operation(spec.name, tuple(row[: spec.arguments].tolist()))
        for spec, row in zip(specs, arguments, strict=True)
    )


def draw_plans(
    config: ViewConfig,
    seed: int,
    epoch: int,
    purpose: int,
    indices: np.ndarray,
    sizes: np.ndarray,
) -> ViewPlans:
    """indices: [B], positions in the data set; sizes: [B, 2], heights and widths -> their plans."""
    layers = config.randaugment_layers if config.augment == "randaugment" else 0
    shape = (len(indices), config.views)
    if config.crop == "pad":
        check_padded_sizes(sizes, config.size)
    if config.augment == "none":
        boxes = np.repeat(
            central_boxes(sizes, central_share(config))[:, None], config.views, axis=1
        )
        flips = np.zeros(shape, bool)
        return ViewPlans(boxes, flips, *_no_operations(shape), config.size)
    draw_boxes = {"pad": _padded_boxes, "dali": _dali_boxes, "tf": _tf_boxes}
    sampling = "pad" if config.crop == "pad" else config.crop_sampling
    # Only the numbers that are used: for CIFAR, drawing all would be most of the work.
    places = [range(_BOX + _BOX_NUMBERS[sampling])]
    if layers:
        places.append(range(_LAYERS, _LAYERS + NUMBERS_PER_LAYER * layers))
    numbers, *for_layers = uniforms_at(seed, epoch, purpose, indices, config.views, *places)
    height, width = sizes[:, None, 0].astype(np.float64), sizes[:, None, 1].astype(np.float64)
    boxes = draw_boxes[sampling](numbers[..., _BOX:], height, width, config)
    operations, arguments = _no_operations(shape)
    if layers:
        operations, arguments = draw_operations(
            for_layers[0].reshape(*shape, layers, NUMBERS_PER_LAYER),
            config.randaugment_policy,
            config.randaugment_magnitude,
            config.size,
        )
    return ViewPlans(boxes, numbers[..., _FLIP] < 0.5, operations, arguments, config.size)


def _no_operations(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((*shape, 0), np.int32), np.zeros((*shape, 0, 4))


def central_share(config: ViewConfig) -> float:
    """Side of an evaluation's view relative to the shorter side of the image. With crop="pad", the
    view is the whole image."""
    return 1.0 if config.crop == "pad" else CENTRAL


def central_boxes(sizes: np.ndarray, share: float) -> np.ndarray:
    """[B, 2] -> [B, 4]: the view of an evaluation, a square in the middle of the image."""
    side = np.rint(sizes.min(axis=1) * share).clip(1).astype(np.int32)
    return np.stack([*((sizes.T - side) // 2), side, side], axis=1).astype(np.int32)


# --- boxes: numbers [B, K, _BOX_NUMBERS], heights and widths [B, 1] -> [B, K, 4] int32 ---


def _padded_boxes(
    numbers: np.ndarray, height: np.ndarray, width: np.ndarray, config: ViewConfig
) -> np.ndarray:
    corner = np.floor(numbers * (2 * PAD + 1)) - PAD
    return np.concatenate([corner, np.full_like(corner, config.size)], axis=-1).astype(np.int32)


def _dali_boxes(
    numbers: np.ndarray, height: np.ndarray, width: np.ndarray, config: ViewConfig
) -> np.ndarray:
    """Uniform area, log-uniform aspect ratio, the first of ten that fits; as in DALI."""
    low, high = config.crop_area
    tall, wide = height[..., None], width[..., None]
    area = tall * wide * (low + (high - low) * numbers[..., :ATTEMPTS])
    edge = math.log(RATIO[1])  # RATIO is symmetric in the logarithm
    ratio = np.exp(edge * (2 * numbers[..., ATTEMPTS : 2 * ATTEMPTS] - 1))
    h, w = (_half_up(np.sqrt(side)).clip(1) for side in (area / ratio, area * ratio))
    rounded = w / h
    fits = (h <= tall) & (w <= wide) & (rounded >= RATIO[0]) & (rounded <= RATIO[1])
    h, w = _first((h, w), fits, _largest(height, width, high))
    # A strip that no box of the minimum area fits into: the largest box of an allowed ratio.
    most_h, most_w = np.floor(width / RATIO[0]).clip(1), np.floor(height * RATIO[1]).clip(1)
    least = low * height * width
    too_wide, too_tall = height * most_w < least, width * most_h < least
    h, w = np.where(too_wide, height, h), np.where(too_wide, most_w, w)
    h, w = np.where(too_tall, most_h, h), np.where(too_tall, width, w)
    corner = numbers[..., 2 * ATTEMPTS :]
    top = np.floor(corner[..., 0] * (height - h + 1))
    left = np.floor(corner[..., 1] * (width - w + 1))
    return np.stack([top, left, h, w], axis=-1).astype(np.int32)


def _largest(height: np.ndarray, width: np.ndarray, most: float) -> tuple[np.ndarray, np.ndarray]:
    """DALI's last resort: the whole image, cut to an allowed ratio and to the largest area."""
    h = np.where(width / height < RATIO[0], np.floor(width / RATIO[0]).clip(1), height)
    w = np.where(width / height > RATIO[1], np.floor(height * RATIO[1]).clip(1), width)
    scale = np.sqrt(np.minimum(1, most * height * width / (h * w)))
    return np.floor(h * scale).clip(1), np.floor(w * scale).clip(1)


def _tf_boxes(
    numbers: np.ndarray, height: np.ndarray, width: np.ndarray, config: ViewConfig
) -> np.ndarray:
    """Uniform ratio, then uniform height among those that fit, as in TensorFlow's
    sample_distorted_bounding_box for a box around the whole image.

    A crop of the whole image, by chance or because none fits, becomes the central crop, as in
    DeepMind's pipeline.
    """
    tall, wide = height[..., None], width[..., None]
    least, most = (share * tall * wide for share in config.crop_area)
    ratio = RATIO[0] + (RATIO[1] - RATIO[0]) * numbers[..., :ATTEMPTS]
    highest = np.rint(np.sqrt(most / ratio))
    within = np.floor((wide + 0.5 - 1e-7) / ratio)
    within -= np.rint(within * ratio) > wide
    highest = np.where(np.rint(highest * ratio) > wide, within, highest)
    highest = np.minimum(highest, tall)
    h = np.minimum(np.rint(np.sqrt(least / ratio)), highest)
    h += np.floor(numbers[..., ATTEMPTS : 2 * ATTEMPTS] * (highest - h + 1))
    # Rounding may miss the bounds by a pixel: one pixel more, then one less.
    h += np.rint(h * ratio) * h < least
    h -= np.rint(h * ratio) * h > most
    w = np.rint(h * ratio)
    area = h * w
    fits = (area >= least) & (area <= most) & (w <= wide) & (h <= tall) & (w > 0) & (h > 0)
    fits &= area >= LEAST_COVERED * tall * wide
    top = np.floor(numbers[..., 2 * ATTEMPTS : 3 * ATTEMPTS] * (tall - h).clip(1))
    left = np.floor(numbers[..., 3 * ATTEMPTS :] * (wide - w).clip(1))
    whole = (np.zeros_like(height), np.zeros_like(width), height, width)
    boxes = np.stack(_first((top, left, h, w), fits, whole), axis=-1).astype(np.int32)
    is_whole = (boxes[..., 2] == height) & (boxes[..., 3] == width)
    sizes = np.concatenate([height, width], axis=1).astype(np.int32)
    central = central_boxes(sizes, CENTRAL)[:, None]
    return np.where(is_whole[..., None], central, boxes)


def _first(
    values: tuple[np.ndarray, ...], fits: np.ndarray, otherwise: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, ...]:
    """values, fits: [B, K, ATTEMPTS] -> the first attempt that fits, or the alternative: [B, K]."""
    place = fits.argmax(axis=-1)[..., None]
    found = fits.any(axis=-1)
    return tuple(
        np.where(found, np.take_along_axis(value, place, axis=-1)[..., 0], other)
        for value, other in zip(values, otherwise, strict=True)
    )


def _half_up(values: np.ndarray) -> np.ndarray:
    """C's round, for non-negative values; numpy's rounds halves to even."""
    return np.floor(values + 0.5)


def check_padded_sizes(sizes: np.ndarray, size: int) -> None:
    """Raise DataError unless images have the size of a view, as --crop pad needs. sizes: [B, 2]."""
    for height, width in sizes[(sizes != size).any(axis=1)]:
        raise DataError(
            f"--crop pad needs images of exactly --size pixels ({size} x {size}), "
            f"got one of {width} x {height}; use --crop resized, or another --size"
        )
