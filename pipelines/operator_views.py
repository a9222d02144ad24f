"""Views by DALI's operators: --views-engine dali."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.pipelines.decoder import Planned
from fastaug.pipelines.views import plan_inputs, view_pipeline
from fastaug.runtime.trace import named
from fastaug.views.batch import VIEW_DTYPES
from fastaug.views.philox import TRAIN_VIEWS
from fastaug.views.plan import PAD, ViewPlans, draw_plans


class OperatorViews:
    """The view pipeline. Its threads do the work; the caller feeds it and waits."""

    padded = True
    """For --crop pad, images come reflected at their edges."""

    def __init__(
        self,
        images: ImageSet,
        config: TrainConfig,
        per_batch: int,
        device: torch.device,
        pipeline: dict[str, Any],
    ) -> None:
        self._images, self._config, self._device = images, config, device
        decoded_on = "cpu" if images.array is not None else pipeline["device"]
        # DALI's own augmentations call operators by names that DALI has deprecated, and it turns
        # filters of warnings off: record keeps them from being printed.
        with warnings.catch_warnings(record=True):
            self._viewer = view_pipeline(
                config, decoded_on=decoded_on, batch_size=per_batch * config.view.views, **pipeline
            )
        self._warm_up(decoded_on, pipeline["prefetch_queue_depth"])

    def start(self, work: tuple[Planned, Any]) -> tuple[Planned, Any]:
        """The images: B decoded ones, of DALI; or None for those in memory."""
        batch, images = work
        if images is None:
            images = self._from_memory(batch.indices)
        samples = self._feed(batch.plans, images)
        self._viewer.schedule_run()
        return batch, samples  # which must live until the views are made

    def finish(self, started: tuple[Planned, Any]) -> tuple[Planned, Tensor]:
        batch, _ = started
        config, count = self._config, len(batch.indices)
        stream = None
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
        (views,) = self._viewer.outputs(cuda_stream=stream)
        shape = (count, config.view.views, config.view.size, config.view.size, 3)
        made = torch.from_dlpack(views.as_tensor()).view(shape).permute(0, 1, 4, 2, 3)
        return batch, made.to(VIEW_DTYPES[config.view.views_dtype])  # DALI does not make bf16

    def _from_memory(self, indices: np.ndarray) -> np.ndarray:
        """[B, H, W, 3] uint8, reflected at the edges for --crop pad."""
        assert self._images.array is not None
        with named("decode"):
            return self._reflected(self._images.array[indices])

    def _reflected(self, images: np.ndarray) -> np.ndarray:
        if self._config.view.crop != "pad":
            return images
        return np.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)), mode="reflect")

    def _feed(self, plans: ViewPlans, images: Any) -> Any:
        """images: B decoded ones, of DALI or in an array -> the B*K samples that were fed."""
        views = self._config.view.views
        for name, values in plan_inputs(plans, self._config).items():
            self._viewer.feed_input(name, values)
        samples: Any
        if isinstance(images, np.ndarray):
            samples = np.repeat(images, views, axis=0)
        else:
            samples = [image for image in images for _ in range(views)]
        self._viewer.feed_input("images", samples)
        return samples

    def _warm_up(self, decoded_on: str, depth: int) -> None:
        """As the decoder's: the first schedule starts as many runs as the queue is deep."""
        size = self._config.view.size
        blank: Any = self._reflected(np.zeros((1, size, size, 3), np.uint8))
        if decoded_on == "gpu":
            blank = [torch.from_numpy(blank[0]).to(self._device)]
        where = np.zeros(1, np.int64), np.array([[size, size]])
        plans = draw_plans(self._config, 0, TRAIN_VIEWS, *where)
        samples = [self._feed(plans, blank) for _ in range(depth)]
        self._viewer.schedule_run()
        for _ in samples:
            self._viewer.outputs()
