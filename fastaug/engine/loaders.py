"""build_loader: from a config to the loader that it names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fastaug.config import TrainConfig
from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.loader import ViewLoader
from fastaug.data.scan import scan_and_check
from fastaug.data.sources import DataSource
from fastaug.data.torch_loader import TorchLoader
from fastaug.errors import ConfigError
from fastaug.runtime.device import resolve_device
from fastaug.views.config import ViewConfig
from fastaug.views.plan import check_padded_sizes


def scan_configured(config: DataConfig, images: ImageSet) -> ImageSet:
    """The images with their manifest; bad ones are quarantined as the settings say."""
    return scan_and_check(
        images, full=config.scan == "full", max_bad=config.max_bad, workers=config.workers
    )


def build_loader(
    config: TrainConfig, images: ImageSet | None = None, *, rank: int = 0, ranks: int = 1
) -> ViewLoader:
    """The training batches of a config, on its device: of its data, or of images that are already
    open."""
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"build_loader takes a TrainConfig, got {type(config).__name__}; "
            "try fastaug.TrainConfig.from_flat(data=..., views=...)"
        )
    if images is None:
        images, _ = DataSource(config.data).training()
    return _loader(
        config,
        config.resolved_view,
        images,
        train=True,
        images_per_batch=config.images_per_part(ranks),
        batches_per_step=config.optim.accumulate,
        epochs=config.optim.epochs,
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
) -> ViewLoader:
    """Every good image once, in order: its central crop (views = 0), or that many training views.

    A model that was trained without augmentation is measured on crops and flips, as in the paper.
    """
    if views == 0:
        view = replace(config.resolved_view, views=1, augment="none")
    else:
        augment = "crop-flip" if config.view.augment == "none" else config.view.augment
        view = replace(config.resolved_view, views=views, augment=augment)
    return _loader(
        config,
        view,
        images,
        train=False,
        images_per_batch=max(1, batch_size // max(1, views)),
        rank=rank,
        ranks=ranks,
    )


def _loader(config: TrainConfig, view: ViewConfig, images: ImageSet, **sampling: Any) -> ViewLoader:
    if images.manifest is None:
        images = scan_configured(config.data, images)
    if view.crop == "pad" and images.manifest is not None:
        sizes = np.delete(images.manifest.sizes, list(images.bad), axis=0)
        check_padded_sizes(sizes, view.size)
    settings = (images, config.data, view)
    sampling |= {"seed": config.run.seed, "device": resolve_device(config.run.device)}
    if config.data.loader == "torch":
        return TorchLoader(*settings, **sampling)
    try:
        from fastaug.pipelines.loader import DaliLoader
    except ImportError as error:
        raise ConfigError(
            f"--loader dali: NVIDIA DALI cannot be imported here ({error}); "
            "pip install nvidia-dali-cuda120 (Linux), or use --loader torch"
        ) from error
    return DaliLoader(*settings, **sampling)
