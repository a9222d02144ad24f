"""TensorBoard events. One that cannot be written is lost: metrics.jsonl has the same values."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image

from fastaug.settings import typed


class TensorBoardLogger:
    """The events of a folder; after an error it is tried again once a minute.

    torch's writer has a thread of its own, and only appends to a file: no other thread is needed.
    """

    _TRY_AGAIN = 60.0

    def __init__(self) -> None:
        self._folder = Path()
        self._writer: Any = None
        self._purge_step: int | None = None
        self._next_try = 0.0

    def start(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> None:
        """Open the events; those of steps after resume_step are dropped. The config becomes the
        hyperparameters of the run."""
        self._folder = folder
        self._purge_step = None if resume_step is None else resume_step + 1
        self._open()
        if config:
            self._try(lambda: self._add_hyperparameters(config))

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        self._purge_step = None  # events of an earlier run are dropped once

    def _add_hyperparameters(self, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        # Not add_hparams, which writes them as a run of their own.
        plain = {n: typed(v) if isinstance(v, list) else v for n, v in config.items()}
        for summary in hparams(plain, {"final/top1": 0.0}):
            self._writer.file_writer.add_summary(summary)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._try(partial(self._add_scalar, name, value, step))

    def _add_scalar(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)

    def picture(self, name: str, picture: Image) -> None:
        pixels = np.asarray(picture)
        self._try(lambda: self._writer.add_image(name, pixels, 0, dataformats="HWC"))

    def close(self, summary: dict[str, Any] | None = None) -> None:
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
    events = TensorBoardLogger()
    events.start(folder, {}, None)
    events.picture(name, picture)
    events.close()
