"""The DALI loader: the torch loader's batches, decoded and made into views by DALI.

Everything random is in the plans, which follow from (seed, epoch, image, view). So the pipelines
have no state: a loader that starts in the middle of an epoch makes the very batches that would have
come, and nothing of DALI need be saved.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from fastaug.batch import ViewBatch
from fastaug.config import TrainConfig
from fastaug.data.cores import worker_count
from fastaug.data.images import ImageSet, decode
from fastaug.data.manifest import gone_bad
from fastaug.data.plan import PAD, ViewPlans, draw_plans
from fastaug.data.schedule import BatchKey, Schedule
from fastaug.data.stream import TRAIN_VIEWS
from fastaug.errors import DataError
from fastaug.pipelines.decode import decode_pipeline
from fastaug.pipelines.views import plan_inputs, view_pipeline
from fastaug.ranges import named

READERS = 8
"""Threads that read files: they wait for the storage, not for a core."""

Item = TypeVar("Item")
Started = TypeVar("Started")
Done = TypeVar("Done")


class DaliLoader(Schedule):
    """An iterable of ViewBatch on the training device."""

    def __init__(
        self, images: ImageSet, config: TrainConfig, *, device: torch.device, **schedule: Any
    ) -> None:
        super().__init__(images, config, **schedule)
        self._device = device
        self._stages: Stages | None = None

    def __iter__(self) -> Iterator[ViewBatch]:
        if self._stages is None:  # built when first used and kept: it takes 0.2 s and more
            self._stages = Stages(self.images, self.config, self._per_batch, self._device)
        try:
            for batch in self._stages.run(self.batches()):
                self._handed_out()
                yield batch
        except Exception:
            self._stages = None  # DALI's pipelines are of no use after an error
            raise


class Stages:
    """Read, decode, make views: each stage works some batches ahead of the next one.

    The work is done by the readers' and DALI's own threads; this one feeds them and waits.
    """

    def __init__(
        self, images: ImageSet, config: TrainConfig, per_batch: int, device: torch.device
    ) -> None:
        self._images, self._config, self._device = images, config, device
        place = "gpu" if device.type == "cuda" else "cpu"
        decoded_on = "cpu" if images.array is not None else place
        common = {
            "num_threads": max(1, worker_count(config.workers)),
            "device_id": _gpu_number(device),
            "prefetch_queue_depth": config.prefetch,
        }
        # DALI's own augmentations call operators by names that DALI has deprecated, and it turns
        # filters of warnings off: record keeps them from being printed.
        with warnings.catch_warnings(record=True):
            self._decoder = decode_pipeline(config, place, batch_size=per_batch, **common)
            self._viewer = view_pipeline(
                config, place, decoded_on, batch_size=per_batch * config.views, **common
            )
        self._readers = ThreadPoolExecutor(READERS, "fastaug-reader")
        self._warm_up()

    def run(self, keys: Iterable[BatchKey]) -> Iterator[ViewBatch]:
        """The batches of the keys, in their order."""
        decoded, ahead = self.decoded(keys), self._config.prefetch
        return _ahead("views", decoded, ahead, self._start_views, self._views)

    def decoded(self, keys: Iterable[BatchKey]) -> Iterator[tuple[BatchKey, Any]]:
        """Each key with its images, B of DALI or an array: what the views are made of."""
        if self._images.array is not None:
            return ((key, self._from_memory(key)) for key in keys)
        ahead = self._config.prefetch
        contents = _ahead("read", keys, ahead, self._start_reading, self._read)
        return _ahead("decode", contents, ahead, self._start_decoding, self._decoded)

    # --- reading ---

    def _start_reading(self, key: BatchKey) -> tuple[BatchKey, list[Future]]:
        return key, [self._readers.submit(self._content, int(index)) for index in key.indices]

    def _read(self, started: tuple[BatchKey, list[Future]]) -> tuple[BatchKey, list[np.ndarray]]:
        key, contents = started
        return key, [content.result() for content in contents]

    def _content(self, index: int) -> np.ndarray:
        """[bytes] uint8: the image as it is stored, or as a PPM where DALI would differ."""
        assert self._images.manifest is not None
        try:
            content = self._images.encoded(index)
            if not self._images.manifest.plain[index]:
                content = _ppm(decode(content, self._images.where(index)))
        except DataError as error:
            raise gone_bad(self._images, index, error) from error
        return np.frombuffer(content, np.uint8)

    # --- decoding ---

    def _start_decoding(self, read: tuple[BatchKey, list[np.ndarray]]) -> BatchKey:
        key, contents = read
        self._decoder.feed_input("encoded", contents)
        self._decoder.schedule_run()
        return key

    def _decoded(self, key: BatchKey) -> tuple[BatchKey, Any]:
        try:
            (decoded,) = self._decoder.outputs()
        except RuntimeError as error:
            raise self._culprit(key, error) from error
        self._check_sizes(key, decoded.shape())
        return key, decoded

    def _culprit(self, key: BatchKey, error: RuntimeError) -> DataError:
        """The image that DALI stopped at, which it does not say. A resumed run leaves it out."""
        index = next((i for i in map(int, key.indices) if not self._is_decodable(i)), None)
        if index is None:
            return DataError(f"DALI stopped while decoding: {str(error).splitlines()[0]}")
        where = self._images.where(index)
        return gone_bad(self._images, index, DataError(f"{where}: DALI cannot decode it"))

    def _is_decodable(self, index: int) -> bool:
        """By the decoder alone: no other failure of the pipeline is an image's fault."""
        alone = decode_pipeline(
            replace(self._config, crop="resized"),
            "cpu",
            batch_size=1,
            num_threads=1,
            device_id=None,
            prefetch_queue_depth=1,
        )
        try:
            alone.feed_input("encoded", [self._content(index)])
            alone.schedule_run()
            alone.outputs()
        except (DataError, RuntimeError):
            return False
        return True

    def _check_sizes(self, key: BatchKey, shapes: list[tuple[int, ...]]) -> None:
        assert self._images.manifest is not None
        margin = 2 * PAD if self._config.crop == "pad" else 0
        expected = self._images.manifest.sizes[key.indices] + margin
        for index, shape, size in zip(key.indices, shapes, expected, strict=True):
            if shape[:2] != tuple(size):
                raise DataError(
                    f"{self._images.where(int(index))}: the file has changed, it is of another "
                    "size than when the run began; --resume looks at it again"
                )

    def _from_memory(self, key: BatchKey) -> np.ndarray:
        """[B, H, W, 3] uint8, reflected at the edges for --crop pad."""
        assert self._images.array is not None
        with named("decode"):
            return self._reflected(self._images.array[key.indices])

    def _reflected(self, images: np.ndarray) -> np.ndarray:
        if self._config.crop != "pad":
            return images
        return np.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)), mode="reflect")

    # --- views ---

    def _start_views(self, decoded: tuple[BatchKey, Any]) -> tuple[BatchKey, Any]:
        key, images = decoded
        assert self._images.manifest is not None
        sizes = self._images.manifest.sizes[key.indices]
        plans = draw_plans(self._config, key.epoch, key.purpose, key.indices, sizes)
        samples = self._feed_views(plans, images)
        self._viewer.schedule_run()
        return key, samples  # which must live until the views are made

    def _feed_views(self, plans: ViewPlans, images: Any) -> Any:
        """images: B decoded ones, of DALI or in an array -> the B*K samples that were fed."""
        views = self._config.views
        for name, values in plan_inputs(plans, self._config).items():
            self._viewer.feed_input(name, values)
        samples: Any
        if isinstance(images, np.ndarray):
            samples = np.repeat(images, views, axis=0)
        else:
            samples = [image for image in images for _ in range(views)]
        self._viewer.feed_input("images", samples)
        return samples

    def _views(self, started: tuple[BatchKey, Any]) -> ViewBatch:
        key, _ = started
        config, indices = self._config, key.indices
        stream = None
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
        (views,) = self._viewer.outputs(cuda_stream=stream)
        shape = (len(indices), config.views, config.size, config.size, 3)
        return ViewBatch(
            torch.from_dlpack(views.as_tensor()).view(shape).permute(0, 1, 4, 2, 3),
            torch.from_numpy(self._images.labels[indices]),
            torch.from_numpy(indices),
        )

    def _warm_up(self) -> None:
        """When first scheduled, a pipeline starts as many runs as its queue is deep.

        They are spent on a blank image here, so that from now on each schedule is one run.
        """
        runs, size = range(self._config.prefetch), self._config.size
        blank = np.zeros((1, size, size, 3), np.uint8)
        decoded: list[Any] = [self._reflected(blank) for _ in runs]
        if self._images.array is None:
            for _ in runs:
                self._decoder.feed_input("encoded", [np.frombuffer(_ppm(blank[0]), np.uint8)])
            self._decoder.schedule_run()
            decoded = [self._decoder.outputs()[0] for _ in runs]
        where = np.zeros(1, np.int64), np.array([[size, size]])
        plans = draw_plans(self._config, 0, TRAIN_VIEWS, *where)
        samples = [self._feed_views(plans, images) for images in decoded]
        self._viewer.schedule_run()
        for _ in samples:
            self._viewer.outputs()


def _ahead(
    name: str,
    items: Iterable[Item],
    depth: int,
    start: Callable[[Item], Started],
    finish: Callable[[Started], Done],
) -> Iterator[Done]:
    """Each item started and finished, in order, with `depth` others started behind it.

    An error of one item is raised after all items before it were handed out. The name is of the
    ranges in a profile: what this thread does to start items, and its wait for them.
    """

    def finished() -> Done:
        with named(name):
            return finish(pending.popleft())

    pending: deque[Started] = deque()
    later: DataError | None = None
    source = iter(items)
    try:
        while later is None:
            try:
                item = next(source)
                with named(name):
                    pending.append(start(item))
            except StopIteration:
                break
            except DataError as error:
                later = error
            if len(pending) > depth:
                yield finished()
        while pending:
            yield finished()
    finally:  # broken off: a pipeline must hand out what it was told to make
        while pending:
            with suppress(Exception):
                finish(pending.popleft())
    if later is not None:
        raise later


def _gpu_number(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _ppm(image: np.ndarray) -> bytes:
    """[H, W, 3] uint8 as a file that every decoder reads without loss."""
    height, width, _ = image.shape
    return b"P6 %d %d 255\n" % (width, height) + np.ascontiguousarray(image).tobytes()
