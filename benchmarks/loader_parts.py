"""What the loaders of benchmarks/loader_contenders.py have in common, and the check of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from timing import Unfit
from torch import Tensor

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.views.batch import VIEW_DTYPES

FUSED = "fastaug fused"
"""The loader that the others are compared with."""


@dataclass(frozen=True)
class Contender:
    ahead: int
    """Batches that it works on ahead of the one that was asked for, at most."""
    batches: Callable[[], Iterator[Tensor]]
    """A new pass: endless batches of views [B, K, 3, S, S], stored B, K, S, S, 3, normalized, on
    the device. A batch is good until the next one is asked for. Closing it stops all its work."""


class EndlessBatches:
    """Places of B good images at a time: each pass in a new order, batches across passes."""

    def __init__(self, images: ImageSet, config: TrainConfig) -> None:
        self._good = np.setdiff1d(np.arange(len(images)), list(images.bad))
        self._per_batch, self._seed = config.images_per_step, config.run.seed

    def __iter__(self) -> Iterator[np.ndarray]:
        rng = np.random.default_rng(self._seed)
        left = np.empty(0, np.int64)
        while True:
            while len(left) < self._per_batch:
                left = np.concatenate([left, rng.permutation(self._good)])
            yield left[: self._per_batch]
            left = left[self._per_batch :]


def check_policy(config: TrainConfig, *, pads: bool) -> None:
    """pads: it has a crop of the image with a reflected margin."""
    if config.view.augment == "none":
        raise Unfit("takes part in --augment crop-flip and randaugment alone")
    if config.view.crop == "pad" and not pads:
        raise Unfit("takes part in --crop resized alone: it does not reflect images at their edges")


def view_dtype(config: TrainConfig) -> torch.dtype:
    return VIEW_DTYPES[config.view.views_dtype]


def check(batch: Tensor, config: TrainConfig) -> None:
    """Raises ValueError unless it is a batch of this config: pictures, whose views differ."""
    size, views = config.view.size, config.view.views
    shape = (config.images_per_step, views, 3, size, size)
    if tuple(batch.shape) != shape:
        raise ValueError(f"a batch has shape {tuple(batch.shape)}, not {shape}")
    if batch.dtype != view_dtype(config):
        raise ValueError(f"a batch is of {batch.dtype}, not {view_dtype(config)}")
    if not batch.permute(0, 1, 3, 4, 2).is_contiguous():
        raise ValueError(f"a batch is not stored B, K, S, S, 3: its strides are {batch.stride()}")
    values = batch.float()
    if not values.isfinite().all():
        raise ValueError("a batch has values that are not finite")
    # Levels of 0 to 255 come to within -2.2 and 2.7; a bicubic edge may overshoot them by a half.
    least, largest = values.min().item(), values.max().item()
    if least < -4 or largest > 5:
        raise ValueError(f"values from {least:.3g} to {largest:.3g} are not normalized levels")
    mean, deviation = values.mean().item(), values.std().item()
    if not (abs(mean) < 2 and 0.2 < deviation < 2):
        raise ValueError(f"mean {mean:.3g}, deviation {deviation:.3g}: not normalized pictures")
    # Most images, as chance may draw a small image's crop twice.
    for one, other in itertools.combinations(range(views), 2):
        if (batch[:, one] == batch[:, other]).flatten(1).all(1).float().mean() > 0.5:
            raise ValueError(f"views {one} and {other} of an image are identical")
