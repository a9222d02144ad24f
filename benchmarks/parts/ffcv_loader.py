"""FFCV, where it is installed, as one of the loaders of benchmarks/parts/loaders.py."""

from __future__ import annotations

import io
import itertools
import shutil
import tempfile
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import redirect_stderr, suppress
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.normalization import pixel_statistics
from fastaug.runtime.cores import worker_count
from parts.timing import Stream, UnfitError

PASS = 1024
"""Batches of one pass: FFCV wants the order of all images beforehand."""
AHEAD = 3
"""FFCV's default for batches_ahead."""
MAX_IMAGES = 20_000
"""Limit for copying images into a .beton."""


def ffcv(
    images: ImageSet, config: TrainConfig, device: torch.device, order: Iterable[np.ndarray]
) -> Stream:
    """K views are K decodes (its decoder includes the crop): each image K times in a row.

    It decodes with libjpeg's fast DCT, up to 8 pixel values off the others at quality 98. Tested
    with ffcv 1.0.2, numba 0.68, numpy 2.4 on a CPU: apt-get install libopencv-dev
    libturbojpeg0-dev pkg-config, pip install --no-build-isolation ffcv.
    """
    try:
        from ffcv.fields import RGBImageField
        from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import (
            NormalizeImage,
            RandomHorizontalFlip,
            ToDevice,
            ToTensor,
            ToTorchImage,
        )
    except ImportError as error:
        raise UnfitError(f"ffcv is not installed ({error})") from error
    view = config.resolved_view
    for unfit, why in (
        (view.crop == "pad", "ffcv has no reflected padding"),
        (view.augment == "randaugment", "ffcv has no RandAugment"),
        (view.views_dtype == "bf16", "ffcv has no bf16"),
        (images.array is not None, "ffcv reads files, not images in memory"),
    ):
        if unfit:
            raise UnfitError(why)
    folder = Path(tempfile.mkdtemp(prefix="fastaug-ffcv-"))
    _write_beton(folder / "images.beton", images)
    mean, deviation = (np.array(values) for values in pixel_statistics(view.normalize))
    number_type = np.float16 if view.views_dtype == "fp16" else np.float32
    steps = [
        RandomResizedCropRGBImageDecoder((view.size, view.size), scale=view.crop_area),
        RandomHorizontalFlip(),
        NormalizeImage(mean, deviation, number_type),
        ToTensor(),
        ToTorchImage(),
        *([ToDevice(device, non_blocking=True)] if device.type == "cuda" else []),
    ]
    loader = Loader(
        str(folder / "images.beton"),
        batch_size=config.optim.batch_size,
        num_workers=max(1, worker_count(config.data.workers)),
        order=OrderOption.SEQUENTIAL,
        indices=np.repeat(np.concatenate(list(itertools.islice(order, PASS))), view.views),
        pipelines={"image": steps},
        custom_fields={"image": RGBImageField},
        batches_ahead=AHEAD,
    )

    def batches() -> Generator[Tensor]:
        while True:
            epoch = iter(loader)
            try:
                for (views,) in epoch:
                    yield views.unflatten(0, (-1, view.views))
            finally:
                epoch.iter_ixes = iter(())
                while epoch.is_alive():  # its thread blocks until the queue has room
                    with suppress(Empty):
                        epoch.output_queue.get(timeout=0.05)
                epoch.close()

    weakref.finalize(batches, shutil.rmtree, folder, ignore_errors=True)
    return Stream(batches, AHEAD + 1)  # one more is finished and waits for room in the queue


def _write_beton(file: Path, images: ImageSet) -> None:
    """Store the JPEGs unchanged: FFCV's own writer would decode and encode them again."""
    from ffcv.fields import RGBImageField
    from ffcv.fields.rgb_image import IMAGE_MODES
    from ffcv.writer import DatasetWriter

    # Checked here: the writer would wait forever for a worker process that has failed.
    if images.bad or len(images) > MAX_IMAGES:
        raise UnfitError(
            f"ffcv copies the images: for at most {MAX_IMAGES:,}, all of them readable"
        )
    if not all(_is_color_jpeg(images.encoded(index)) for index in range(len(images))):
        raise UnfitError("ffcv decodes color JPEGs only")

    class Stored(RGBImageField):
        def encode(self, destination: Any, content: bytes, malloc: Callable) -> None:
            with Image.open(io.BytesIO(content)) as image:
                destination["width"], destination["height"] = image.size
            destination["mode"] = IMAGE_MODES["jpg"]
            destination["data_ptr"], storage = malloc(len(content))
            storage[:] = np.frombuffer(content, np.uint8)

    class Contents:
        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, index: int) -> tuple[bytes]:
            return (images.encoded(int(index)),)

    writer = DatasetWriter(str(file), {"image": Stored()}, num_workers=1)
    with redirect_stderr(io.StringIO()):  # its progress bar
        writer.from_indexed_dataset(Contents())


def _is_color_jpeg(content: bytes) -> bool:
    with Image.open(io.BytesIO(content)) as image:
        return image.format == "JPEG" and image.mode == "RGB"
