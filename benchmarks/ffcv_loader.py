"""FFCV, where it is installed, as one of the loaders of benchmarks/loader_contenders.py."""

from __future__ import annotations

import io
import itertools
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch
from loader_parts import Contender, EndlessBatches, check_policy
from PIL import Image
from timing import Unfit
from torch import Tensor

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.runtime.cores import worker_count
from fastaug.views.reference import NORMALIZATION

EPOCH = 1024
"""Batches of one of its passes, for which it takes the order of all images at once."""
FFCV_AHEAD = 3
"""FFCV's own default."""
FFCV_MOST = 20_000
"""Images that are copied into a file of FFCV's."""


def ffcv(images: ImageSet, config: TrainConfig, device: torch.device) -> Contender:
    """Its decoder crops what it has decoded, so K views are K decodes: each image K times in a row.

    It decodes with libjpeg's fast DCT, up to 8 levels off what the others see at quality 98. Ran
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
        raise Unfit(f"ffcv is not installed ({error})") from error
    check_policy(config, pads=False)
    if config.view.augment == "randaugment":
        raise Unfit("ffcv has no RandAugment")
    if config.view.views_dtype == "bf16":
        raise Unfit("ffcv makes no bf16")
    if images.array is not None:
        raise Unfit("of images in memory, which ffcv would store in a file first")
    folder = Path(tempfile.mkdtemp(prefix="fastaug-ffcv-"))
    file = folder / "images.beton"
    _write_beton(file, images)
    orders = itertools.islice(EndlessBatches(images, config), EPOCH)
    mean, deviation = (np.array(values) for values in NORMALIZATION[config.view.normalize])
    number_type = np.float16 if config.view.views_dtype == "fp16" else np.float32
    steps = [
        RandomResizedCropRGBImageDecoder(
            (config.view.size, config.view.size), scale=config.view.crop_area
        ),
        RandomHorizontalFlip(),
        NormalizeImage(mean, deviation, number_type),
        ToTensor(),
        ToTorchImage(),
        *([ToDevice(device, non_blocking=True)] if device.type == "cuda" else []),
    ]
    loader = Loader(
        str(file),
        batch_size=config.optim.batch_size,
        num_workers=max(1, worker_count(config.data.workers)),
        order=OrderOption.SEQUENTIAL,
        indices=np.repeat(np.concatenate(list(orders)), config.view.views),
        pipelines={"image": steps},
        custom_fields={"image": RGBImageField},
        batches_ahead=FFCV_AHEAD,
    )

    def batches() -> Iterator[Tensor]:
        while True:
            epoch = iter(loader)
            try:
                for (views,) in epoch:
                    yield views.unflatten(0, (-1, config.view.views))
            finally:
                epoch.iter_ixes = iter(())
                while epoch.is_alive():  # its thread waits for a place in the queue, without end
                    with suppress(Empty):
                        epoch.output_queue.get(timeout=0.05)
                epoch.close()

    weakref.finalize(batches, shutil.rmtree, folder, ignore_errors=True)
    return Contender(FFCV_AHEAD + 1, batches)  # one more is done and waits for a place


def _write_beton(file: Path, images: ImageSet) -> None:
    """The very bytes of the JPEGs: FFCV's own writer would decode and encode them again."""
    from ffcv.fields import RGBImageField
    from ffcv.fields.rgb_image import IMAGE_MODES
    from ffcv.writer import DatasetWriter

    # Here, as the writer waits without end for a process of its own that has failed.
    if images.bad or len(images) > FFCV_MOST:
        raise Unfit(f"ffcv copies the images: for at most {FFCV_MOST:,}, none of them bad")
    if not all(_is_color_jpeg(images.encoded(index)) for index in range(len(images))):
        raise Unfit("ffcv decodes JPEGs in color alone")

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
