"""The torch loader: every image is decoded once and seen through K views, in worker processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from fastaug.batch import VIEW_DTYPES, ViewBatch
from fastaug.config import TrainConfig
from fastaug.data.cores import worker_count
from fastaug.data.images import ImageSet
from fastaug.data.manifest import gone_bad
from fastaug.data.plan import draw_plans
from fastaug.data.schedule import BatchKey, Schedule
from fastaug.data.views import reference_views
from fastaug.errors import DataError
from fastaug.ranges import named, workers_file, write_to


class TorchLoader(Schedule):
    """An iterable of ViewBatch in the memory of the host."""

    def __iter__(self) -> Iterator[ViewBatch]:
        # New workers for every epoch: forking takes 20 ms, and none stay when a pass is broken off.
        batches: DataLoader = DataLoader(
            _ViewMaker(self.images, self.config),
            sampler=list(self.batches()),
            batch_size=None,
            num_workers=worker_count(self.config.workers),
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=partial(_start_worker, workers_file()),
            # Its own: a pass must not draw from torch's numbers, which dropout goes on with.
            generator=torch.Generator(),
        )
        for batch in batches:
            if isinstance(batch, _BadImage):
                raise gone_bad(self.images, batch.image, batch.error)
            if isinstance(batch, DataError):
                raise batch
            self._handed_out()
            yield batch


class _BadImage(NamedTuple):
    image: int
    error: DataError


class _ViewMaker(Dataset):
    """Runs in the workers; all that a batch needs comes with its key."""

    def __init__(self, images: ImageSet, config: TrainConfig) -> None:
        self._images = images
        self._config = config

    def __getitem__(self, key: BatchKey) -> ViewBatch | DataError | _BadImage:
        """Errors are returned, not raised: the DataLoader would bury them in a traceback."""
        with named("decode"):
            images = self._decoded(key)
        if isinstance(images, _BadImage):
            return images
        with named("views"):
            return self._views(key, images)

    def _decoded(self, key: BatchKey) -> list[np.ndarray] | _BadImage:
        images = []
        for index in map(int, key.indices):
            try:
                images.append(self._images.image(index))
            except DataError as error:  # noqa: PERF203
                return _BadImage(index, error)
        return images

    def _views(self, key: BatchKey, images: list[np.ndarray]) -> ViewBatch | DataError:
        config = self._config
        shape = (len(key.indices), config.views, config.size, config.size, 3)
        views = torch.empty(shape, dtype=VIEW_DTYPES[config.views_dtype])
        sizes = np.array([image.shape[:2] for image in images])
        try:
            plans = draw_plans(config, key.epoch, key.purpose, key.indices, sizes)
        except DataError as error:
            return error
        for place, image in enumerate(images):
            views[place].copy_(reference_views(image, plans.of_image(place), config))
        return ViewBatch(
            views.permute(0, 1, 4, 2, 3),
            torch.from_numpy(self._images.labels[key.indices]),
            torch.from_numpy(key.indices),
        )


def _start_worker(ranges_file: str | None, _worker: int) -> None:
    write_to(ranges_file)
    _leave_signals_to_trainer()


def _leave_signals_to_trainer() -> None:
    """Ctrl-C, and a cluster's SIGTERM, reach the whole process group; it is the trainer who saves.

    Ctrl-C is ignored: the trainer ends its workers. SIGTERM is how multiprocessing ends them in
    the last resort, so it must end them, but as a success: torch calls a killed worker an error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
