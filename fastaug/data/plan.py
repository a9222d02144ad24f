"""View plans: the random decisions of one view, as data.

Drawing a plan and carrying it out are apart, so that whatever makes the views makes the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastaug.config import TrainConfig
from fastaug.data.randaugment import Operation, draw_operations
from fastaug.data.stream import Stream
from fastaug.errors import DataError

PAD = 4
"""Pixels of reflection around the image for crop="pad"."""
ATTEMPTS = 10
RATIO = (3 / 4, 4 / 3)
CENTRAL = 224 / 256
"""Side of the central crop relative to the shorter side of the image."""


@dataclass(frozen=True)
class ViewPlan:
    """Crop a box of the (padded) image, resize it to the view, flip it, apply the operations."""

    top: int
    left: int
    height: int
    width: int
    flip: bool = False
    operations: tuple[Operation, ...] = ()


def draw_plan(stream: Stream, height: int, width: int, config: TrainConfig) -> ViewPlan:
    """The plan of one training view of an image of height x width pixels."""
    if config.augment == "none":
        return central_plan(height, width, config)
    box = _padded_box if config.crop == "pad" else _resized_box
    operations: tuple[Operation, ...] = ()
    top, left, crop_height, crop_width = box(stream, height, width, config)
    flip = stream.uniform() < 0.5
    if config.augment == "randaugment":
        operations = draw_operations(
            stream, config.size, config.randaugment_layers, config.randaugment_magnitude
        )
    return ViewPlan(top, left, crop_height, crop_width, flip, operations)


def central_plan(height: int, width: int, config: TrainConfig) -> ViewPlan:
    """The one view of an evaluation on central crops; of CIFAR it is the image itself."""
    if config.crop == "pad":
        _check_size(height, width, config.size)
        return ViewPlan(PAD, PAD, height, width)
    side = max(1, round(min(height, width) * CENTRAL))
    return ViewPlan((height - side) // 2, (width - side) // 2, side, side)


def _padded_box(
    stream: Stream, height: int, width: int, config: TrainConfig
) -> tuple[int, int, int, int]:
    _check_size(height, width, config.size)
    return stream.below(2 * PAD + 1), stream.below(2 * PAD + 1), height, width


def _resized_box(
    stream: Stream, height: int, width: int, config: TrainConfig
) -> tuple[int, int, int, int]:
    """Area uniform, aspect ratio log-uniform, as DALI and torchvision draw it."""
    for _ in range(ATTEMPTS):
        area = height * width * stream.uniform(*config.crop_area)
        ratio = math.exp(stream.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        crop_height, crop_width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < crop_height <= height and 0 < crop_width <= width:
            top = stream.below(height - crop_height + 1)
            return top, stream.below(width - crop_width + 1), crop_height, crop_width
    # Very long or very tall images: the largest centred box with an allowed ratio.
    crop_height = min(height, max(1, round(width / RATIO[0])))
    crop_width = min(width, max(1, round(height * RATIO[1])))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def _check_size(height: int, width: int, size: int) -> None:
    if (height, width) != (size, size):
        raise DataError(
            f"--crop pad needs images of exactly --size pixels ({size} x {size}), "
            f"got one of {width} x {height}; use --crop resized, or another --size"
        )
