"""The torch loader: worker processes decode every image once and make its K views."""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from math import prod
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from fastaug.data.image_set import ImageSet
from fastaug.data.loader import ViewLoader
from fastaug.data.prefetch import prefetch
from fastaug.data.remote.spans import PARALLEL_READS, is_remote
from fastaug.data.retry import (
    BadImage,
    BadImagesError,
    ReadFailure,
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
from fastaug.views.buffer_pool import CAN_SEND_BUFFERS, MAX_SENT, BufferPool, SharedBuffers
from fastaug.views.config import ViewConfig
from fastaug.views.plan import draw_plans
from fastaug.views.reference import reference_views

log = logging.getLogger("fastaug")


class TorchLoader(ViewLoader):
    """An iterable of ViewBatch, made by worker processes."""

    _is_warned = False
    """Whether it was logged that no workers can be started."""

    def _pass(self, keys: Iterable[BatchKey]) -> Iterator[ViewBatch]:
        dataset = _ViewDataset(self.images, self._view_of_epoch, self._seed, self._memory)
        workers, method = worker_count(self._data.workers), _start_method(self.images)
        if workers and (reason := _why_no_workers(workers, method)):
            if not self._is_warned:
                log.warning("%s", reason)
            self._is_warned, workers = True, 0
        batches = _in_host_memory(dataset, keys, workers, method)
        return batches if self._device.type != "cuda" else _uploaded(batches, self._device)

    @cached_property  # not before the first pass: this fixes how processes are started
    def _memory(self) -> _BatchMemory:
        workers, method = worker_count(self._data.workers), _start_method(self.images)
        return _BatchMemory(self._view, self._sampler.images_per_batch, workers, method)


def _start_method(images: ImageSet) -> str:
    """How workers are started. What reads from a network cannot be used in a fork."""
    return "forkserver" if is_remote(images.storage) else multiprocessing.get_start_method()


def _why_no_workers(workers: int, start_method: str) -> str:
    """Why worker processes cannot be started, "" if they can. Their queues need semaphores, which
    Linux keeps in /dev/shm: 4 KB each."""
    context = multiprocessing.get_context(start_method)
    try:
        for_queues = [context.Lock() for _ in range(3 * workers + 8)]  # as many as torch makes
    except OSError as error:
        return (
            f"--workers {workers}: worker processes cannot be started, because /dev/shm is full or "
            f"missing ({error.strerror}); the images are decoded in the training process, which is "
            "slower. Free space in /dev/shm (in Docker: docker run --shm-size=1g)"
        )
    del for_queues
    return ""


class _BatchMemory:
    """Where views are made: in memory that is used again."""

    def __init__(
        self, config: ViewConfig, images_per_batch: int, workers: int, start_method: str
    ) -> None:
        self._views, self._dtype = config.views, view_dtype(config.views_dtype)
        self.shared: SharedBuffers | None = None
        """Buffers that workers fill."""
        is_forked = start_method == "fork"
        if workers and (is_forked or CAN_SEND_BUFFERS):
            # Growing views end with this size; memory that none has touched yet takes none.
            size = prod(self._shape(images_per_batch, config.size)) * self._dtype.itemsize
            # Those of the workers, one that is handed out, and two that the caller has.
            count = _PREFETCH * workers + 3
            count = count if is_forked else min(count, MAX_SENT)
            self.shared = SharedBuffers(count, size, forked=is_forked)
        self._own = BufferPool(keep=0 if workers else 3)

    def _shape(self, images: int, size: int) -> tuple[int, ...]:
        return images, self._views, size, size, 3

    def empty(self, images: int, size: int, number: int | None) -> Tensor:
        """[images, K, size, size, 3], for the process that makes the views. number: of a shared
        buffer."""
        shape = self._shape(images, size)
        if number is None:
            return self._own.empty(shape, self._dtype)
        assert self.shared is not None
        return self.shared.to_fill(number, shape, self._dtype)

    def filled(self, images: int, size: int, number: int) -> Tensor:
        """The same in the process that uses them."""
        assert self.shared is not None
        return self.shared.filled(number, self._shape(images, size), self._dtype)

    def received(self, images: int, size: int, content: bytearray) -> Tensor:
        """The same from bytes that a worker sent."""
        values = torch.frombuffer(content, dtype=self._dtype)
        return values.view(self._shape(images, size))


_PREFETCH = 2
"""Batches per worker that are prefetched."""


class _Task(NamedTuple):
    """What a worker is asked for."""

    key: BatchKey
    buffer: int | None
    """The shared buffer for the views; None: new memory, because the caller holds all of them, or
    because buffers cannot be shared."""


def _in_host_memory(
    dataset: _ViewDataset, keys: Iterable[BatchKey], workers: int, start_method: str
) -> Iterator[ViewBatch]:
    """The batches of the keys. The workers live as long as the iterator: none are left when a pass
    is aborted."""
    shared = dataset.memory.shared
    started: deque[_Task] = deque()

    def tasks() -> Iterator[_Task]:
        for key in keys:
            started.append(_Task(key, shared.take() if shared else None))
            yield started[-1]

    context = multiprocessing.get_context(start_method) if workers else None
    if context is not None and start_method == "forkserver":
        context.set_forkserver_preload([__name__])  # imports torch once, not in every worker
    batches: DataLoader = DataLoader(
        dataset,
        sampler=tasks(),
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=workers,
        prefetch_factor=_PREFETCH if workers else None,
        multiprocessing_context=context,
        worker_init_fn=partial(_start_worker, worker_trace_file()),
        # Not torch's global generator, whose state dropout depends on.
        generator=torch.Generator(),
    )
    try:
        for result in _worker_results(batches):
            for message in result.warnings:
                log.warning("%s", message)
            if isinstance(result.views, DataError):
                raise result.views
            if result.bad:
                raise BadImagesError(result.bad, result.batch_size)
            yield dataset.batch(started.popleft(), result.views)
            del result
    finally:
        for task in started:
            if shared is not None and task.buffer is not None:
                shared.replace(task.buffer)


def _uploaded(batches: Iterator[ViewBatch], device: torch.device) -> Iterator[ViewBatch]:
    """The batches on a GPU: a thread copies the next one to pinned memory, which torch reuses, and
    the GPU copies it from there, while it works on this one."""
    uploads = _Uploads(device)
    with ThreadPoolExecutor(1, "fastaug-pin", torch.cuda.set_device, (device,)) as thread:
        start = partial(_start_pinning, thread)
        pinned = prefetch("pin", batches, 1, start, Future.result)
        yield from prefetch("upload", pinned, 1, uploads.start, uploads.finish)


def _start_pinning(thread: ThreadPoolExecutor, batch: ViewBatch) -> Future[ViewBatch]:
    return thread.submit(batch.pin_memory)


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

    views: Tensor | bytearray | DataError | None
    """None if they are in a shared buffer, or if images are bad."""
    warnings: list[str]
    bad: Mapping[int, BadImage]
    batch_size: int


class _ViewDataset(Dataset):
    """Makes the views of one batch, in a worker process."""

    def __init__(
        self,
        images: ImageSet,
        view_of_epoch: Callable[[int], ViewConfig],
        seed: int,
        memory: _BatchMemory,
    ) -> None:
        self._images, self._view_of_epoch, self._seed = images, view_of_epoch, seed
        self.memory = memory

    def __getitem__(self, task: _Task) -> _WorkerResult:
        warnings: list[str] = []
        warn = log.warning if get_worker_info() is None else warnings.append
        indices = list(map(int, task.key.indices))
        try:
            with trace_range("decode"):
                first = dict(zip(indices, self._map(self._try_image, indices), strict=True))
                images = read_with_retries(self._images, first, self._image, warn)
        except BadImagesError as found:
            return _WorkerResult(None, warnings, found.bad, found.batch_size)
        with trace_range("views"):
            views = self._views(task, [images[index] for index in indices])
        return _WorkerResult(views, warnings, {}, len(images))

    def batch(self, task: _Task, views: Tensor | bytearray | None) -> ViewBatch:
        """The batch of a task, in the process that uses it. views: None if they are in the task's
        buffer."""
        indices, size = task.key.indices, self._view_of_epoch(task.key.epoch).size
        if task.buffer is not None:
            views = self.memory.filled(len(indices), size, task.buffer)
        elif isinstance(views, bytearray):
            views = self.memory.received(len(indices), size, views)
        assert isinstance(views, Tensor)
        return ViewBatch(
            views.permute(0, 1, 4, 2, 3),
            torch.from_numpy(self._images.labels[indices]),
            torch.from_numpy(indices),
        )

    @cached_property
    def _map(self) -> Callable[..., Iterable]:
        """map(), with many reads in flight if they wait for a network."""
        if not is_remote(self._images.storage):
            return map
        return ThreadPoolExecutor(PARALLEL_READS, "fastaug-reader").map

    def _try_image(self, index: int) -> np.ndarray | ReadFailure:
        return try_read(self._image, index)

    def _image(self, index: int) -> np.ndarray:
        image = self._images.image(index)
        check_size(self._images, index, image.shape[:2])
        return image

    def _views(
        self, task: _Task, images: list[np.ndarray]
    ) -> Tensor | bytearray | DataError | None:
        key = task.key
        config = self._view_of_epoch(key.epoch)
        sizes = np.array([image.shape[:2] for image in images])
        try:
            plans = draw_plans(config, self._seed, key.epoch, key.purpose, key.indices, sizes)
        except DataError as error:
            return error
        views = self.memory.empty(len(images), config.size, task.buffer)
        for i, image in enumerate(images):
            views[i].copy_(reference_views(image, plans.of_image(i), config))
        if task.buffer is not None:
            return None
        if get_worker_info() is None or not CAN_SEND_BUFFERS:
            return views
        # Not as a tensor, which torch would pass through /dev/shm: if that is full, the batch is
        # lost and the trainer waits forever.
        return bytearray(views.view(torch.uint8).numpy())


def _unchanged(result: Any) -> Any:
    """In place of torch's conversion to tensors."""
    return result


def _worker_results(batches: DataLoader) -> Iterator[_WorkerResult]:
    """The results of the workers; raises RetryError if one was killed."""
    workers: list[BaseProcess] = []
    try:
        # Objects with threads, such as DALI's pipelines, must not be collected in a fork, which has
        # no such threads.
        gc.freeze()
        before = multiprocessing.active_children()
        try:
            with _without_sigchld_handler():
                results = iter(batches)
        finally:
            gc.unfreeze()
        workers = [child for child in multiprocessing.active_children() if child not in before]
        yield from results
    except (RuntimeError, OSError, EOFError) as error:
        # An error of this process, or one that a living worker has reported.
        if batches.num_workers == 0 or str(error).startswith("Caught "):
            raise
        raise RetryError(_why_worker_died(workers, error), max_retries=1) from error


def _why_worker_died(workers: list[BaseProcess], error: Exception) -> str:
    if hasattr(signal, "SIGBUS") and any(w.exitcode == -signal.SIGBUS for w in workers):
        return (
            "a worker process of the loader was killed by SIGBUS, because the shared memory "
            "(/dev/shm) is full (in Docker: docker run --shm-size=1g; or --workers 0)"
        )
    return (
        f"a worker process of the loader has died ({first_line(error)}), perhaps out of "
        "memory (fewer --workers need less)"
    )


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
