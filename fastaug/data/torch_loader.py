"""The torch loader: worker processes decode every image once and make its K views."""

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
from fastaug.data.prefetch import prefetch
from fastaug.data.retry import (
    BadImage,
    BadImagesError,
    RetryError,
    check_size,
    read_with_retries,
    try_read,
)
from fastaug.data.sampler import BatchKey
from fastaug.errors import DataError, first_line
from fastaug.runtime.cores import worker_count
from fastaug.runtime.trace import start_worker_tracing, trace_range, worker_trace_file
from fastaug.views.batch import ViewBatch, view_dtype
from fastaug.views.config import ViewConfig
from fastaug.views.plan import draw_plans
from fastaug.views.reference import reference_views

log = logging.getLogger("fastaug")


class TorchLoader(ViewLoader):
    """An iterable of ViewBatch, made by worker processes."""

    def _pass(self, keys: list[BatchKey]) -> Iterator[ViewBatch]:
        batches = self._in_host_memory(keys)
        if self._device.type != "cuda":
            return batches
        uploads = _Uploads(self._device)
        return prefetch("upload", batches, 1, uploads.start, uploads.finish)

    def _in_host_memory(self, keys: list[BatchKey]) -> Iterator[ViewBatch]:
        # New workers in every epoch: forking takes 20 ms, and none are left when a pass is aborted.
        batches: DataLoader = DataLoader(
            _ViewDataset(self.images, self._view, self._seed),
            sampler=keys,
            batch_size=None,
            num_workers=worker_count(self._data.workers),
            pin_memory=self._device.type == "cuda",
            worker_init_fn=partial(_start_worker, worker_trace_file()),
            # Not torch's global generator, whose state dropout depends on.
            generator=torch.Generator(),
        )
        for result in _worker_results(batches):
            for message in result.warnings:
                log.warning("%s", message)
            if isinstance(result.batch, DataError):
                raise result.batch
            if result.batch is None:
                raise BadImagesError(result.bad, result.batch_size)
            yield result.batch


class _Uploads:
    """Copies the next batch to a GPU on a stream of its own, while the GPU works on this one."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def start(self, batch: ViewBatch) -> tuple[ViewBatch, torch.cuda.Event]:
        """batch: in pinned memory, which torch keeps until it is copied."""
        with torch.cuda.stream(self._stream):
            return batch.to(self._device), self._stream.record_event()

    def finish(self, started: tuple[ViewBatch, torch.cuda.Event]) -> ViewBatch:
        batch, copied = started
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        for tensor in (batch.views, batch.labels):
            tensor.record_stream(current)  # its memory belongs to the other stream
        return batch


class _WorkerResult(NamedTuple):
    """What a worker returns. A worker raises no errors, which torch would bury in a traceback, and
    logs nothing: in a fork, a lock of the trainer's console may stay locked forever."""

    batch: ViewBatch | DataError | None
    """None if images are bad."""
    warnings: list[str]
    bad: Mapping[int, BadImage]
    batch_size: int


class _ViewDataset(Dataset):
    """Makes one batch from its key, in a worker process."""

    def __init__(self, images: ImageSet, config: ViewConfig, seed: int) -> None:
        self._images, self._config, self._seed = images, config, seed

    def __getitem__(self, key: BatchKey) -> _WorkerResult:
        warnings: list[str] = []
        warn = log.warning if get_worker_info() is None else warnings.append
        indices = list(map(int, key.indices))
        try:
            with trace_range("decode"):
                first = {index: try_read(self._image, index) for index in indices}
                images = read_with_retries(self._images, first, self._image, warn)
        except BadImagesError as found:
            return _WorkerResult(None, warnings, found.bad, found.batch_size)
        with trace_range("views"):
            batch = self._views(key, [images[index] for index in indices])
        return _WorkerResult(batch, warnings, {}, len(images))

    def _image(self, index: int) -> np.ndarray:
        image = self._images.image(index)
        check_size(self._images, index, image.shape[:2])
        return image

    def _views(self, key: BatchKey, images: list[np.ndarray]) -> ViewBatch | DataError:
        config = self._config
        shape = (len(key.indices), config.views, config.size, config.size, 3)
        views = torch.empty(shape, dtype=view_dtype(config.views_dtype))
        sizes = np.array([image.shape[:2] for image in images])
        try:
            plans = draw_plans(config, self._seed, key.epoch, key.purpose, key.indices, sizes)
        except DataError as error:
            return error
        for i, image in enumerate(images):
            views[i].copy_(reference_views(image, plans.of_image(i), config))
        return ViewBatch(
            views.permute(0, 1, 4, 2, 3),
            torch.from_numpy(self._images.labels[key.indices]),
            torch.from_numpy(key.indices),
        )


def _worker_results(batches: DataLoader) -> Iterator[_WorkerResult]:
    """The results of the workers; raises RetryError if one was killed."""
    try:
        # Objects with threads, such as DALI's pipelines, must not be collected in a fork, which has
        # no such threads.
        gc.freeze()
        try:
            with _without_sigchld_handler():
                results = iter(batches)
        finally:
            gc.unfreeze()
        yield from results
    except (RuntimeError, OSError, EOFError) as error:
        # An error of this process, or one that a living worker has reported.
        if batches.num_workers == 0 or str(error).startswith("Caught "):
            raise
        raise RetryError(
            f"a worker process of the loader has died ({first_line(error)}), perhaps out of "
            "memory (fewer --workers need less)",
            max_retries=1,
        ) from error


@contextmanager
def _without_sigchld_handler() -> Iterator[None]:
    """Undo torch's SIGCHLD handler, which raises wherever the main thread is, even in a step.

    Without the handler, a dead worker is detected while waiting for a batch, within 5 s.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _start_worker(trace_file: str | None, _worker: int) -> None:
    start_worker_tracing(trace_file)
    if hasattr(faulthandler, "register"):  # the watchdog asks for the stack
        # Only this thread: the frames of others change while they are read.
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    _leave_signals_to_trainer()


def _leave_signals_to_trainer() -> None:
    """Ctrl-C and a cluster's SIGTERM reach the whole process group, but only the trainer saves.

    Ctrl-C is ignored: the trainer ends its workers. SIGTERM, the last resort of multiprocessing,
    ends the worker with exit code 0, as torch treats a killed worker as an error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
