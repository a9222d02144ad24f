"""The DALI loader: the torch loader's batches, decoded by DALI and made into views by an engine.

Everything random is in the plans, which follow from (seed, epoch, image, view). So neither DALI's
pipelines nor the engines have a state: a loader that starts in the middle of an epoch makes the
very batches that would have come, and nothing of DALI need be saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.sampler import BatchKey, Schedule
from fastaug.pipelines.decoder import Decoder, Planned
from fastaug.pipelines.fused_views import FusedViews
from fastaug.pipelines.operator_views import OperatorViews
from fastaug.pipelines.prefetch import prefetch
from fastaug.runtime.cores import worker_count
from fastaug.views.batch import ViewBatch
from fastaug.views.engine import resolve_engine
from fastaug.views.plan import draw_plans

VIEWS_PER_DRAW = 8192
"""Plans that are drawn at once: of a few views, calls to numpy take longer than the numbers."""

NUMBERS_AT_ONCE = 2**21
"""Of views: batches in memory that are smaller, as CIFAR's of 64 views, are made some at once. Else
Python would take longer for a batch than the kernel."""


class DaliLoader(Schedule):
    """An iterable of ViewBatch on the training device."""

    def __init__(
        self, images: ImageSet, config: TrainConfig, *, device: torch.device, **schedule: Any
    ) -> None:
        super().__init__(images, config, **schedule)
        self._device = device
        self._stages: Stages | None = None
        resolve_engine(config, device)  # said, or refused, before anything is made

    def _pass(self, keys: list[BatchKey]) -> Iterator[ViewBatch]:
        if self._stages is None:  # built when first used and kept: it takes 0.2 s and more
            self._stages = Stages(self.images, self.config, self._per_batch, self._device)
        try:
            yield from self._stages.run(keys)
        except Exception:
            self._stages = None  # DALI's pipelines are of no use after an error
            raise


class Stages:
    """Read, decode, make views: each stage works some batches ahead of the next one.

    The work is done by threads of readers, DALI and the engine; this one feeds them and waits.
    """

    def __init__(
        self, images: ImageSet, config: TrainConfig, per_batch: int, device: torch.device
    ) -> None:
        self._images, self._config = images, config
        pipeline: dict[str, Any] = {
            "device": "gpu" if device.type == "cuda" else "cpu",
            "num_threads": max(1, worker_count(config.data.workers)),
            "device_id": _gpu_number(device),
            # One more than is started ahead: to start another one would wait for the oldest.
            "prefetch_queue_depth": config.data.prefetch + 1,
        }
        engine = resolve_engine(config, device)
        self._viewer: FusedViews | OperatorViews
        if engine is None:
            self._viewer = OperatorViews(images, config, per_batch, device, pipeline)
        else:
            self._viewer = FusedViews(engine, images, config, device)
        self._at_once = 1
        """Batches that are made by one call."""
        if engine is not None and images.array is not None:
            numbers = per_batch * config.view.views * 3 * config.view.size**2
            self._at_once = max(1, NUMBERS_AT_ONCE // numbers)
        self._decoder: Decoder | None = None
        if images.array is None:
            padded = self._viewer.padded and config.view.crop == "pad"
            self._decoder = Decoder(images, config, per_batch, padded, pipeline)

    def run(self, keys: Iterable[BatchKey]) -> Iterator[ViewBatch]:
        """The batches of the keys, in their order."""
        viewer, depth = self._viewer, self._config.data.prefetch
        for made, views in prefetch(
            "views", self.decoded(keys), depth, viewer.start, viewer.finish
        ):
            counts = [len(key.indices) for key in made.keys]
            for key, own in zip(made.keys, views.split(counts), strict=True):
                labels = torch.from_numpy(self._images.labels[key.indices])
                yield ViewBatch(own, labels, torch.from_numpy(key.indices))

    def decoded(self, keys: Iterable[BatchKey]) -> Iterator[tuple[Planned, Any]]:
        """Each batch with its images, B of DALI; or with None, where they are in memory."""
        batches = self._planned(keys)
        if self._decoder is None:
            return ((batch, None) for batch in batches)
        return self._decoder.run(batches)

    def _planned(self, keys: Iterable[BatchKey]) -> Iterator[Planned]:
        """Each key with its plans, which are drawn for many of them at once."""
        assert self._images.manifest is not None
        for group in _groups(keys, VIEWS_PER_DRAW // self._config.view.views):
            indices = np.concatenate([key.indices for key in group])
            sizes = self._images.manifest.sizes[indices]
            plans = draw_plans(self._config, group[0].epoch, group[0].purpose, indices, sizes)
            start = 0
            for place in range(0, len(group), self._at_once):
                some = group[place : place + self._at_once]
                stop = start + sum(len(key.indices) for key in some)
                yield Planned(some, indices[start:stop], plans.part(start, stop))
                start = stop


def _groups(keys: Iterable[BatchKey], images: int) -> Iterator[list[BatchKey]]:
    """Batches that follow one another, of an epoch, of about so many images or a single one."""
    group: list[BatchKey] = []
    for key in keys:
        if group and ((len(group) + 1) * len(key.indices) > images or key.epoch != group[0].epoch):
            yield group
            group = []
        group.append(key)
    if group:
        yield group


def _gpu_number(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index
