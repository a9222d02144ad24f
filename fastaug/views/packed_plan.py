"""View plans in the memory layout of the fused kernel: a record per view and per operation.

The same bytes serve CPU and GPU: `View` and `Form` of cuda/views.h, `Layer` of cuda/operations.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastaug.errors import DataError, KernelUnavailableError
from fastaug.toolchain.build import enum_codes
from fastaug.views.plan import MAX_PIXELS, ViewPlans
from fastaug.views.randaugment import MAX_ARGUMENTS, OPERATIONS, unchanged_mask
from fastaug.views.render_spec import BORDERS, RenderSpec

_VIEW_NUMBERS = ("height", "width", "top", "left", "box_height", "box_width", "flip", "unused")
VIEW = np.dtype([("pixels", "u8"), ("row_bytes", "i8"), *((name, "i4") for name in _VIEW_NUMBERS)])
LAYER = np.dtype([("numbers", "f8", (6,)), ("operation", "i4"), ("unused", "i4")])

LONGEST_SIDE = 2**20
"""Maximum side of a box in pixels: the kernel counts with 32 bits."""
LONGEST_VIEW = 2**14
"""Maximum side of a view in pixels, for the same reason."""
MAX_NUMBER = 2**30
"""Maximum of an operation's numbers: the kernel converts some to 32 bits."""

_ENCODED = tuple((place, s.encode) for place, s in enumerate(OPERATIONS) if s.encode is not None)
_GEOMETRIC = np.array([spec.kernel == "MOVE" for spec in OPERATIONS])


class KernelCodes(NamedTuple):
    """Codes of `enum Operation` in cuda/operations.h, read from there by name."""

    operations: np.ndarray
    """[16]: the code of each entry of OPERATIONS."""
    nothing: int
    need_second_buffer: tuple[int, ...]


@cache
def kernel_codes() -> KernelCodes:
    codes = enum_codes("operations.h", "Operation")
    if missing := [spec.kernel for spec in OPERATIONS if spec.kernel not in codes]:
        raise KernelUnavailableError(f"cuda/operations.h has no {', '.join(missing)}")
    second = sorted({codes[spec.kernel] for spec in OPERATIONS if spec.needs_second_buffer})
    own = np.array([codes[spec.kernel] for spec in OPERATIONS], np.int32)
    return KernelCodes(own, codes["NOTHING"], tuple(second))


class Pictures(NamedTuple):
    """B decoded images in memory: [H, W, 3] uint8 each, with contiguous rows."""

    pointers: np.ndarray
    """[B] uint64, to the first pixel."""
    row_bytes: np.ndarray
    """[B] int64, from one row to the next."""
    sizes: np.ndarray
    """[B, 2] int, heights and widths."""


def pictures_of(images: Sequence[Tensor]) -> tuple[Pictures, list[Tensor]]:
    """The tensors in memory, and the objects to keep alive: non-contiguous rows are copied."""
    kept = [image if image.stride()[1:] == (3, 1) else image.contiguous() for image in images]
    return (
        Pictures(
            np.array([image.data_ptr() for image in kept], np.uint64),
            np.array([image.stride(0) for image in kept], np.int64),
            np.array([image.shape[:2] for image in kept], np.int32).reshape(-1, 2),
        ),
        kept,
    )


def encode_views(pictures: Pictures, plans: ViewPlans) -> np.ndarray:
    """[B * K] VIEW."""
    boxes = plans.boxes
    _check_boxes(boxes)
    views = np.zeros(boxes.shape[:2], VIEW)
    views["pixels"] = pictures.pointers[:, None]
    views["row_bytes"] = pictures.row_bytes[:, None]
    views["height"], views["width"] = pictures.sizes.T[..., None]
    for place, name in enumerate(("top", "left", "box_height", "box_width")):
        views[name] = boxes[..., place]
    views["flip"] = plans.flips
    return views.reshape(-1)


def _check_boxes(boxes: np.ndarray) -> None:
    corners, sides = np.abs(boxes[..., :2].astype(np.int64)), boxes[..., 2:].astype(np.int64)
    wrong = (sides < 1).any(-1) | (sides > LONGEST_SIDE).any(-1) | (sides.prod(-1) > MAX_PIXELS)
    wrong |= (corners > LONGEST_SIDE).any(-1)
    if wrong.any():
        top, left, height, width = boxes.reshape(-1, 4)[wrong.argmax()]
        raise DataError(
            f"a view's box must have sides of 1 to {LONGEST_SIDE:,} pixels, at most {MAX_PIXELS:,} "
            f"pixels in total, and start at most {LONGEST_SIDE:,} pixels from the image's corner; "
            f"got {width} x {height} pixels at {left}, {top}"
        )


def encode_layers(plans: ViewPlans) -> np.ndarray:
    """[B * K * N] LAYER."""
    operations = plans.operations.reshape(-1)
    arguments = plans.arguments.reshape(-1, MAX_ARGUMENTS)
    layers = np.zeros(len(operations), LAYER)
    if not len(operations):
        return layers
    if operations.min() < 0 or operations.max() >= len(OPERATIONS):
        raise DataError(
            f"a plan's operations must be 0 to {len(OPERATIONS) - 1}, "
            f"got {operations.min()} to {operations.max()}"
        )
    if not (allowed := np.abs(arguments) <= MAX_NUMBER).all():  # NaN neither
        raise DataError(
            f"a plan's arguments must be numbers from {-MAX_NUMBER:,} to {MAX_NUMBER:,}, "
            f"got {arguments[np.argmin(allowed.all(-1))].tolist()}"
        )
    numbers, codes = layers["numbers"], kernel_codes()
    numbers[:, :MAX_ARGUMENTS] = arguments
    for place, encode in _ENCODED:
        if (chosen := operations == place).any():
            rows = encode(arguments[chosen, 0], plans.size)
            numbers[chosen, : rows.shape[1]] = rows
    numbers[_GEOMETRIC[operations], 2::3] += 0.5  # a matrix: to the nearest pixel
    unchanged = unchanged_mask(operations, arguments)
    layers["operation"] = np.where(unchanged, codes.nothing, codes.operations[operations])
    return layers


class Form(Structure):
    """Settings that all views of a call share: `Form` of cuda/views.h."""

    _fields_ = (
        *((name, c_int) for name in ("size", "layers", "border", "cubic", "antialias")),
        ("mean", c_float * 3),
        ("factor", c_float * 3),
    )


def form_structure(spec: RenderSpec, size: int, layers: int) -> Form:
    """layers: operations of each view."""
    border, cubic = BORDERS.index(spec.border), spec.interpolation == "bicubic"
    means, factors = (c_float * 3)(*spec.mean), (c_float * 3)(*spec.factor)
    return Form(size, layers, border, cubic, spec.antialias, means, factors)


def check_images(images: Sequence[Tensor]) -> None:
    """Raise DataError unless these are images for plan_views and make_views."""
    if not isinstance(images, Sequence) or not len(images):
        given = "an empty list" if isinstance(images, Sequence) else _form(images)
        raise DataError(f"images must be a list of uint8 tensors [H, W, 3], got {given}")
    for place, image in enumerate(images):
        is_tensor = isinstance(image, Tensor) and image.dtype == torch.uint8
        if not is_tensor or image.ndim != 3 or image.shape[2] != 3 or not image.numel():
            raise DataError(
                f"image {place} must be a uint8 tensor [H, W, 3], got {_form(image)}{_hint(image)}"
            )


def _hint(image: object) -> str:
    """How to make an image from something similar."""
    if isinstance(image, np.ndarray):
        return "; use torch.from_numpy(image)"
    if isinstance(image, Tensor) and image.ndim == 3 and image.shape[0] == 3:
        return "; use image.permute(1, 2, 0)"
    if isinstance(image, Tensor) and image.ndim == 2:
        return "; use image[..., None].expand(-1, -1, 3)"
    return ""


def check_plan(images: Sequence[Tensor], plan: ViewPlans) -> torch.device:
    """The device of all images; DataError if the plan is not for them."""
    if not isinstance(plan, ViewPlans):
        raise DataError(f"the plan must come from fastaug.plan_views, got {type(plan).__name__}")
    if not (isinstance(plan.size, int) and 1 <= plan.size <= LONGEST_VIEW):
        raise DataError(f"a plan's size must be 1 to {LONGEST_VIEW:,} pixels, got {plan.size}")
    arrays = (plan.boxes, plan.flips, plan.operations, plan.arguments)
    shape = plan.operations.shape
    if [a.shape for a in arrays] != [(*shape[:2], 4), shape[:2], shape, (*shape, 4)]:
        raise DataError(
            "a plan must have boxes [B, K, 4], flips [B, K], operations [B, K, N] and arguments "
            f"[B, K, N, 4]; got {[list(a.shape) for a in arrays]}"
        )
    if len(images) != len(plan.boxes):
        raise DataError(f"the plan is for {len(plan.boxes)} images, got {len(images)}")
    devices = {image.device for image in images}
    if len(devices) != 1:
        raise DataError(f"images must be on one device, got {sorted(map(str, devices))}")
    return devices.pop()


def _form(image: object) -> str:
    if isinstance(image, Tensor | np.ndarray):
        return f"{type(image).__name__} {list(image.shape)} of {image.dtype}"
    return type(image).__name__
