"""The torch loader: every image is decoded once and seen through K views, in worker processes."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from fastaug.data.image_set import ImageSet
from fastaug.data.loader import ViewLoader
from fastaug.data.retry import (
    BadImagesError,
    Fault,
    RetryError,
    attempt,
    check_size,
    read_with_retries,
)
from fastaug.data.sampler import BatchKey
from fastaug.errors import DataError, first_line
from fastaug.runtime.cores import worker_count
from fastaug.runtime.trace import named, workers_file, write_to
from fastaug.views.batch import VIEW_DTYPES, ViewBatch
from fastaug.views.config import ViewConfig
from fastaug.views.plan import draw_plans
from fastaug.views.reference import reference_views

log = logging.getLogger("fastaug")


class TorchLoader(ViewLoader):
    """An iterable of ViewBatch in the memory of the host."""

    def _pass(self, keys: list[BatchKey]) -> Iterator[ViewBatch]:
        # New workers for every epoch: forking takes 20 ms, and none stay when a pass is broken off.
        batches: DataLoader = DataLoader(
            _ViewMaker(self.images, self._view, self._seed),
            sampler=keys,
            batch_size=None,
            num_workers=worker_count(self._data.workers),
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=partial(_start_worker, workers_file()),
            # Its own: a pass must not draw from torch's numbers, which dropout goes on with.
            generator=torch.Generator(),
        )
        for made in _while_workers_live(batches):
            for line in made.said:
                log.warning("%s", line)
            if isinstance(made.batch, DataError):
                raise made.batch
            if made.batch is None:
                raise BadImagesError(made.faults, made.images)
            yield made.batch


class _Made(NamedTuple):
    """What comes out of a worker. Errors are not raised there: torch would bury them in a
    traceback; and nothing is logged: the trainer's console may be locked for ever in a fork."""

    batch: ViewBatch | DataError | None
    said: list[str]
    faults: Mapping[int, Fault]
    """Without a batch: why."""
    images: int
    """That were read."""


class _ViewMaker(Dataset):
    """Runs in the workers; all that a batch needs comes with its key."""

    def __init__(self, images: ImageSet, config: ViewConfig, seed: int) -> None:
        self._images, self._config, self._seed = images, config, seed

    def __getitem__(self, key: BatchKey) -> _Made:
        said: list[str] = []
        say = log.warning if get_worker_info() is None else said.append
        indices = list(map(int, key.indices))
        try:
            with named("decode"):
                first = {index: attempt(self._image, index) for index in indices}
                images = read_with_retries(self._images, first, self._image, say)
        except BadImagesError as found:
            return _Made(None, said, found.faults, found.images)
        with named("views"):
            batch = self._views(key, [images[index] for index in indices])
        return _Made(batch, said, {}, len(images))

    def _image(self, index: int) -> np.ndarray:
        image = self._images.image(index)
        check_size(self._images, index, image.shape[:2])
        return image

    def _views(self, key: BatchKey, images: list[np.ndarray]) -> ViewBatch | DataError:
        config = self._config
        shape = (len(key.indices), config.views, config.size, config.size, 3)
        views = torch.empty(shape, dtype=VIEW_DTYPES[config.views_dtype])
        sizes = np.array([image.shape[:2] for image in images])
        try:
            plans = draw_plans(config, self._seed, key.epoch, key.purpose, key.indices, sizes)
        except DataError as error:
            return error
        for place, image in enumerate(images):
            views[place].copy_(reference_views(image, plans.of_image(place), config))
        return ViewBatch(
            views.permute(0, 1, 4, 2, 3),
            torch.from_numpy(self._images.labels[key.indices]),
            torch.from_numpy(key.indices),
        )


def _while_workers_live(batches: DataLoader) -> Iterator[_Made]:
    """What the workers make; a worker that was killed is a reason to start again, once."""
    try:
        # What has threads, as DALI's pipelines, must not be collected in a fork, which has none.
        gc.freeze()
        try:
            with _without_torch_s_alarm():
                made = iter(batches)
        finally:
            gc.unfreeze()
        yield from made
    except (RuntimeError, OSError, EOFError) as error:
        # Of this process itself, or of a worker that is alive and has sent it.
        if batches.num_workers == 0 or str(error).startswith("Caught "):
            raise
        raise RetryError(
            f"a worker process of the loader has died ({first_line(error)}), as when "
            "memory runs out (fewer --workers take less)",
            times=1,
        ) from error


@contextmanager
def _without_torch_s_alarm() -> Iterator[None]:
    """torch would raise an error wherever the training is when a worker dies, in a step as well.

    Without its handler the death is found when a batch is waited for, within 5 s.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _start_worker(ranges_file: str | None, _worker: int) -> None:
    write_to(ranges_file)
    if hasattr(faulthandler, "register"):  # for a watchdog that asks where a worker is
        # Of the thread that is asked alone: the frames of others move while they are read.
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    _leave_signals_to_trainer()


def _leave_signals_to_trainer() -> None:
    """Ctrl-C, and a cluster's SIGTERM, reach the whole process group; it is the trainer who saves.

    Ctrl-C is ignored: the trainer ends its workers. SIGTERM is how multiprocessing ends them in
    the last resort, so it must end them, but as a success: torch calls a killed worker an error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
