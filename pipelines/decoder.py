"""Read and decode: B images at a time, some batches ahead, in threads of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from fastaug.config import TrainConfig
from fastaug.data.images import ImageSet, decode
from fastaug.data.manifest import gone_bad
from fastaug.data.plan import PAD, ViewPlans
from fastaug.data.schedule import BatchKey
from fastaug.errors import DataError
from fastaug.pipelines.ahead import ahead
from fastaug.pipelines.decode import decode_pipeline

READERS = 8
"""Threads that read files: they wait for the storage, not for a core."""


class Planned(NamedTuple):
    """A batch that is to be made; or some small ones, that are made at once."""

    keys: list[BatchKey]
    indices: np.ndarray
    """Of the images of all keys, one after another."""
    plans: ViewPlans


class Decoder:
    """The readers and DALI's decoding pipeline.

    padded: each image comes reflected at its edges, for views that DALI's operators make.
    """

    def __init__(
        self,
        images: ImageSet,
        config: TrainConfig,
        per_batch: int,
        padded: bool,
        pipeline: dict[str, Any],
    ) -> None:
        self._images, self._config = images, config
        self._margin = 2 * PAD if padded else 0
        self._gpu: int | None = pipeline["device_id"]
        self._decoder = decode_pipeline(config, padded=padded, batch_size=per_batch, **pipeline)
        self._readers = ThreadPoolExecutor(READERS, "fastaug-reader")
        self._warm_up(pipeline["prefetch_queue_depth"])

    def run(self, batches: Iterable[Planned]) -> Iterator[tuple[Planned, Any]]:
        """Each batch with its images, a TensorList of DALI."""
        depth = self._config.prefetch
        contents = ahead("read", batches, depth, self._start_reading, self._read)
        return ahead("decode", contents, depth, self._start_decoding, self._decoded)

    # --- reading ---

    def _start_reading(self, batch: Planned) -> tuple[Planned, list[Future]]:
        submit = self._readers.submit
        return batch, [submit(self._content, int(index)) for index in batch.indices]

    def _read(self, started: tuple[Planned, list[Future]]) -> tuple[Planned, list[np.ndarray]]:
        batch, contents = started
        return batch, [content.result() for content in contents]

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

    def _start_decoding(self, read: tuple[Planned, list[np.ndarray]]) -> Planned:
        batch, contents = read
        self._decoder.feed_input("encoded", contents)
        self._decoder.schedule_run()
        return batch

    def _decoded(self, batch: Planned) -> tuple[Planned, Any]:
        try:
            (decoded,) = self._decoder.outputs(cuda_stream=self._stream())
        except RuntimeError as error:
            raise self._culprit(batch.indices, error) from error
        self._check_sizes(batch.indices, decoded.shape())
        return batch, decoded

    def _stream(self) -> torch.cuda.Stream | None:
        """What waits for the images on a GPU; without one, this thread would."""
        return None if self._gpu is None else torch.cuda.current_stream(self._gpu)

    def _culprit(self, indices: np.ndarray, error: RuntimeError) -> DataError:
        """The image that DALI stopped at, which it does not say. A resumed run leaves it out."""
        index = next((i for i in map(int, indices) if not self._is_decodable(i)), None)
        if index is None:
            return DataError(f"DALI stopped while decoding: {str(error).splitlines()[0]}")
        where = self._images.where(index)
        return gone_bad(self._images, index, DataError(f"{where}: DALI cannot decode it"))

    def _is_decodable(self, index: int) -> bool:
        """By the decoder alone: no other failure of the pipeline is an image's fault."""
        alone = decode_pipeline(
            self._config,
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

    def _check_sizes(self, indices: np.ndarray, shapes: list[tuple[int, ...]]) -> None:
        assert self._images.manifest is not None
        expected = self._images.manifest.sizes[indices] + self._margin
        changed = (np.array([shape[:2] for shape in shapes]) != expected).any(axis=1)
        if changed.any():
            raise DataError(
                f"{self._images.where(int(indices[changed.argmax()]))}: the file has changed, it "
                "is of another size than when the run began; --resume looks at it again"
            )

    def _warm_up(self, depth: int) -> None:
        """When first scheduled, a pipeline starts as many runs as its queue is deep.

        They are spent on a blank image here, so that from now on each schedule is one run.
        """
        size = self._config.size
        blank = np.frombuffer(_ppm(np.zeros((size, size, 3), np.uint8)), np.uint8)
        for _ in range(depth):
            self._decoder.feed_input("encoded", [blank])
        self._decoder.schedule_run()
        for _ in range(depth):
            self._decoder.outputs()


def _ppm(image: np.ndarray) -> bytes:
    """[H, W, 3] uint8 as a file that every decoder reads without loss."""
    height, width, _ = image.shape
    return b"P6 %d %d 255\n" % (width, height) + np.ascontiguousarray(image).tobytes()
