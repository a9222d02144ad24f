"""The DALI loader: the same batches as the torch loader's, decoded by DALI, views by an engine.

All randomness is in the plans, which depend only on (seed, epoch, image, view). So neither the DALI
pipelines nor the engines have state: a loader that starts in the middle of an epoch makes exactly
the batches that would have followed, and no DALI state is saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.loader import ViewLoader
from fastaug.data.prefetch import prefetch
from fastaug.data.sampler import BatchKey
from fastaug.pipelines.dali_views import OperatorViews
from fastaug.pipelines.decoder import Chunk, Decoder
from fastaug.pipelines.fused_views import FusedViews
from fastaug.runtime.cores import worker_count
from fastaug.views.batch import ViewBatch
from fastaug.views.buffer_pool import BufferPool
from fastaug.views.config import ViewConfig
from fastaug.views.engine import ViewEngine, resolve_engine
from fastaug.views.plan import draw_plans
from fastaug.views.resizing import view_of_epoch

VALUES_PER_CHUNK = 2**22
"""Pixel values of the views in a chunk of small batches, such as CIFAR's of 64 views. With fewer,
planning and calling the kernel takes Python longer than the kernel itself."""


class DaliLoader(ViewLoader):
    """An iterable of ViewBatch, decoded by DALI."""

    def __init__(
        self,
        images: ImageSet,
        data: DataConfig,
        view: ViewConfig,
        **sampling: Any,
    ) -> None:
        super().__init__(images, data, view, **sampling)
        self._engine = resolve_engine(view, self._device, report=self._train)
        self._stages: Stages | None = None

    @property
    def engine_name(self) -> str:
        return "dali" if self._engine is None else f"fused ({self._engine.name})"

    def _pass(self, keys: Iterable[BatchKey]) -> Iterator[ViewBatch]:
        if self._stages is None:  # built when first used and kept: it takes 0.2 s and more
            self._stages = Stages(
                self.images,
                self._data,
                self._view,
                self._engine,
                seed=self._seed,
                images_per_batch=self._sampler.images_per_batch,
                device=self._device,
                epochs=self._epochs,
            )
        return self._stages.run(keys)

    def _discard(self) -> None:
        self._stages = None  # DALI pipelines cannot be used after an error


class Stages:
    """Read, decode, make views: each stage works some chunks ahead of the next one.

    Threads of the readers, DALI and the engine do the work; this thread feeds them and waits.
    engine: makes the views; None: DALI's operators do. epochs: over which views grow.
    """

    def __init__(
        self,
        images: ImageSet,
        data: DataConfig,
        view: ViewConfig,
        engine: ViewEngine | None,
        *,
        seed: int,
        images_per_batch: int,
        device: torch.device,
        epochs: int = 0,
    ) -> None:
        self._images, self._seed, self._depth = images, seed, data.prefetch
        self._view_of_epoch = partial(view_of_epoch, view, epochs=epochs)
        self._is_gpu = device.type == "cuda"
        threads = max(1, worker_count(data.workers))
        pipeline: dict[str, Any] = {
            "device": "gpu" if self._is_gpu else "cpu",
            "num_threads": threads,
            "device_id": device.index if self._is_gpu else None,
            # One more than is prefetched: otherwise, starting another would wait for the oldest.
            "prefetch_queue_depth": data.prefetch + 1,
        }
        self._viewer: FusedViews | OperatorViews
        if engine is None:
            self._viewer = OperatorViews(images, view, images_per_batch, device, pipeline)
        else:
            # Those being made, one that is handed out, and two that the caller has.
            pool = BufferPool(keep=data.prefetch + 3)
            self._viewer = FusedViews(engine, images, view, threads, device, pool)
        self._images_per_batch = images_per_batch
        self._joins_batches = engine is not None and images.array is not None
        self._decoder: Decoder | None = None
        if images.array is None:
            is_padded = self._viewer.padded and view.crop == "pad"
            size = view.size if is_padded else None
            self._decoder = Decoder(
                images, data, images_per_batch, size, pipeline, self._viewer.stream
            )

    def run(self, keys: Iterable[BatchKey]) -> Iterator[ViewBatch]:
        """The batches of the keys, in order."""
        viewer, decoded = self._viewer, self.decoded(keys)
        made = prefetch("views", decoded, self._depth, viewer.start, viewer.finish)
        for batches in map(self._batches, made):
            while batches:  # none is kept here: its memory is for the next one
                yield batches.popleft()

    def _batches(self, made: tuple[Chunk, Tensor]) -> deque[ViewBatch]:
        """The batches of a chunk."""
        chunk, views = made
        parts = views.split([len(key.indices) for key in chunk.keys])
        batches: deque[ViewBatch] = deque()
        for key, own in zip(chunk.keys, parts, strict=True):
            labels = torch.from_numpy(self._images.labels[key.indices])
            if self._is_gpu:
                labels = labels.pin_memory().to(own.device, non_blocking=True)
            batches.append(ViewBatch(own, labels, torch.from_numpy(key.indices)))
        return batches

    def decoded(self, keys: Iterable[BatchKey]) -> Iterator[tuple[Chunk, Any]]:
        """Each chunk with its images, decoded by DALI; or with None, if they are in memory."""
        chunks = self._planned(keys)
        if self._decoder is None:
            return ((chunk, None) for chunk in chunks)
        return self._decoder.run(chunks)

    def _planned(self, keys: Iterable[BatchKey]) -> Iterator[Chunk]:
        assert self._images.manifest is not None
        for epoch, of_epoch in groupby(keys, attrgetter("epoch")):
            view = self._view_of_epoch(epoch)
            while own := list(islice(of_epoch, self._batches_per_chunk(view))):
                indices = np.concatenate([key.indices for key in own])
                sizes = self._images.manifest.sizes[indices]
                purpose = own[0].purpose
                plans = draw_plans(view, self._seed, epoch, purpose, indices, sizes)
                yield Chunk(own, indices, plans)

    def _batches_per_chunk(self, view: ViewConfig) -> int:
        if not self._joins_batches:
            return 1
        values = self._images_per_batch * view.views * 3 * view.size**2
        return max(1, VALUES_PER_CHUNK // values)
