"""build_loader: from a config to the loader that it names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch

from fastaug.batch import ViewBatch
from fastaug.config import TrainConfig
from fastaug.data.images import ImageSet
from fastaug.data.sources import open_split
from fastaug.data.torch_loader import TorchLoader


class Loader(Protocol):
    """What every loader is. Iterating hands out what is left of the current epoch."""

    epoch: int
    position: int

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[ViewBatch]: ...
    def set_epoch(self, epoch: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def build_loader(
    config: TrainConfig, images: ImageSet | None = None, *, rank: int = 0, ranks: int = 1
) -> Loader:
    """The training batches of a config: of its data, or of images that are already open."""
    images = open_split(config.data, "train") if images is None else images
    return TorchLoader(
        images,
        config,
        train=True,
        images_per_batch=config.images_per_part(ranks),
        rank=rank,
        ranks=ranks,
        pin_memory=torch.cuda.is_available(),
    )


def build_evaluation_loader(
    config: TrainConfig, images: ImageSet, *, views: int, batch_size: int
) -> Loader:
    """Every image once, in order: its central crop (views = 0), or that many training views.

    A model that was trained without augmentation is measured on crops and flips, as in the paper.
    """
    if views == 0:
        policy = replace(config, views=1, augment="none", accumulate=1, batch_size=1)
    else:
        augment = "crop-flip" if config.augment == "none" else config.augment
        policy = replace(config, views=views, augment=augment, accumulate=1, batch_size=views)
    return TorchLoader(
        images,
        policy,
        train=False,
        images_per_batch=max(1, batch_size // max(1, views)),
        pin_memory=torch.cuda.is_available(),
    )
