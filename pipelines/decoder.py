"""Reading and decoding: batches of B images, prefetched by their own threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.data_node import DataNode

from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet, decode
from fastaug.data.pixels import to_ppm
from fastaug.data.prefetch import prefetch
from fastaug.data.remote.spans import PARALLEL_READS, is_remote
from fastaug.data.retry import RetryError, check_size, read_with_retries, try_read
from fastaug.data.sampler import BatchKey
from fastaug.errors import DecodeError, first_line
from fastaug.views.plan import PAD, ViewPlans

READERS = 8
"""Threads that read local files; they wait for the storage, not for a core."""
REBUILDS = 3
"""How often in a row DALI may fail at a batch whose images it decodes one by one."""


class Chunk(NamedTuple):
    """Batches that one call makes: one batch, or several small ones of images in memory."""

    keys: list[BatchKey]
    indices: np.ndarray
    """The images of all keys, concatenated."""
    plans: ViewPlans


class Decoder:
    """Threads that read, and DALI's decoding pipeline.

    padded_size: side of the images, which get reflected borders (--crop pad with DALI's operators);
    None: no borders. stream: of the GPU that decodes, which reads the images and waits for them.
    """

    def __init__(
        self,
        images: ImageSet,
        config: DataConfig,
        per_batch: int,
        padded_size: int | None,
        pipeline: dict[str, Any],
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._images, self._depth, self._stream = images, config.prefetch, stream
        self._margin = 0 if padded_size is None else 2 * PAD
        self._blank_side = padded_size or 8
        self._decoder = decode_pipeline(
            decode_memory=config.decode_memory,
            padded_size=padded_size,
            batch_size=per_batch,
            **pipeline,
        )
        readers = PARALLEL_READS if is_remote(images.storage) else READERS
        self._readers = ThreadPoolExecutor(readers, "fastaug-reader")
        self._warm_up(pipeline["prefetch_queue_depth"])

    def run(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Any]]:
        """Each chunk with its images, a DALI TensorList."""
        depth = self._depth
        read = prefetch(
            "read", chunks, depth, self._start_reading, self._read, self._cancel_reading
        )
        return prefetch("decode", read, depth, self._start_decoding, self._decoded, self._discard)

    # --- reading ---

    def _start_reading(self, chunk: Chunk) -> tuple[Chunk, dict[int, Future]]:
        submit, indices = self._readers.submit, map(int, chunk.indices)
        return chunk, {index: submit(try_read, self._content, index) for index in indices}

    def _read(self, started: tuple[Chunk, dict[int, Future]]) -> tuple[Chunk, list[np.ndarray]]:
        chunk, contents = started
        first = {index: content.result() for index, content in contents.items()}
        found = read_with_retries(self._images, first, self._content)
        return chunk, [found[index] for index in map(int, chunk.indices)]

    def _cancel_reading(self, started: tuple[Chunk, dict[int, Future]]) -> None:
        for content in started[1].values():
            content.cancel()

    def _content(self, index: int) -> np.ndarray:
        """[bytes] uint8: the stored image, or a PPM if DALI would decode it differently."""
        assert self._images.manifest is not None
        content = self._images.encoded(index)
        if not self._images.manifest.plain[index]:
            content = to_ppm(decode(content, self._images.where(index)))
        return np.frombuffer(content, np.uint8)

    # --- decoding ---

    def _start_decoding(self, read: tuple[Chunk, list[np.ndarray]]) -> Chunk:
        chunk, contents = read
        try:
            self._decoder.feed_input("encoded", contents)
            self._decoder.schedule_run()
        except RuntimeError as error:  # caused by an earlier batch, which finds the bad image
            raise _retry_error(error) from error
        return chunk

    def _decoded(self, chunk: Chunk) -> tuple[Chunk, Any]:
        try:
            (decoded,) = self._decoder.outputs(cuda_stream=self._stream)
        except RuntimeError as error:
            self._raise_bad_images(chunk.indices)
            raise _retry_error(error) from error
        self._check_sizes(chunk.indices, decoded.shape())
        return chunk, decoded

    def _discard(self, _chunk: Chunk) -> None:
        """Take the output of a scheduled run, or the pipeline would return it later."""
        self._decoder.outputs(cuda_stream=self._stream)

    def _raise_bad_images(self, indices: np.ndarray) -> None:
        """Raise BadImagesError if there are images that DALI cannot decode: it does not name them.

        They are read again, since an image may have been truncated only for a moment.
        """
        first = {index: try_read(self._decode_one, index) for index in map(int, indices)}
        read_with_retries(self._images, first, self._decode_one)

    def _decode_one(self, index: int) -> None:
        """Decode one image in a pipeline with only a decoder, which fails only for bad images."""
        pipeline = decode_pipeline(
            "cpu",
            batch_size=1,
            num_threads=1,
            device_id=None,
            prefetch_queue_depth=1,
        )
        content = self._content(index)
        try:
            pipeline.feed_input("encoded", [content])
            pipeline.schedule_run()
            (decoded,) = pipeline.outputs()
        except RuntimeError as error:
            message = f"{self._images.where(index)}: DALI cannot decode it"
            raise DecodeError(message, content.data) from error
        check_size(self._images, index, decoded.shape()[0][:2])

    def _check_sizes(self, indices: np.ndarray, shapes: list[tuple[int, ...]]) -> None:
        assert self._images.manifest is not None
        expected = self._images.manifest.sizes[indices] + self._margin
        changed = (np.array([shape[:2] for shape in shapes]) != expected).any(axis=1)
        if changed.any():
            self._raise_bad_images(indices)
            raise RetryError("an image temporarily had another size", max_retries=REBUILDS)

    def _warm_up(self, depth: int) -> None:
        """The first schedule_run() starts as many runs as the queue is deep, later calls one each.

        Spend the first call on blank images.
        """
        size = self._blank_side
        blank = np.frombuffer(to_ppm(np.zeros((size, size, 3), np.uint8)), np.uint8)
        for _ in range(depth):
            self._decoder.feed_input("encoded", [blank])
        self._decoder.schedule_run()
        for _ in range(depth):
            self._decoder.outputs()


def _retry_error(error: RuntimeError) -> RetryError:
    return RetryError(f"DALI stopped while decoding: {first_line(error)}", max_retries=REBUILDS)


@pipeline_def
def decode_pipeline(
    device: str, decode_memory: int = 0, padded_size: int | None = None
) -> DataNode:
    """Input "encoded": [bytes] uint8 -> [H, W, 3] uint8.

    decode_memory: MiB that the decoder reserves. padded_size: side of the images, which get
    reflected borders; None: no borders.
    """
    encoded = fn.external_source(name="encoded", device="cpu", dtype=types.UINT8, ndim=1)
    memory: dict[str, Any] = {}
    if decode_memory:
        padding = decode_memory * 2**20
        memory["host_memory_padding"] = padding
        if device == "gpu":
            memory["device_memory_padding"] = padding
    images = fn.decoders.image(
        encoded,
        device="mixed" if device == "gpu" else "cpu",
        output_type=types.RGB,
        # As in Pillow, torchvision and TensorFlow. On a GPU, DALI's default upsamples the colors of
        # a JPEG in a simpler way than on a CPU.
        jpeg_fancy_upsampling=True,
        adjust_orientation=False,
        **memory,
    )
    return images if padded_size is None else reflect(images, padded_size)


def reflect(images: DataNode, size: int) -> DataNode:
    """[size, size, 3] -> the same with PAD more pixels on each side, mirrored without the edge.

    DALI's own padding has a constant color.
    """
    for axis in (0, 1):
        sides = [
            fn.slice(images, start=[start], shape=[PAD], axes=[axis])
            for start in (1, size - 1 - PAD)
        ]
        first, last = (fn.flip(side, vertical=1 - axis, horizontal=axis) for side in sides)
        images = fn.cat(first, images, last, axis=axis)
    return images
