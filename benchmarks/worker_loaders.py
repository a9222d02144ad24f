"""torchvision and timm in torch's worker processes, for benchmarks/loader_contenders.py."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from loader_parts import Contender, EndlessBatches, check_policy, view_dtype
from PIL import Image
from timing import Unfit
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import InterpolationMode, v2

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.runtime.cores import worker_count
from fastaug.views.plan import PAD
from fastaug.views.reference import NORMALIZATION

PREFETCH = 2
"""Batches that torch's DataLoader, fastaug's too, lets each worker have under way."""


def torchvision_one_decode(
    images: ImageSet, config: TrainConfig, device: torch.device
) -> Contender:
    return in_workers(_Views(images, config, tensor_of, torchvision_views(config), 1), device)


def torchvision_k_decodes(images: ImageSet, config: TrainConfig, device: torch.device) -> Contender:
    make = torchvision_views(config)
    return in_workers(_Views(images, config, tensor_of, make, config.view.views), device)


def timm_k_decodes(images: ImageSet, config: TrainConfig, device: torch.device) -> Contender:
    return in_workers(
        _Views(images, config, pillow_of, timm_views(config), config.view.views), device
    )


def torchvision_views(config: TrainConfig) -> Callable[[Tensor], Tensor]:
    """[3, H, W] uint8 -> a view: [3, S, S] uint8.

    Crops of tensors, RandAugment of Pillow images: whichever is faster. On 24 pictures of photos.py
    in one thread at K=8, 224 px: crop and flip 1,500 views/s of tensors, 540 of Pillow images; then
    RandAugment of 2 operations 440 and 480, of 4 operations 290 and 440.
    """
    check_policy(config, pads=True)
    steps: list[Any] = [_torchvision_crop(config), v2.RandomHorizontalFlip()]
    if config.view.augment == "randaugment":
        magnitude = round(30 * _strength(config))
        policy = v2.RandAugment(config.view.randaugment_layers, magnitude, num_magnitude_bins=31)
        steps += [v2.ToPILImage(), policy, v2.PILToTensor()]
    return v2.Compose(steps)


def _torchvision_crop(config: TrainConfig) -> v2.Transform:
    if config.view.crop == "pad":
        return v2.RandomCrop(config.view.size, padding=PAD, padding_mode="reflect")
    return v2.RandomResizedCrop(
        config.view.size,
        scale=config.view.crop_area,
        interpolation=InterpolationMode(config.view.interpolation),
        antialias=config.view.antialias,
    )


def timm_views(config: TrainConfig) -> Callable[[Image.Image], Tensor]:
    """A Pillow image -> a view: [3, S, S] uint8.

    timm's operations take the interpolation of the crop, too.
    """
    from timm.data import create_transform

    check_policy(config, pads=False)
    if not config.view.antialias:
        raise Unfit("timm resizes by Pillow, which always antialiases")
    policy = f"rand-m{round(10 * _strength(config))}-n{config.view.randaugment_layers}"
    return create_transform(
        config.view.size,
        is_training=True,
        use_prefetcher=True,  # leaves out the normalization, which is done as for the others
        scale=config.view.crop_area,
        interpolation=config.view.interpolation,
        color_jitter=None,
        auto_augment=policy if config.view.augment == "randaugment" else None,
    )


def _strength(config: TrainConfig) -> float:
    """RandAugment's magnitude as a share of the largest."""
    return config.view.randaugment_magnitude / (
        30 if config.view.randaugment_policy == "dali" else 10
    )


def tensor_of(images: ImageSet, index: int) -> Tensor:
    """Decoded anew: [3, H, W] uint8."""
    if images.array is not None:
        return torch.from_numpy(images.array[index]).permute(2, 0, 1)
    content = torch.frombuffer(bytearray(images.encoded(index)), dtype=torch.uint8)
    return decode_image(content, mode=ImageReadMode.RGB)


def pillow_of(images: ImageSet, index: int) -> Image.Image:
    """Decoded anew."""
    if images.array is not None:
        return Image.fromarray(images.array[index])
    return Image.open(io.BytesIO(images.encoded(index))).convert("RGB")


@dataclass(frozen=True)
class _Views(Dataset):
    """Runs in the workers: the places of a batch's images -> its views."""

    images: ImageSet
    config: TrainConfig
    decode: Callable[[ImageSet, int], Any]
    make: Callable[[Any], Tensor]
    decodes: int
    """Of each image: 1, or one for each view."""

    def __getitem__(self, indices: np.ndarray) -> Tensor:
        config = self.config
        mean, deviation = (torch.tensor(values) for values in NORMALIZATION[config.view.normalize])
        shape = (len(indices), config.view.views, config.view.size, config.view.size, 3)
        views = torch.empty(shape, dtype=view_dtype(config))
        for own, index in zip(views, map(int, indices), strict=True):
            for number, slot in enumerate(own):
                if number < self.decodes:
                    image = self.decode(self.images, index)
                levels = self.make(image).permute(1, 2, 0)
                # View by view, which stays in the core's cache, and written once.
                slot.copy_(torch.sub(levels, mean).mul_(1 / deviation))
        return views.permute(0, 1, 4, 2, 3)


def in_workers(work: _Views | Decoded, device: torch.device) -> Contender:
    config = work.config
    workers = worker_count(config.data.workers)

    def batches() -> Iterator[Tensor]:
        loader: DataLoader = DataLoader(
            work,
            sampler=EndlessBatches(work.images, config),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=PREFETCH if workers else None,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_leave_interrupts,
            generator=torch.Generator().manual_seed(config.run.seed),
        )
        for batch in loader:
            yield batch.to(device, non_blocking=True)

    return Contender(worker_batches(config), batches)


def worker_batches(config: TrainConfig) -> int:
    return PREFETCH * worker_count(config.data.workers)


def _leave_interrupts(_worker: int) -> None:
    """Ctrl-C reaches the whole process group; the benchmark ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@dataclass(frozen=True)
class Decoded(Dataset):
    """Runs in the workers, and keeps what it decodes to itself."""

    images: ImageSet
    config: TrainConfig

    def __getitem__(self, indices: np.ndarray) -> Tensor:
        for index in map(int, indices):
            self.images.image(index)
        return torch.empty(0)
