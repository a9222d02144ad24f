"""Views by DALI's operators: --views-engine dali.

Each sample of the view pipeline is one view, so the graph does not grow with K, and the samples of
an image share its memory. One pipeline with K copies of the graph is slower:
benchmarks/view_pipelines.py.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from nvidia.dali import Pipeline, fn, math, pipeline_def, types
from nvidia.dali.data_node import DataNode
from torch import Tensor

from fastaug.data.image_set import ImageSet
from fastaug.normalization import pixel_statistics
from fastaug.pipelines.decoder import Chunk
from fastaug.pipelines.randaugment import check_families, encode, randaugment
from fastaug.runtime.streams import SideStream
from fastaug.runtime.trace import trace_range
from fastaug.views.batch import view_dtype
from fastaug.views.config import ViewConfig
from fastaug.views.philox import TRAIN_VIEWS
from fastaug.views.plan import PAD, ViewPlans, draw_plans
from fastaug.views.reference import ROUNDING_MARGIN


class OperatorViews:
    """The view pipeline, which the caller feeds and waits for.

    Its operators have a fixed size: growing views have a pipeline for each size, built when the
    first batch of that size starts.
    """

    padded = True
    """Whether images need reflected borders for --crop pad."""

    def __init__(
        self,
        images: ImageSet,
        config: ViewConfig,
        per_batch: int,
        device: torch.device,
        pipeline: dict[str, Any],
    ) -> None:
        self._images, self._config, self._device = images, config, device
        self._side = SideStream(device) if device.type == "cuda" else None
        if config.augment == "randaugment" and not config.uses_dali_policy:
            check_families()
        decoded_on = "cpu" if images.array is not None else pipeline["device"]
        self._settings = pipeline | {"decoded_on": decoded_on}
        self._settings["batch_size"] = per_batch * config.views
        self._pipelines: dict[int, Pipeline] = {}
        """By the size of the views."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The GPU stream on which decoded images must be complete."""
        return None if self._side is None else self._side.stream

    def start(self, work: tuple[Chunk, Any]) -> tuple[Chunk, Any]:
        """work: a chunk with its B images decoded by DALI, or None for images in memory."""
        batch, images = work
        if images is None:
            images = self._from_memory(batch.indices)
        if (size := batch.plans.size) not in self._pipelines:
            self._pipelines[size] = self._built(size)
        pipeline = self._pipelines[size]
        samples = self._feed(pipeline, batch.plans, images)
        pipeline.schedule_run()
        return batch, samples  # must stay alive until the views are made

    def finish(self, started: tuple[Chunk, Any]) -> tuple[Chunk, Tensor]:
        batch, samples = started
        size = batch.plans.size
        # Views grow: those of smaller batches are all made.
        self._pipelines = {own: p for own, p in self._pipelines.items() if own >= size}
        (views,) = self._pipelines[size].outputs(cuda_stream=self.stream)
        if self._side is None:
            return batch, self._batch(batch, views)
        self._side.release()
        current = torch.cuda.current_stream(self._device)
        # Copied on this stream: DALI would not know that the current one still reads its memory.
        with torch.cuda.stream(self._side.stream):
            made = self._batch(batch, views, copy=True)
        current.wait_event(self._side.keep((samples, views)))
        made.record_stream(current)
        return batch, made

    def _batch(self, batch: Chunk, views: Any, *, copy: bool = False) -> Tensor:
        """[B, K, 3, S, S], stored B, K, S, S, 3."""
        config, size = self._config, batch.plans.size
        shape = (len(batch.indices), config.views, size, size, 3)
        made = torch.from_dlpack(views.as_tensor()).view(shape).permute(0, 1, 4, 2, 3)
        # DALI does not make bf16.
        return made.to(view_dtype(config.views_dtype), copy=copy)

    def _from_memory(self, indices: np.ndarray) -> np.ndarray:
        """[B, H, W, 3] uint8, reflected at the edges for --crop pad."""
        assert self._images.array is not None
        with trace_range("decode"):
            return self._reflected(self._images.array[indices])

    def _reflected(self, images: np.ndarray) -> np.ndarray:
        if self._config.crop != "pad":
            return images
        return np.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)), mode="reflect")

    def _feed(self, pipeline: Pipeline, plans: ViewPlans, images: Any) -> Any:
        """images: B decoded by DALI, or an array -> the B*K samples that were fed."""
        views = self._config.views
        for name, values in plan_inputs(plans, self._config).items():
            pipeline.feed_input(name, values)
        samples: Any
        if isinstance(images, np.ndarray):
            samples = np.repeat(images, views, axis=0)
        else:
            samples = [image for image in images for _ in range(views)]
        if self._side is None or isinstance(samples, np.ndarray):
            pipeline.feed_input("images", samples)
        else:  # one kernel copies all of them, not B*K calls of cudaMemcpyAsync
            pipeline.feed_input(
                "images", samples, cuda_stream=self._side.stream, use_copy_kernel=True
            )
        return samples

    def _built(self, size: int) -> Pipeline:
        """A pipeline for views of this size, warmed up as in the decoder: the first schedule_run
        starts as many runs as the queue is deep."""
        config = replace(self._config, size=size, initial_size=0)
        # DALI's own augmentations use deprecated names of operators, and DALI resets the warning
        # filters: recording keeps the warnings from being printed.
        with warnings.catch_warnings(record=True):
            pipeline = view_pipeline(config, **self._settings)
        blank: Any = self._reflected(np.zeros((1, size, size, 3), np.uint8))
        if self._settings["decoded_on"] == "gpu":
            blank = [torch.from_numpy(blank[0]).to(self._device)]
        where = np.zeros(1, np.int64), np.array([[size, size]])
        plans = draw_plans(config, 0, 0, TRAIN_VIEWS, *where)
        depth = self._settings["prefetch_queue_depth"]
        samples = [self._feed(pipeline, plans, blank) for _ in range(depth)]
        pipeline.schedule_run()
        for _ in samples:
            pipeline.outputs()
        return pipeline


# DALI has no operator that makes bf16: finish() casts.
_DTYPES = {
    torch.float32: types.FLOAT,
    torch.float16: types.FLOAT16,
    torch.bfloat16: types.FLOAT,
}
_INTERPOLATION = {"bicubic": types.INTERP_CUBIC, "bilinear": types.INTERP_LINEAR}


@pipeline_def(enable_conditionals=True)
def view_pipeline(config: ViewConfig, device: str, decoded_on: str) -> DataNode:
    """Inputs "images": [H, W, 3] uint8 and those of plan_inputs -> [S, S, 3], normalized."""
    images = fn.external_source(
        name="images",
        device=decoded_on,
        dtype=types.UINT8,
        ndim=3,
        layout="HWC",
        # The loader keeps images in host memory alive until the views are made.
        no_copy=decoded_on == "cpu",
    )
    images = images.gpu() if device == "gpu" and decoded_on == "cpu" else images
    return normalized_views(images, plan_sources(config), config)


def plan_sources(config: ViewConfig, suffix: str = "") -> dict[str, DataNode]:
    """The inputs that plan_inputs fills, by name without the suffix, in host memory."""
    kinds = {"start": (types.INT32, 1), "shape": (types.INT32, 1), "mirror": (types.INT32, 0)}
    if config.augment == "randaugment":
        kinds |= {"choices": (types.INT32, 1), "numbers": (types.FLOAT, 2)}
    return {
        name: fn.external_source(name=name + suffix, dtype=dtype, ndim=dimensions)
        for name, (dtype, dimensions) in kinds.items()
    }


def plan_inputs(plans: ViewPlans, config: ViewConfig) -> dict[str, np.ndarray]:
    """Inputs of plan_sources; each [B*K, ...]."""
    boxes = plans.boxes.reshape(-1, 4)
    margin = PAD if config.crop == "pad" else 0  # of the images
    inputs = {
        "start": boxes[:, :2] + np.int32(margin),
        "shape": np.ascontiguousarray(boxes[:, 2:]),
        "mirror": plans.flips.reshape(-1).astype(np.int32),
    }
    if config.augment == "randaugment":
        inputs["choices"], inputs["numbers"] = encode(plans, config)
    return inputs


def normalized_views(images: DataNode, plan: dict[str, DataNode], config: ViewConfig) -> DataNode:
    """Crop, resize, flip, RandAugment, normalize and cast, on the device of the images."""
    views = fn.slice(images, start=plan["start"], shape=plan["shape"], axes=[0, 1])
    if config.crop == "resized":
        views = fn.resize(
            views,
            size=[config.size, config.size],
            interp_type=_INTERPOLATION[config.interpolation],
            antialias=config.antialias,
            dtype=types.FLOAT,
        )
    mirror = plan["mirror"]
    if config.augment == "randaugment":
        # Towards zero and clipped, as TensorFlow casts.
        views = fn.cast(math.floor(views + ROUNDING_MARGIN), dtype=types.UINT8)
        views = fn.flip(views, horizontal=mirror)
        views = randaugment(views, plan["choices"], plan["numbers"], config)
        mirror = 0
    mean, deviation = pixel_statistics(config.normalize)
    return fn.crop_mirror_normalize(
        views,
        mirror=mirror,
        mean=list(mean),
        std=list(deviation),
        dtype=_DTYPES[view_dtype(config.views_dtype)],
        output_layout="HWC",
    )
