"""The view pipeline: decoded images and view plans in, normalized views out, B*K at once.

Every sample is one view, so the graph does not grow with K, and samples of the same image share its
memory. One pipeline with K copies of the graph is slower: benchmarks/view_pipelines.py.
"""

from __future__ import annotations

import numpy as np
from nvidia.dali import fn, math, pipeline_def, types
from nvidia.dali.data_node import DataNode

from fastaug.config import TrainConfig
from fastaug.pipelines.randaugment import encode, randaugment
from fastaug.views.plan import PAD, ViewPlans
from fastaug.views.reference import LEVEL_TIE, NORMALIZATION

# DALI has no operator that makes bf16: the loader does.
_DTYPES = {"fp32": types.FLOAT, "fp16": types.FLOAT16, "bf16": types.FLOAT}
_INTERPOLATION = {"bicubic": types.INTERP_CUBIC, "bilinear": types.INTERP_LINEAR}


@pipeline_def(enable_conditionals=True)
def view_pipeline(config: TrainConfig, device: str, decoded_on: str) -> DataNode:
    """Inputs "images": [H, W, 3] uint8 and those of plan_inputs -> [S, S, 3], normalized."""
    images = fn.external_source(
        name="images",
        device=decoded_on,
        dtype=types.UINT8,
        ndim=3,
        layout="HWC",
        # The loader keeps what lies on the host until the views are made.
        no_copy=decoded_on == "cpu",
    )
    images = images.gpu() if device == "gpu" and decoded_on == "cpu" else images
    return normalized_views(images, plan_sources(config), config)


def plan_sources(config: TrainConfig, suffix: str = "") -> dict[str, DataNode]:
    """The inputs that plan_inputs fills, by name without the suffix. They stay on the host."""
    kinds = {"start": (types.INT32, 1), "shape": (types.INT32, 1), "mirror": (types.INT32, 0)}
    if config.view.augment == "randaugment":
        kinds |= {"choices": (types.INT32, 1), "numbers": (types.FLOAT, 2)}
    return {
        name: fn.external_source(name=name + suffix, dtype=dtype, ndim=dimensions)
        for name, (dtype, dimensions) in kinds.items()
    }


def plan_inputs(plans: ViewPlans, config: TrainConfig) -> dict[str, np.ndarray]:
    """What plan_sources take; each [B*K, ...]."""
    boxes = plans.boxes.reshape(-1, 4)
    margin = PAD if config.view.crop == "pad" else 0  # the images come with it
    inputs = {
        "start": boxes[:, :2] + np.int32(margin),
        "shape": np.ascontiguousarray(boxes[:, 2:]),
        "mirror": plans.flips.reshape(-1).astype(np.int32),
    }
    if config.view.augment == "randaugment":
        inputs["choices"], inputs["numbers"] = encode(plans, config)
    return inputs


def normalized_views(images: DataNode, plan: dict[str, DataNode], config: TrainConfig) -> DataNode:
    """Crop, resize, flip, RandAugment, normalize and cast, where the images are."""
    views = fn.slice(images, start=plan["start"], shape=plan["shape"], axes=[0, 1])
    if config.view.crop == "resized":
        views = fn.resize(
            views,
            size=[config.view.size, config.view.size],
            interp_type=_INTERPOLATION[config.view.interpolation],
            antialias=config.view.antialias,
            dtype=types.FLOAT,
        )
    mirror = plan["mirror"]
    if config.view.augment == "randaugment":
        # Towards zero and clipped, as TensorFlow casts.
        views = fn.cast(math.floor(views + LEVEL_TIE), dtype=types.UINT8)
        views = fn.flip(views, horizontal=mirror)
        views = randaugment(views, plan["choices"], plan["numbers"], config)
        mirror = 0
    mean, deviation = NORMALIZATION[config.view.normalize]
    return fn.crop_mirror_normalize(
        views,
        mirror=mirror,
        mean=list(mean),
        std=list(deviation),
        dtype=_DTYPES[config.view.views_dtype],
        output_layout="HWC",
    )
