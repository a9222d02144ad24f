"""TensorBoard events. One that cannot be written is lost: metrics.jsonl has the same values."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image


class TensorBoardWriter:
    """The events of a folder; after an error it is tried again once a minute."""

    _TRY_AGAIN = 60.0

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        self._folder, self._purge_step = folder, purge_step
        self._writer: Any = None
        self._next_try = 0.0
        self._open()

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        self._purge_step = None  # events of an earlier run are dropped once

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._try(lambda: self._writer.add_scalar(name, value, step))

    def add_picture(self, name: str, picture: Image) -> None:
        pixels = np.asarray(picture)
        self._try(lambda: self._writer.add_image(name, pixels, 0, dataformats="HWC"))

    def close(self) -> None:
        with suppress(OSError, ValueError):
            if self._writer is not None:
                self._writer.close()
        self._writer = None

    def _try(self, write: Callable[[], None]) -> None:
        if self._writer is None and time.monotonic() < self._next_try:
            return
        try:
            if self._writer is None:
                self._open()
            write()
        except (OSError, ValueError):  # ValueError: its file was closed when it failed
            self.close()
            self._next_try = time.monotonic() + self._TRY_AGAIN


def write_event_picture(folder: Path, name: str, picture: Image) -> None:
    """Write a picture for TensorBoard outside a run."""
    events = TensorBoardWriter(folder)
    events.add_picture(name, picture)
    events.close()
