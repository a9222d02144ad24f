"""Who takes part in the loaders' part of benchmarks/throughput.py: same files, same output.

fastaug fused            decoded once by DALI, K views by the fused kernel, in threads
fastaug dali operators   decoded once by DALI, K views by its own operators, in its threads
fastaug torch            torch worker processes: decoded once, K views
torchvision, one decode  torch worker processes with transforms.v2, every image decoded once
torchvision, K decodes   the same, decoded anew for each view, as repeated augmentation does
timm, K decodes          timm's training transform on Pillow images, decoded for each view
ffcv                     FFCV's compiled threads on a .beton of the same JPEGs, K decodes

All resize crops as --interpolation and --antialias say, but for FFCV, which has one way (OpenCV's
area, which takes every pixel of the crop). With --crop pad, fastaug's and torchvision's take part.
RandAugment is each library's own, at the same number of operations and the same share of its
largest magnitude. What leads to a GPU is written as the libraries advise, and has never run on one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from ffcv_loader import ffcv
from loader_parts import FUSED, Contender
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
from fastaug.data.image_set import ImageSet
from fastaug.data.sampler import BatchSampler
from fastaug.engine.loaders import build_loader, scan_configured
from fastaug.errors import ConfigError, KernelUnavailableError
from fastaug.views.engine import fused_engine, resolve_engine

Own = Literal["fused", "dali", "torch"]
"""fastaug's loaders, as --loader of the benchmark names them."""
OWN: dict[Own, str] = {"fused": FUSED, "dali": "fastaug dali operators", "torch": "fastaug torch"}
TRAINED_WITH: dict[Own, dict[str, Any]] = {
    "fused": {"loader": "dali", "views_engine": "fused"},
    "dali": {"loader": "dali", "views_engine": "dali"},
    "torch": {"loader": "torch", "views_engine": "auto"},
}
"""The settings of a training that takes it."""


def _fastaug(own: Own, images: ImageSet, config: TrainConfig, device: torch.device) -> Contender:
    try:
        if own == "fused":
            fused_engine(device)  # said now if there is none, not in the middle of a run
        config = config.replace(**TRAINED_WITH[own], device=str(device), accumulate=1)
        loader = build_loader(config, repeated(_surveyed(images, config), config))
    except (ConfigError, KernelUnavailableError) as error:
        raise Unfit(str(error)) from error
    stages = 3 if images.array is None else 1  # read, decode, make views
    ahead = worker_batches(config) if own == "torch" else stages * config.data.prefetch

    def batches() -> Iterator[Tensor]:
        while True:
            for batch in loader:
                yield batch.views.to(device, non_blocking=True)

    return Contender(ahead, batches)


def _surveyed(images: ImageSet, config: TrainConfig) -> ImageSet:
    return scan_configured(config.data, images) if images.manifest is None else images


Build = Callable[[ImageSet, TrainConfig, torch.device], Contender]
LOADERS: dict[str, Build] = {
    **{name: partial(_fastaug, own) for own, name in OWN.items()},
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
    config = config.replace(loader=loader, views_engine="auto", accumulate=1)
    images = _surveyed(images, config)
    if loader == "torch":
        return in_workers(Decoded(images, config), device)
    from fastaug.pipelines.loader import Stages

    images = repeated(images, config)
    shared = {"seed": config.run.seed, "images_per_batch": config.images_per_step}
    sampler = BatchSampler(images, train=True, **shared)
    engine = resolve_engine(config.view, device, report=False)
    stages = Stages(images, config.data, config.view, engine, device=device, **shared)

    def batches() -> Iterator[Tensor]:
        keys = (key for epoch in itertools.count() for key in sampler.batches(images, epoch))
        for _ in stages.decoded(keys):
            yield torch.empty(0)

    return Contender(2 * config.data.prefetch, batches)  # read and decode
