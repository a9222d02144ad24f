"""Who takes part in the loaders' part of benchmarks/throughput.py: same files, same output.

fastaug dali             DALI: decoded once, K views, in its threads
fastaug torch            torch worker processes: decoded once, K views
torchvision, one decode  torch worker processes with transforms.v2, every image decoded once
torchvision, K decodes   the same, decoded anew for each view, as repeated augmentation does
timm, K decodes          timm's training transform on Pillow images, decoded for each view
ffcv                     FFCV's compiled threads on a .beton of the same JPEGs, K decodes

Crops are bicubic but for FFCV, which has one way to resize (OpenCV's area). RandAugment is each
library's own, at the same number of operations and the same share of its largest magnitude.
What leads to a GPU is written as the libraries advise, and has never run on one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import torch
from ffcv_loader import ffcv
from loader_parts import Contender
from long_epochs import repeated
from timing import Unfit
from torch import Tensor
from worker_loaders import (
    Decoded,
    in_workers,
    timm_k_decodes,
    torchvision_k_decodes,
    torchvision_one_decode,
    worker_batches,
)

from fastaug.config import TrainConfig
from fastaug.data.images import ImageSet
from fastaug.data.schedule import Schedule
from fastaug.errors import ConfigError
from fastaug.loaders import build_loader, survey_images


def fastaug_dali(images: ImageSet, config: TrainConfig, device: torch.device) -> Contender:
    stages = 3 if images.array is None else 1  # read, decode, make views
    return _fastaug("dali", stages * config.prefetch, images, config, device)


def fastaug_torch(images: ImageSet, config: TrainConfig, device: torch.device) -> Contender:
    return _fastaug("torch", worker_batches(config), images, config, device)


def _fastaug(
    name: Literal["dali", "torch"],
    ahead: int,
    images: ImageSet,
    config: TrainConfig,
    device: torch.device,
) -> Contender:
    try:
        config = replace(config, loader=name, device=str(device), accumulate=1)
        loader = build_loader(config, repeated(_surveyed(images, config), config))
    except ConfigError as error:
        raise Unfit(str(error)) from error

    def batches() -> Iterator[Tensor]:
        while True:
            for batch in loader:
                yield batch.views.to(device, non_blocking=True)

    return Contender(ahead, batches)


def _surveyed(images: ImageSet, config: TrainConfig) -> ImageSet:
    return survey_images(config, images) if images.manifest is None else images


Build = Callable[[ImageSet, TrainConfig, torch.device], Contender]
LOADERS: dict[str, Build] = {
    "fastaug dali": fastaug_dali,
    "fastaug torch": fastaug_torch,
    "torchvision, one decode": torchvision_one_decode,
    "torchvision, K decodes": torchvision_k_decodes,
    "timm, K decodes": timm_k_decodes,
    "ffcv": ffcv,
}


def decode_only(
    images: ImageSet, config: TrainConfig, device: torch.device, loader: Literal["dali", "torch"]
) -> Contender:
    """As fastaug's loader decodes, and no more: an empty tensor for each batch of images."""
    if images.array is not None:
        raise Unfit("images in memory are not decoded")
    config = replace(config, loader=loader, accumulate=1)
    images = _surveyed(images, config)
    if loader == "torch":
        return in_workers(Decoded(images, config), device)
    from fastaug.pipelines.loader import Stages

    images = repeated(images, config)
    schedule = Schedule(images, config, train=True, images_per_batch=config.images_per_step)
    stages = Stages(images, config, config.images_per_step, device)

    def batches() -> Iterator[Tensor]:
        for _ in stages.decoded(key for _ in itertools.count() for key in schedule.batches()):
            yield torch.empty(0)

    return Contender(2 * config.prefetch, batches)  # read and decode
