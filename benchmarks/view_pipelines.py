"""How the view pipeline is built, and what it was chosen over: views per second of each form.

    python benchmarks/view_pipelines.py [--data FOLDER] [--views 1 8 ...]

fused   the product's, --views-engine fused: DALI decodes, one kernel makes B*K views
wide    the product's, --views-engine dali: decode in one pipeline, make them in a second one
copies  one pipeline: decode, then K copies of the view graph
stock   wide, but with DALI's apply_rand_augment and its 16-way choice in place of the families

Forms take turns, so that noise hits all alike; medians over batches, ratios to `wide`.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, math, pipeline_def, types
from nvidia.dali.auto_aug import augmentations as dali_augmentations
from nvidia.dali.auto_aug.core import augmentation
from nvidia.dali.auto_aug.rand_augment import apply_rand_augment
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import Pipeline
from photos import cifar_like, photo_folder

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.sampler import BatchKey
from fastaug.data.scan import scan_images
from fastaug.data.sources import open_split_or_flat
from fastaug.pipelines.dali_views import (
    normalized_views,
    plan_inputs,
    plan_sources,
    view_pipeline,
)
from fastaug.pipelines.decoder import Planned, decode_pipeline
from fastaug.pipelines.fused_views import FusedViews
from fastaug.views.engine import fused_engine
from fastaug.views.philox import TRAIN_VIEWS
from fastaug.views.plan import ViewPlans, draw_plans
from fastaug.views.reference import NORMALIZATION

IMAGES = 32
"""Images in a batch."""


def main() -> None:
    options = _options()
    # DALI's own augmentations call operators by names that DALI has deprecated.
    with warnings.catch_warnings(record=True):
        photos = scan_images(open_split_or_flat(options.data or str(photo_folder()), "train"))
        small = scan_images(open_split_or_flat(str(cifar_like()), "train"))
        heads = "  ".join(f"{form:>17}" for form in FORMS)
        print(f"{'data':8} {'policy':18} {'K':>3} {heads}  (views/s, ratio)")
        for views in options.views:
            for name, images, changes in (
                ("photos", photos, {"size": 224, "crop_area": (0.08, 1.0)}),
                ("memory", small, {"size": 32, "crop": "pad", "normalize": "cifar"}),
            ):
                for layers in (0, 2, 4):
                    config = TrainConfig.from_flat(
                        views=views,
                        batch_size=IMAGES * views,
                        augment="randaugment" if layers else "crop-flip",
                        randaugment_layers=layers or 1,
                        loader="dali",
                        **changes,
                    )
                    measure(name, images, config, options)


def measure(name: str, images: ImageSet, config: TrainConfig, options: argparse.Namespace) -> None:
    forms = {
        form: build(images, config.replace(workers=options.threads), options.threads)
        for form, build in FORMS.items()
        if form != "stock" or config.view.augment == "randaugment"
    }
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    for turn in range(options.batches + 1):
        for form, run in forms.items():
            started = time.perf_counter()
            run(turn)
            if turn:  # the first batch also fills the pipelines
                seconds[form].append(time.perf_counter() - started)
    count = IMAGES * config.view.views
    rates = {form: count / statistics.median(times) for form, times in seconds.items()}
    layers = config.view.randaugment_layers if config.view.augment == "randaugment" else 0
    policy = f"RandAugment N={layers}" if layers else "crop and flip"
    cells = "  ".join(f"{rate:8.0f} ({rate / rates['wide']:.2f} x)" for rate in rates.values())
    print(f"{name:8} {policy:18} {config.view.views:3} {cells}", flush=True)


# --- the forms: (images, config, threads) -> run one batch, whole, from its number ---


def fused(images: ImageSet, config: TrainConfig, threads: int) -> Callable[[int], None]:
    cpu = torch.device("cpu")
    viewer = FusedViews(fused_engine(cpu), images, config, cpu)
    decode = _decoder(images, config, threads)

    def run(number: int) -> None:
        indices = _indices(number, images)
        decoded = decode(indices) if images.array is None else None
        keys = [BatchKey(0, TRAIN_VIEWS, indices)]
        batch = Planned(keys, indices, _plans(indices, images, config))
        viewer.finish(viewer.start((batch, decoded)))

    return run


def wide(images: ImageSet, config: TrainConfig, threads: int) -> Callable[[int], None]:
    make = view_pipeline(
        config.view, "cpu", "cpu", **_pipeline(IMAGES * config.view.views, threads)
    )
    return _decode_then(make, images, config, config, threads)


def stock(images: ImageSet, config: TrainConfig, threads: int) -> Callable[[int], None]:
    make = _stock_pipeline(config, **_pipeline(IMAGES * config.view.views, threads))
    return _decode_then(make, images, config, config.replace(augment="crop-flip"), threads)


def copies(images: ImageSet, config: TrainConfig, threads: int) -> Callable[[int], None]:
    make = _copies_pipeline(config, images.array is None, **_pipeline(IMAGES, threads))

    def run(number: int) -> None:
        indices = _indices(number, images)
        make.feed_input("images", _contents(indices, images))
        for name, values in _plan(indices, images, config).items():
            each = values.reshape(len(indices), config.view.views, *values.shape[1:])
            for view in range(config.view.views):
                make.feed_input(f"{name}{view}", np.ascontiguousarray(each[:, view]))
        make.schedule_run()
        make.outputs()

    return run


FORMS = {"fused": fused, "wide": wide, "copies": copies, "stock": stock}


def _decode_then(
    make: Pipeline, images: ImageSet, config: TrainConfig, planned: TrainConfig, threads: int
) -> Callable[[int], None]:
    """planned: the policy whose plan the pipeline takes."""
    decode = _decoder(images, config, threads)

    def run(number: int) -> None:
        indices = _indices(number, images)
        samples: Any
        if images.array is None:
            samples = [image for image in decode(indices) for _ in range(config.view.views)]
        else:
            samples = np.repeat(_contents(indices, images), config.view.views, axis=0)
        for name, values in _plan(indices, images, planned).items():
            make.feed_input(name, values)
        make.feed_input("images", samples)
        make.schedule_run()
        make.outputs()

    return run


def _decoder(images: ImageSet, config: TrainConfig, threads: int) -> Callable[[np.ndarray], Any]:
    """Places of images -> DALI's list of them."""
    decoder = decode_pipeline("cpu", **_pipeline(IMAGES, threads))

    def decode(indices: np.ndarray) -> Any:
        decoder.feed_input("encoded", _contents(indices, images))
        decoder.schedule_run()
        return decoder.outputs()[0]

    return decode


@pipeline_def(enable_conditionals=True)
def _copies_pipeline(config: TrainConfig, encoded: bool) -> DataNode:
    if encoded:
        content = fn.external_source(name="images", dtype=types.UINT8, ndim=1)
        images = fn.decoders.image(content, jpeg_fancy_upsampling=True, adjust_orientation=False)
    else:
        images = fn.external_source(name="images", dtype=types.UINT8, ndim=3, layout="HWC")
    views = [
        normalized_views(images, plan_sources(config.view, suffix=str(view)), config.view)
        for view in range(config.view.views)
    ]
    return fn.stack(*views)


@pipeline_def(enable_conditionals=True)
def _stock_pipeline(config: TrainConfig) -> DataNode:
    images = fn.external_source(
        name="images", dtype=types.UINT8, ndim=3, layout="HWC", no_copy=True
    )
    plan = plan_sources(config.replace(augment="crop-flip").view)
    views = fn.slice(images, start=plan["start"], shape=plan["shape"], axes=[0, 1])
    if config.view.crop == "resized":
        size = [config.view.size, config.view.size]
        views = fn.resize(
            views, size=size, interp_type=types.INTERP_CUBIC, antialias=False, dtype=types.FLOAT
        )
        views = fn.cast(math.floor(views), dtype=types.UINT8)
    views = fn.flip(views, horizontal=plan["mirror"])
    views = apply_rand_augment(
        _nfnet_suite(config.view.size),
        views,
        config.view.randaugment_layers,
        int(config.view.randaugment_magnitude),
        num_magnitude_bins=11,
        fill_value=128,
        interp_type=types.INTERP_NN,
    )
    mean, deviation = NORMALIZATION[config.view.normalize]
    return fn.crop_mirror_normalize(
        views, mean=list(mean), std=list(deviation), dtype=types.FLOAT, output_layout="HWC"
    )


def _nfnet_suite(size: int) -> list:
    """NFNet's operations out of DALI's augmentations, as a user of DALI would write them."""
    a = dali_augmentations

    @augmentation(mag_range=(0, 40 * size / 224))
    def cutout(data: DataNode, reach: DataNode, fill_value: int = 128) -> DataNode:
        side = fn.cast(reach * 2, dtype=types.FLOAT)
        places = [float(place) for place in range(size)]
        y, x = fn.random.uniform(values=places), fn.random.uniform(values=places)
        corner = fn.stack(y - reach, x - reach)
        extent = fn.stack(side, side)
        return fn.erase(data, anchor=corner, shape=extent, axes=[0, 1], fill_value=fill_value)

    factors = [
        effect.augmentation((0.1, 1.9), False, None)
        for effect in (a.color, a.contrast, a.brightness)
    ]
    reach = 100 * size / 224
    return [
        a.auto_contrast,
        a.equalize,
        a.invert,
        a.rotate.augmentation((0, 30), True),
        a.posterize.augmentation((0, 4), False, a.poster_mask_uint8),
        a.solarize.augmentation((0, 256)),
        a.solarize_add.augmentation((0, 110)),
        *factors,
        a.sharpness.augmentation((0.1, 1.9), False, a.sharpness_kernel_shifted),
        a.shear_x.augmentation((0, 0.3), True),
        a.shear_y.augmentation((0, 0.3), True),
        a.translate_x_no_shape.augmentation((0, reach), True),
        a.translate_y_no_shape.augmentation((0, reach), True),
        cutout,
    ]


# --- what all forms share ---


def _pipeline(batch_size: int, threads: int) -> dict:
    on_cpu = {"device_id": None, "prefetch_queue_depth": 1}
    return {"batch_size": batch_size, "num_threads": threads, **on_cpu}


def _indices(number: int, images: ImageSet) -> np.ndarray:
    return np.arange(number * IMAGES, (number + 1) * IMAGES) % len(images)


def _contents(indices: np.ndarray, images: ImageSet) -> list | np.ndarray:
    if images.array is not None:
        padding = ((0, 0), (4, 4), (4, 4), (0, 0))
        return np.pad(images.array[indices], padding, mode="reflect")
    return [np.frombuffer(images.encoded(int(index)), np.uint8) for index in indices]


def _plan(indices: np.ndarray, images: ImageSet, config: TrainConfig) -> dict[str, np.ndarray]:
    return plan_inputs(_plans(indices, images, config), config.view)


def _plans(indices: np.ndarray, images: ImageSet, config: TrainConfig) -> ViewPlans:
    assert images.manifest is not None
    return draw_plans(
        config.view, config.run.seed, 0, TRAIN_VIEWS, indices, images.manifest.sizes[indices]
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="", help="a folder of photographs; default: made here")
    parser.add_argument("--views", type=int, nargs="+", default=[1, 8], help="numbers of views K")
    parser.add_argument("--batches", type=int, default=7, help="batches measured of each form")
    parser.add_argument("--threads", type=int, default=2, help="threads of each pipeline")
    return parser.parse_args()


if __name__ == "__main__":
    main()
