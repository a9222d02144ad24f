"""build_loader: from a config to the loader that it names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.scan import scan_images
from fastaug.data.sources import open_split
from fastaug.data.split import split_training
from fastaug.data.torch_loader import TorchLoader
from fastaug.errors import ConfigError
from fastaug.runtime.device import resolve_device
from fastaug.views.batch import ViewBatch
from fastaug.views.plan import check_padded_sizes


class Loader(Protocol):
    """What every loader is. Iterating hands out what is left of the current epoch."""

    epoch: int
    position: int
    images: ImageSet
    """With those that have gone bad meanwhile."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[ViewBatch]: ...
    def set_epoch(self, epoch: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def scan_configured(config: TrainConfig, images: ImageSet) -> ImageSet:
    """The images with their manifest; bad ones are quarantined as the config says."""
    return scan_images(
        images,
        full=config.data.scan == "full",
        max_bad=config.data.max_bad,
        workers=config.data.workers,
    )


def training_images(config: TrainConfig, images: ImageSet) -> tuple[ImageSet, ImageSet | None]:
    """Of a training set: those that the config trains on, and those that it holds out."""
    return split_training(
        images, validation=config.data.validation, train_images=config.data.train_images
    )


def build_loader(
    config: TrainConfig, images: ImageSet | None = None, *, rank: int = 0, ranks: int = 1
) -> Loader:
    """The training batches of a config: of its data, or of images that are already open."""
    if images is None:
        images, _ = training_images(config, open_split(config.data.data, "train"))
    return _loader(
        config,
        images,
        train=True,
        images_per_batch=config.images_per_part(ranks),
        rank=rank,
        ranks=ranks,
    )


def build_evaluation_loader(
    config: TrainConfig,
    images: ImageSet,
    *,
    views: int,
    batch_size: int,
    rank: int = 0,
    ranks: int = 1,
) -> Loader:
    """Every good image once, in order: its central crop (views = 0), or that many training views.

    A model that was trained without augmentation is measured on crops and flips, as in the paper.
    """
    if views == 0:
        policy = config.replace(views=1, augment="none", accumulate=1, batch_size=1)
    else:
        augment = "crop-flip" if config.view.augment == "none" else config.view.augment
        policy = config.replace(views=views, augment=augment, accumulate=1, batch_size=views)
    return _loader(
        policy,
        images,
        train=False,
        images_per_batch=max(1, batch_size // max(1, views)),
        rank=rank,
        ranks=ranks,
    )


def _loader(config: TrainConfig, images: ImageSet, **schedule: Any) -> Loader:
    if images.manifest is None:
        images = scan_configured(config, images)
    if config.view.crop == "pad" and images.manifest is not None:
        sizes = np.delete(images.manifest.sizes, list(images.bad), axis=0)
        check_padded_sizes(sizes, config.view.size)
    if config.data.loader == "torch":
        return TorchLoader(images, config, **schedule)
    try:
        from fastaug.pipelines.loader import DaliLoader
    except ImportError as error:
        raise ConfigError(
            f"--loader dali: NVIDIA DALI cannot be imported here ({error}); "
            "pip install nvidia-dali-cuda120 (Linux), or use --loader torch"
        ) from error
    return DaliLoader(images, config, device=resolve_device(config.run.device), **schedule)
