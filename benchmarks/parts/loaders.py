"""Loaders compared by benchmarks/throughput.py: same files, same output.

fastaug fused            DALI decodes once, the fused kernel makes K views, in threads
fastaug dali operators   DALI decodes once and makes K views by its own operators, in its threads
fastaug torch            torch worker processes: one decode, K views
torchvision, one decode  torch worker processes with transforms.v2, one decode per image
torchvision, K decodes   the same, one decode per view, as repeated augmentation does
timm, K decodes          timm's training transform on Pillow images, one decode per view
ffcv                     FFCV's compiled threads on a .beton of the same JPEGs, K decodes

All resize crops as --interpolation and --antialias say, except FFCV, which has one way (OpenCV's
area, which reads every pixel of the crop). With --crop pad only fastaug's and torchvision's take
part. RandAugment is each library's own, at the same number of operations and the same share of its
largest magnitude. Code for GPUs follows the libraries' advice and has never run on one.
"""

from __future__ import annotations

import io
import itertools
import math
import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import InterpolationMode, v2

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet, Manifest
from fastaug.data.sampler import BatchSampler
from fastaug.engine.loaders import build_loader, scan_configured
from fastaug.errors import ConfigError, KernelUnavailableError
from fastaug.normalization import pixel_statistics
from fastaug.runtime.cores import worker_count
from fastaug.views.batch import view_dtype
from fastaug.views.config import ViewConfig
from fastaug.views.engine import fused_engine, resolve_engine
from fastaug.views.plan import PAD
from parts.ffcv_loader import ffcv
from parts.timing import Stream, UnfitError

Own = Literal["fused", "dali", "torch"]
"""fastaug's loaders, as --loader of the benchmark names them."""
FUSED = "fastaug fused"
"""The loader that the others are compared with."""
OWN: dict[Own, str] = {"fused": FUSED, "dali": "fastaug dali operators", "torch": "fastaug torch"}
PREFETCH = 2
"""Batches per worker that torch's DataLoader prefetches; fastaug's torch loader has the same."""
ENDLESS = 10**6
"""Epochs: fastaug's loaders prefetch across the end of an epoch, but not beyond the last one."""


def training_loader(own: Own) -> tuple[Literal["dali", "torch"], str]:
    """--loader and --views-engine of a training that uses this loader."""
    return ("torch", "auto") if own == "torch" else ("dali", own)


def repeated(images: ImageSet, config: TrainConfig) -> ImageSet:
    """Scanned images, repeated if they do not fill a batch."""
    times = math.ceil(config.images_per_step / len(images))
    if times == 1:
        return images
    assert images.manifest is not None
    count, found = len(images), images.manifest
    places = np.tile(np.arange(count), times)
    bad = {n * count + i: why for n in range(times) for i, why in found.bad.items()}
    manifest = Manifest(found.sizes[places], found.plain[places], bad)
    return replace(images.subset(places, images.name), manifest=manifest)


# --- fastaug ---


def _fastaug(own: Own, images: ImageSet, config: TrainConfig, device: torch.device) -> Stream:
    try:
        if own == "fused":
            fused_engine(device)  # fails now if there is none, not in the middle of a run
        loader, engine = training_loader(own)
        config = config.replace(
            loader=loader,
            views_engine=engine,
            device=str(device),
            accumulate=1,
            epochs=ENDLESS,
        )
        source = build_loader(config, repeated(_scanned(images, config), config))
    except (ConfigError, KernelUnavailableError) as error:
        raise UnfitError(str(error)) from error
    stages = 3 if images.array is None else 1  # read, decode, make views
    ahead = _prefetched(config) if own == "torch" else stages * config.data.prefetch

    def batches() -> Generator[Tensor]:
        while True:
            for batch in source:
                yield batch.views.to(device, non_blocking=True)

    return Stream(batches, ahead)


def _scanned(images: ImageSet, config: TrainConfig) -> ImageSet:
    return scan_configured(config.data, images) if images.manifest is None else images


def decode_only(
    images: ImageSet, config: TrainConfig, device: torch.device, loader: Literal["dali", "torch"]
) -> Stream:
    """Only the decoding of fastaug's loader: an empty tensor for each batch of images."""
    if images.array is not None:
        raise UnfitError("images in memory are not decoded")
    config = config.replace(loader=loader, views_engine="auto", accumulate=1)
    images = _scanned(images, config)
    if loader == "torch":
        return _in_workers(_Decoded(images, config), device)
    from fastaug.pipelines.loader import Stages

    images = repeated(images, config)
    shared = {"seed": config.run.seed, "images_per_batch": config.images_per_step}
    sampler = BatchSampler(images, train=True, **shared)
    engine = resolve_engine(config.view, device, report=False)
    stages = Stages(images, config.data, config.resolved_view, engine, device=device, **shared)

    def batches() -> Generator[Tensor]:
        keys = (key for epoch in itertools.count() for key in sampler.batches(images, epoch))
        for _ in stages.decoded(keys):
            yield torch.empty(0)

    return Stream(batches, 2 * config.data.prefetch)  # read and decode


# --- torchvision and timm in torch's worker processes ---


def torchvision_views(view: ViewConfig) -> Callable[[Tensor], Tensor]:
    """A transform of [3, H, W] uint8 to a view [3, S, S] uint8.

    Crops tensors and applies RandAugment to Pillow images, whichever is faster. On 24 pictures of
    photos.py in one thread at K=8, 224 px: crop and flip 1,500 views/s of tensors, 540 of Pillow
    images; then RandAugment of 2 operations 440 and 480, of 4 operations 290 and 440.
    """
    _check_policy(view)
    crop: v2.Transform
    if view.crop == "pad":
        crop = v2.RandomCrop(view.size, padding=PAD, padding_mode="reflect")
    else:
        crop = v2.RandomResizedCrop(
            view.size,
            scale=view.crop_area,
            interpolation=InterpolationMode(view.interpolation),
            antialias=view.antialias,
        )
    steps: list[Any] = [crop, v2.RandomHorizontalFlip()]
    if view.augment == "randaugment":
        magnitude = round(30 * _strength(view))
        policy = v2.RandAugment(view.randaugment_layers, magnitude, num_magnitude_bins=31)
        steps += [v2.ToPILImage(), policy, v2.PILToTensor()]
    return v2.Compose(steps)


def timm_views(view: ViewConfig) -> Callable[[Image.Image], Tensor]:
    """A transform of a Pillow image to a view [3, S, S] uint8.

    timm's operations use the interpolation of the crop too.
    """
    from timm.data import create_transform

    _check_policy(view)
    if view.crop == "pad":
        raise UnfitError("takes part with --crop resized only: it has no reflected padding")
    if not view.antialias:
        raise UnfitError("timm resizes by Pillow, which always antialiases")
    policy = f"rand-m{round(10 * _strength(view))}-n{view.randaugment_layers}"
    return create_transform(
        view.size,
        is_training=True,
        use_prefetcher=True,  # leaves out the normalization, which is done as for the others
        scale=view.crop_area,
        interpolation=view.interpolation,
        color_jitter=None,
        auto_augment=policy if view.augment == "randaugment" else None,
    )


def _check_policy(view: ViewConfig) -> None:
    if view.augment == "none":
        raise UnfitError("takes part with --augment crop-flip and randaugment only")


def _strength(view: ViewConfig) -> float:
    """RandAugment's magnitude as a share of the largest."""
    return view.randaugment_magnitude / (30 if view.randaugment_policy == "dali" else 10)


def _decode_tensor(images: ImageSet, index: int) -> Tensor:
    """[3, H, W] uint8."""
    if images.array is not None:
        return torch.from_numpy(images.array[index]).permute(2, 0, 1)
    content = torch.frombuffer(bytearray(images.encoded(index)), dtype=torch.uint8)
    return decode_image(content, mode=ImageReadMode.RGB)


def _decode_pillow(images: ImageSet, index: int) -> Image.Image:
    if images.array is not None:
        return Image.fromarray(images.array[index])
    return Image.open(io.BytesIO(images.encoded(index))).convert("RGB")


@dataclass(frozen=True)
class _Views(Dataset):
    """Runs in the workers: indices of a batch's images -> its views."""

    images: ImageSet
    config: TrainConfig
    decode: Callable[[ImageSet, int], Any]
    make: Callable[[Any], Tensor]
    decodes: int
    """Decodes per image: 1 or K."""

    def __getitem__(self, indices: np.ndarray) -> Tensor:
        view = self.config.resolved_view
        mean, deviation = (torch.tensor(values) for values in pixel_statistics(view.normalize))
        shape = (len(indices), view.views, view.size, view.size, 3)
        views = torch.empty(shape, dtype=view_dtype(view.views_dtype))
        for own, index in zip(views, map(int, indices), strict=True):
            for number, slot in enumerate(own):
                if number < self.decodes:
                    image = self.decode(self.images, index)
                pixels = self.make(image).permute(1, 2, 0)
                # View by view, which stays in the core's cache, and written once.
                slot.copy_(torch.sub(pixels, mean).mul_(1 / deviation))
        return views.permute(0, 1, 4, 2, 3)


@dataclass(frozen=True)
class _Decoded(Dataset):
    """Runs in the workers: decodes and discards."""

    images: ImageSet
    config: TrainConfig

    def __getitem__(self, indices: np.ndarray) -> Tensor:
        for index in map(int, indices):
            self.images.image(index)
        return torch.empty(0)


class EndlessBatches:
    """Indices of B good images at a time; each pass has a new order, batches span passes."""

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


def _in_workers(work: _Views | _Decoded, device: torch.device) -> Stream:
    config = work.config
    workers = worker_count(config.data.workers)

    def batches() -> Generator[Tensor]:
        loader: DataLoader = DataLoader(
            work,
            sampler=EndlessBatches(work.images, config),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=PREFETCH if workers else None,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_ignore_interrupts,
            generator=torch.Generator().manual_seed(config.run.seed),
        )
        for batch in loader:
            yield batch.to(device, non_blocking=True)

    return Stream(batches, _prefetched(config))


def _prefetched(config: TrainConfig) -> int:
    return PREFETCH * worker_count(config.data.workers)


def _ignore_interrupts(_worker: int) -> None:
    """Ctrl-C reaches the whole process group; the benchmark ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _torchvision(
    decodes: int, images: ImageSet, config: TrainConfig, device: torch.device
) -> Stream:
    """decodes: per image; 0: one per view."""
    make = torchvision_views(config.view)
    return _in_workers(
        _Views(images, config, _decode_tensor, make, decodes or config.view.views), device
    )


def _timm(images: ImageSet, config: TrainConfig, device: torch.device) -> Stream:
    work = _Views(images, config, _decode_pillow, timm_views(config.view), config.view.views)
    return _in_workers(work, device)


def _ffcv(images: ImageSet, config: TrainConfig, device: torch.device) -> Stream:
    _check_policy(config.view)
    return ffcv(images, config, device, EndlessBatches(images, config))


Build = Callable[[ImageSet, TrainConfig, torch.device], Stream]
"""Batches of views [B, K, 3, S, S], stored B, K, S, S, 3, normalized, on the device. A batch is
valid until the next one is requested."""
LOADERS: dict[str, Build] = {
    **{name: partial(_fastaug, own) for own, name in OWN.items()},
    "torchvision, one decode": partial(_torchvision, 1),
    "torchvision, K decodes": partial(_torchvision, 0),
    "timm, K decodes": _timm,
    "ffcv": _ffcv,
}


def check_batch(batch: Tensor, config: TrainConfig) -> None:
    """Raise ValueError unless these are normalized views of the config that differ."""
    size, views = config.view.size, config.view.views
    dtype = view_dtype(config.resolved_view.views_dtype)
    shape = (config.images_per_step, views, 3, size, size)
    if tuple(batch.shape) != shape:
        raise ValueError(f"a batch has shape {tuple(batch.shape)}, expected {shape}")
    if batch.dtype != dtype:
        raise ValueError(f"a batch has dtype {batch.dtype}, expected {dtype}")
    if not batch.permute(0, 1, 3, 4, 2).is_contiguous():
        raise ValueError(f"a batch is not stored B, K, S, S, 3: its strides are {batch.stride()}")
    values = batch.float()
    # Normalized pixel values are within -2.2 and 2.7; a bicubic edge may overshoot by a half.
    least, largest = values.min().item(), values.max().item()
    mean, deviation = values.mean().item(), values.std().item()
    if not (least >= -4 and largest <= 5 and abs(mean) < 2 and 0.2 < deviation < 2):
        raise ValueError(
            f"values are not those of normalized images: {least:.3g} to {largest:.3g}, "
            f"mean {mean:.3g}, standard deviation {deviation:.3g}"
        )
    # Most images, as chance may draw a small image's crop twice.
    for one, other in itertools.combinations(range(views), 2):
        if (batch[:, one] == batch[:, other]).flatten(1).all(1).float().mean() > 0.5:
            raise ValueError(f"views {one} and {other} of an image are identical")
