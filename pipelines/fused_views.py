"""Views made by the fused kernel (--views-engine fused)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastaug.data.device_array import DeviceArray, array_on
from fastaug.data.image_set import ImageSet
from fastaug.pipelines.decoder import Chunk
from fastaug.views.buffer_pool import BufferPool
from fastaug.views.config import ViewConfig
from fastaug.views.engine import StartedViews, ViewEngine
from fastaug.views.packed_plan import Pictures
from fastaug.views.render_spec import RenderSpec


class FusedViews:
    """Starts the views of one batch while the trainer works on another."""

    padded = False
    """Whether images need reflected borders; the kernel reflects them itself."""

    def __init__(
        self,
        engine: ViewEngine,
        images: ImageSet,
        config: ViewConfig,
        threads: int,
        device: torch.device,
        pool: BufferPool,
    ) -> None:
        self._engine, self._spec, self._threads = engine, RenderSpec.of(config), threads
        self._pool = pool
        self._array: DeviceArray | None = None
        if images.array is not None:
            self._array = array_on(device, images.array)
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.current_stream(device))

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The GPU stream on which decoded images must be complete."""
        return self._engine.stream

    def start(self, work: tuple[Chunk, Any]) -> tuple[Chunk, StartedViews]:
        """work: a chunk, and its decoded images (a DALI TensorList) or None for those in memory."""
        chunk, images = work
        pictures = self._in_memory(chunk.indices) if images is None else _decoded(images)
        kept = self._array if images is None else images
        started = self._engine.start(
            pictures,
            chunk.plans,
            self._spec,
            threads=self._threads,
            kept=kept,
            wait=False,
            pool=self._pool,
        )
        return chunk, started

    def finish(self, started: tuple[Chunk, StartedViews]) -> tuple[Chunk, Tensor]:
        chunk, views = started
        return chunk, views.finish()

    def _in_memory(self, indices: np.ndarray) -> Pictures:
        assert self._array is not None
        images = self._array.tensor
        _, height, width, _ = images.shape
        bytes_of_image = np.uint64(height * width * 3)
        return Pictures(
            np.uint64(images.data_ptr()) + indices.astype(np.uint64) * bytes_of_image,
            np.broadcast_to(np.int64(3 * width), len(indices)),
            np.broadcast_to(np.array((height, width), np.int32), (len(indices), 2)),
        )


def _decoded(images: Any) -> Pictures:
    """The dense images of a DALI TensorList, each at its own address."""
    sizes = np.array([shape[:2] for shape in images.shape()], np.int32)
    pointers = np.array([image.data_ptr() for image in images], np.uint64)
    return Pictures(pointers, 3 * sizes[:, 1].astype(np.int64), sizes)
