"""The reference renderer: views of a decoded image from their plans, with torch on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fastaug.normalization import pixel_statistics
from fastaug.views.config import ViewConfig
from fastaug.views.plan import PAD, ViewPlan
from fastaug.views.randaugment import apply_operations

# A weighted sum misses an integer by about 1e-5, in another order by another 1e-5: without this,
# engines would differ by 1 in flat regions.
ROUNDING_MARGIN = 0.003
"""Added to a pixel value before it is truncated to an integer."""


def reference_views(image: np.ndarray, plans: Sequence[ViewPlan], config: ViewConfig) -> Tensor:
    """image: [H, W, 3] uint8, K plans -> normalized views: [K, S, S, 3] fp32."""
    margin = 0
    if config.crop == "pad":
        margin = PAD
        image = np.pad(image, ((PAD, PAD), (PAD, PAD), (0, 0)), mode="reflect")
    pixels = torch.from_numpy(image.astype(np.float32))
    mean, deviation = (torch.tensor(values) for values in pixel_statistics(config.normalize))
    views = torch.empty(len(plans), config.size, config.size, 3)
    for view, plan in zip(views, plans, strict=True):
        top, left = plan.top + margin, plan.left + margin
        crop = pixels[top : top + plan.height, left : left + plan.width]
        view.copy_(_make_view(crop, plan, config))
    # Times the reciprocal, bit for bit as in DALI.
    return views.sub_(mean).mul_(1 / deviation)


def denormalize(views: Tensor, config: ViewConfig) -> Tensor:
    """[..., 3, H, W] normalized -> uint8 pixel values, for display."""
    mean, deviation = (
        torch.tensor(values, device=views.device)[:, None, None]
        for values in pixel_statistics(config.normalize)
    )
    return (views.float() * deviation + mean).round_().clamp_(0, 255).to(torch.uint8)


def _make_view(view: Tensor, plan: ViewPlan, config: ViewConfig) -> Tensor:
    """view: the crop [H, W, 3] -> [S, S, 3], pixel values that are not yet normalized."""
    if (plan.height, plan.width) != (config.size, config.size):
        view = resize(view, config.size, config.interpolation, config.antialias)
    if plan.flip:
        view = view.flip(1)
    if plan.operations:
        # Towards zero and clipped, as TensorFlow casts.
        pixels = (view + ROUNDING_MARGIN).clamp_(0, 255).to(torch.uint8).contiguous().numpy()
        view = torch.from_numpy(apply_operations(pixels, plan.operations).copy())
    return view


def resize(image: Tensor, size: int, interpolation: str, antialias: bool) -> Tensor:
    """[H, W, 3] float -> [size, size, 3], values unclamped; the same values if H and W are size.

    Sums of gathered rows and columns rather than a matrix product, which is faster for small views
    but may round differently with another number of threads.
    """
    height, width, channels = image.shape
    down = _taps(height, size, interpolation, antialias)
    across = _taps(width, size, interpolation, antialias)
    rows = _weighted_sum(image.reshape(height, width * channels), 0, down)
    return _weighted_sum(rows.view(size, width, channels), 1, across)


Taps = list[tuple[Tensor, Tensor]]
"""Source pixels [size] and their weights [size, 1] along one side; a view's pixel is their sum."""


def _weighted_sum(image: Tensor, dim: int, taps: Taps) -> Tensor:
    (first, *others) = taps
    total = image.index_select(dim, first[0]).mul_(first[1])
    for index, weight in others:
        total.addcmul_(image.index_select(dim, index), weight)
    return total


@lru_cache(maxsize=4096)
def _taps(length: int, size: int, interpolation: str, antialias: bool) -> Taps:
    """Pixel centers at half integers, weights that sum to 1, edge pixels repeated beyond the edge.

    antialias: the filter is as wide as the pixels of the view when these are larger than those of
    the image, so that every source pixel counts.
    """
    weigh, radius = _FILTERS[interpolation]
    scale = length / size
    widen = max(scale, 1.0) if antialias else 1.0
    center = ((torch.arange(size, dtype=torch.float64) + 0.5) * scale)[:, None]
    reach = radius * widen
    first = torch.floor(center - reach - 0.5) + 1
    source = first + torch.arange(math.ceil(2 * reach))
    weight = weigh(((source + 0.5 - center) / widen).abs().clamp(max=radius))
    weight = (weight / weight.sum(1, keepdim=True)).float()
    source = source.clamp(0, length - 1).long()
    return [(source[:, tap], weight[:, tap, None]) for tap in range(source.shape[1])]


def _triangle(distance: Tensor) -> Tensor:
    return 1 - distance


def _keys(distance: Tensor) -> Tensor:
    """Keys' cubic with a = -0.5."""
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance <= 1, near, far)


# Each with its radius, where it is 0.
_FILTERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "bilinear": (_triangle, 1),
    "bicubic": (_keys, 2),
}
