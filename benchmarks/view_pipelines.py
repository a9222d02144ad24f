"""Ways to build the view pipeline: views per second of each.

    python benchmarks/view_pipelines.py [--data FOLDER] [--views 1 8 ...]

fused   --views-engine fused: DALI decodes, one kernel makes B*K views
wide    --views-engine dali: one pipeline decodes, a second one makes the views
copies  one pipeline: decode, then K copies of the view graph
stock   wide, but with DALI's apply_rand_augment and its 16-way choice

They take turns, so that noise affects all of them; medians over batches, ratios to `wide`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, math, pipeline_def, types
from nvidia.dali.auto_aug import augmentations as dali_augmentations
from nvidia.dali.auto_aug.core import augmentation
from nvidia.dali.auto_aug.rand_augment import apply_rand_augment
from nvidia.dali.data_node import DataNode

from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.sampler import BatchKey
from fastaug.data.scan import scan_and_check
from fastaug.data.sources import DataSource, open_flat
from fastaug.diagnostics.photos import cifar_like, photo_folder
from fastaug.normalization import pixel_statistics
from fastaug.pipelines.dali_views import OperatorViews, normalized_views, plan_inputs, plan_sources
from fastaug.pipelines.decoder import Chunk, decode_pipeline
from fastaug.pipelines.fused_views import FusedViews
from fastaug.views.buffer_pool import BufferPool
from fastaug.views.config import ViewConfig
from fastaug.views.engine import fused_engine
from fastaug.views.philox import TRAIN_VIEWS
from fastaug.views.plan import PAD, draw_plans

IMAGES = 32
"""Images in a batch."""
CPU = torch.device("cpu")

Form = Callable[[Chunk], object]
"""Makes the views of a chunk, from reading to the end."""


def main(args: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="", help="a folder of photographs; default: generated")
    parser.add_argument("--views", type=int, nargs="+", default=[1, 8], help="numbers of views K")
    parser.add_argument("--batches", type=int, default=7, help="batches measured of each form")
    parser.add_argument("--threads", type=int, default=2, help="threads of each pipeline")
    options = parser.parse_args(args)
    # DALI's own augmentations call operators by names that DALI has deprecated.
    with warnings.catch_warnings(record=True):
        data = DataConfig(options.data or str(photo_folder()))
        photos = scan_and_check(open_flat(data) or DataSource(data).train)
        small = scan_and_check(DataSource(DataConfig(str(cifar_like()))).train)
        heads = "  ".join(f"{form:>17}" for form in FORMS)
        print(f"{'data':8} {'policy':18} {'K':>3} {heads}  (views/s, ratio)")
        for views in options.views:
            for name, images, base in (
                ("photos", photos, ViewConfig(views=views, size=224, crop_area=(0.08, 1.0))),
                ("memory", small, ViewConfig(views=views, size=32, crop="pad", normalize="cifar")),
            ):
                for layers in (0, 2, 4):
                    view = replace(base, augment="crop-flip")
                    if layers:
                        view = replace(base, augment="randaugment", randaugment_layers=layers)
                    rates = measure(images, view, options.threads, options.batches)
                    policy = f"RandAugment N={layers}" if layers else "crop and flip"
                    cells = (f"{r:8.0f} ({r / rates['wide']:.2f} x)" for r in rates.values())
                    print(f"{name:8} {policy:18} {views:3} {'  '.join(cells)}", flush=True)


def measure(images: ImageSet, view: ViewConfig, threads: int, batches: int) -> dict[str, float]:
    """Views per second of each form."""
    forms = {
        name: build(images, view, threads)
        for name, build in FORMS.items()
        if name != "stock" or view.augment == "randaugment"
    }
    assert images.manifest is not None
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(batches + 1):
        indices = np.arange(turn * IMAGES, (turn + 1) * IMAGES) % len(images)
        sizes = images.manifest.sizes[indices]
        for name, make in forms.items():
            started = time.perf_counter()
            plans = draw_plans(view, 0, 0, TRAIN_VIEWS, indices, sizes)
            make(Chunk([BatchKey(0, TRAIN_VIEWS, indices)], indices, plans))
            if turn:  # the first batch also fills the pipelines
                seconds[name].append(time.perf_counter() - started)
    return {name: IMAGES * view.views / statistics.median(s) for name, s in seconds.items()}


# --- the forms ---


def fused(images: ImageSet, view: ViewConfig, threads: int) -> Form:
    viewer = FusedViews(fused_engine(CPU), images, view, threads, CPU, BufferPool(keep=1))
    return _decode_then(viewer, images, threads)


def wide(images: ImageSet, view: ViewConfig, threads: int) -> Form:
    pipeline = {"device": "cpu", **_pipeline(threads)}
    return _decode_then(OperatorViews(images, view, IMAGES, CPU, pipeline), images, threads)


def _decode_then(viewer: FusedViews | OperatorViews, images: ImageSet, threads: int) -> Form:
    decode = _decoder(images, threads)

    def make(chunk: Chunk) -> None:
        decoded = decode(chunk.indices) if images.array is None else None
        viewer.finish(viewer.start((chunk, decoded)))

    return make


def stock(images: ImageSet, view: ViewConfig, threads: int) -> Form:
    graph = _stock_pipeline(view, batch_size=IMAGES * view.views, **_pipeline(threads))
    decode = _decoder(images, threads)

    def make(chunk: Chunk) -> None:
        samples: Any
        if images.array is None:
            samples = [image for image in decode(chunk.indices) for _ in range(view.views)]
        else:
            samples = np.repeat(_contents(chunk.indices, images), view.views, axis=0)
        for name, values in plan_inputs(chunk.plans, replace(view, augment="crop-flip")).items():
            graph.feed_input(name, values)
        graph.feed_input("images", samples)
        graph.schedule_run()
        graph.outputs()

    return make


def copies(images: ImageSet, view: ViewConfig, threads: int) -> Form:
    graph = _copies_pipeline(view, images.array is None, batch_size=IMAGES, **_pipeline(threads))

    def make(chunk: Chunk) -> None:
        graph.feed_input("images", _contents(chunk.indices, images))
        for name, values in plan_inputs(chunk.plans, view).items():
            each = values.reshape(IMAGES, view.views, *values.shape[1:])
            for number in range(view.views):
                graph.feed_input(f"{name}{number}", np.ascontiguousarray(each[:, number]))
        graph.schedule_run()
        graph.outputs()

    return make


FORMS = {"fused": fused, "wide": wide, "copies": copies, "stock": stock}


def _pipeline(threads: int) -> dict[str, Any]:
    return {"num_threads": threads, "device_id": None, "prefetch_queue_depth": 1}


def _decoder(images: ImageSet, threads: int) -> Callable[[np.ndarray], Any]:
    """Indices of images -> DALI's list of them."""
    graph = decode_pipeline("cpu", batch_size=IMAGES, **_pipeline(threads))

    def decode(indices: np.ndarray) -> Any:
        graph.feed_input("encoded", _contents(indices, images))
        graph.schedule_run()
        return graph.outputs()[0]

    return decode


def _contents(indices: np.ndarray, images: ImageSet) -> list | np.ndarray:
    if images.array is not None:
        padding = ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0))
        return np.pad(images.array[indices], padding, mode="reflect")
    return [np.frombuffer(images.encoded(int(index)), np.uint8) for index in indices]


@pipeline_def(enable_conditionals=True)
def _copies_pipeline(view: ViewConfig, encoded: bool) -> DataNode:
    if encoded:
        content = fn.external_source(name="images", dtype=types.UINT8, ndim=1)
        images = fn.decoders.image(content, jpeg_fancy_upsampling=True, adjust_orientation=False)
    else:
        images = fn.external_source(name="images", dtype=types.UINT8, ndim=3, layout="HWC")
    views = [
        normalized_views(images, plan_sources(view, suffix=str(number)), view)
        for number in range(view.views)
    ]
    return fn.stack(*views)


@pipeline_def(enable_conditionals=True)
def _stock_pipeline(view: ViewConfig) -> DataNode:
    images = fn.external_source(
        name="images", dtype=types.UINT8, ndim=3, layout="HWC", no_copy=True
    )
    plan = plan_sources(replace(view, augment="crop-flip"))
    views = fn.slice(images, start=plan["start"], shape=plan["shape"], axes=[0, 1])
    if view.crop == "resized":
        size = [view.size, view.size]
        views = fn.resize(
            views, size=size, interp_type=types.INTERP_CUBIC, antialias=False, dtype=types.FLOAT
        )
        views = fn.cast(math.floor(views), dtype=types.UINT8)
    views = fn.flip(views, horizontal=plan["mirror"])
    views = apply_rand_augment(
        _nfnet_suite(view.size),
        views,
        view.randaugment_layers,
        int(view.randaugment_magnitude),
        num_magnitude_bins=11,
        fill_value=128,
        interp_type=types.INTERP_NN,
    )
    mean, deviation = pixel_statistics(view.normalize)
    return fn.crop_mirror_normalize(
        views, mean=list(mean), std=list(deviation), dtype=types.FLOAT, output_layout="HWC"
    )


def _nfnet_suite(size: int) -> list:
    """NFNet's operations from DALI's augmentations, as a user of DALI would write them."""
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


if __name__ == "__main__":
    main(sys.argv[1:])
