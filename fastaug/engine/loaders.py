"""build_loader: from a config to the loader that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from fastaug.config import TrainConfig
from fastaug.data.config import DataConfig
from fastaug.data.dataset_images import MapDataset
from fastaug.data.image_set import ImageSet
from fastaug.data.loader import ViewLoader
from fastaug.data.scan import scan_and_check
from fastaug.data.sources import DataSource, align_classes
from fastaug.data.torch_loader import TorchLoader
from fastaug.errors import ConfigError, DataError
from fastaug.runtime.device import physical_memory, resolve_device
from fastaug.views.config import ViewConfig
from fastaug.views.plan import check_padded_sizes


def scan_configured(config: DataConfig, images: ImageSet) -> ImageSet:
    """The images with their manifest; bad ones are quarantined as the settings say."""
    return scan_and_check(
        images, full=config.scan == "full", max_bad=config.max_bad, workers=config.workers
    )


def scanned_sets(config: DataConfig) -> dict[str, ImageSet]:
    """The images to train on ("training"), those held out (if the config says so), and the test
    images ("test")."""
    source = DataSource(config)
    train, held_out = source.training()
    test = align_classes(source.test(), train.classes, train.name)
    sets = {"training": train, "held-out": held_out, "test": test}
    return {kind: scan_configured(config, s) for kind, s in sets.items() if s is not None}


Images = ImageSet | Sequence[tuple[str | Path, int | str]] | MapDataset
"""Images of your own: a set, a list of (path, label), or a torch Dataset of (image, label)."""


def build_loader(
    config: TrainConfig, images: Images | None = None, *, rank: int = 0, ranks: int = 1
) -> ViewLoader:
    """The training batches of a config, on its device: of its data, or of your own images."""
    _check_config("build_loader", config)
    if images is None:
        images, _ = DataSource(config.data).training()
    return _loader(
        config,
        config.resolved_view,
        _image_set(images),
        train=True,
        images_per_batch=config.images_per_part(ranks),
        batches_per_step=config.optim.accumulate,
        epochs=config.optim.epochs,
        rank=rank,
        ranks=ranks,
    )


def build_evaluation_loader(
    config: TrainConfig,
    images: Images,
    *,
    views: int = 0,
    batch_size: int = 256,
    rank: int = 0,
    ranks: int = 1,
) -> ViewLoader:
    """Every good image once, in order: its central crop (views = 0), or that many training views,
    of --size.

    A model that was trained without augmentation is measured on crops and flips, as in the paper.
    """
    _check_config("build_evaluation_loader", config)
    return _loader(
        config,
        evaluation_view(config.resolved_view, views),
        _image_set(images),
        train=False,
        images_per_batch=max(1, batch_size // max(1, views)),
        rank=rank,
        ranks=ranks,
    )


def evaluation_view(view: ViewConfig, views: int) -> ViewConfig:
    """Settings of the views that a model is measured on; 0: the central crop."""
    if views == 0:
        return replace(view, initial_size=0, views=1, augment="none")
    augment = "crop-flip" if view.augment == "none" else view.augment
    return replace(view, initial_size=0, views=views, augment=augment)


def _check_config(function: str, config: object) -> None:
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"{function} takes a TrainConfig, got {type(config).__name__}; "
            "try fastaug.TrainConfig.from_flat(data=..., views=...)"
        )


def _image_set(images: Images) -> ImageSet:
    if isinstance(images, ImageSet):
        return images
    is_map = hasattr(images, "__len__") and hasattr(images, "__getitem__")
    if not is_map or isinstance(images, (str, bytes, Mapping, IterableDataset)):
        raise DataError(
            "images must be a list of (path, label), a map-style torch Dataset (with __len__ and "
            f"__getitem__) or a fastaug.ImageSet, got {type(images).__name__}; for a folder or "
            "file, set data=PATH in the config"
        )
    if not isinstance(images, (list, tuple)):
        return ImageSet.from_dataset(images)
    for index, item in enumerate(images):
        is_pair = isinstance(item, (tuple, list)) and len(item) == 2
        if not is_pair or not isinstance(item[0], (str, PathLike)):
            raise DataError(
                f"images[{index}] must be (path, label), got {str(item)[:60]!r}; for images in "
                "memory, give a torch Dataset"
            )
    return ImageSet.from_files([path for path, _ in images], [label for _, label in images])


def _check_batch(images: int, view: ViewConfig) -> None:
    """Refuse batches that cannot be in memory, before the kernel ends the process for it."""
    size = images * view.views * 3 * view.size**2 * (4 if view.views_dtype == "fp32" else 2)
    if size > physical_memory():
        raise ConfigError(
            f"a batch of {images:,} images x {view.views:,} views of {view.size} px takes "
            f"{size / 1e9:,.0f} GB, and this machine has {physical_memory() / 1e9:,.0f}; lower "
            "--batch-size, --views, --tta or --size"
        )


def _loader(config: TrainConfig, view: ViewConfig, images: ImageSet, **sampling: Any) -> ViewLoader:
    _check_batch(min(sampling["images_per_batch"], len(images)), view)
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
