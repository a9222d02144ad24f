"""Carry out view plans on a decoded image, with torch on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fastaug.config import TrainConfig
from fastaug.data.plan import PAD, ViewPlan
from fastaug.data.randaugment import apply_operations

NORMALISATION = {
    "imagenet": ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    "cifar": ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
}
"""Channel means and standard deviations in levels of 0 to 255."""


def make_views(image: np.ndarray, plans: Sequence[ViewPlan], config: TrainConfig) -> Tensor:
    """image: [H, W, 3] uint8, K plans -> normalised views: [K, S, S, 3] fp32."""
    if config.crop == "pad":
        image = np.pad(image, ((PAD, PAD), (PAD, PAD), (0, 0)), mode="reflect")
    levels = torch.from_numpy(image.astype(np.float32))
    mean, deviation = (torch.tensor(values) for values in NORMALISATION[config.normalise])
    views = torch.empty(len(plans), config.size, config.size, 3)
    for view, plan in zip(views, plans, strict=True):
        view.copy_(_make_view(levels, plan, config.size))
    # Times the reciprocal, as DALI does it: to the last bit the same.
    return views.sub_(mean).mul_(1 / deviation)


def denormalise(views: Tensor, config: TrainConfig) -> Tensor:
    """[..., 3, H, W] normalised -> the same in uint8 levels, to look at."""
    mean, deviation = (
        torch.tensor(values, device=views.device)[:, None, None]
        for values in NORMALISATION[config.normalise]
    )
    return (views.float() * deviation + mean).round_().clamp_(0, 255).to(torch.uint8)


def _make_view(image: Tensor, plan: ViewPlan, size: int) -> Tensor:
    """image: [H, W, 3] in levels -> the view: [S, S, 3], in levels, not yet normalised."""
    view = image[plan.top : plan.top + plan.height, plan.left : plan.left + plan.width]
    if (plan.height, plan.width) != (size, size):
        view = resize(view, size)
    if plan.flip:
        view = view.flip(1)
    if plan.operations:
        levels = view.clamp(0, 255).to(torch.uint8).contiguous().numpy()
        view = torch.from_numpy(apply_operations(levels, plan.operations).copy())
    return view


def resize(image: Tensor, size: int) -> Tensor:
    """[H, W, 3] float -> [size, size, 3], bicubic without antialiasing, values unclamped.

    Sums of gathered rows and columns rather than a matrix product, which is quicker for small views
    but may round differently with another number of threads.
    """
    height, width, channels = image.shape
    rows = _weighted_sum(image.reshape(height, width * channels), 0, size)
    return _weighted_sum(rows.view(size, width, channels), 1, size)


def _weighted_sum(image: Tensor, dim: int, size: int) -> Tensor:
    (first, *others) = _cubic_taps(image.shape[dim], size)
    total = image.index_select(dim, first[0]).mul_(first[1])
    for index, weight in others:
        total.addcmul_(image.index_select(dim, index), weight)
    return total


@lru_cache(maxsize=4096)
def _cubic_taps(length: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Four (source pixels: [size], weights: [size, 1]) along one side.

    Keys' kernel with a = -0.5, pixel centres at half integers, edge pixels repeated.
    """
    centre = (torch.arange(size, dtype=torch.float64) + 0.5) * (length / size) - 0.5
    taps = []
    for tap in range(4):
        source = centre.floor() - 1 + tap
        distance = (centre - source).abs()
        near = (1.5 * distance - 2.5) * distance**2 + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        weight = torch.where(distance <= 1, near, far).float()[:, None]
        taps.append((source.clamp(0, length - 1).long(), weight))
    return taps
