"""All that a run writes and shows: folder, checkpoints and terminal. Rank 0 alone does it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.runs.announcement import announcement
from fastaug.runs.checkpoint import write_atomically
from fastaug.runs.checkpoint_writer import CheckpointWriter
from fastaug.runs.console import RunConsole
from fastaug.runs.folder import RunFolder
from fastaug.runtime.distributed import Group


class Recorder:
    """A context: leaving it writes what is left. On other ranks than the first it does nothing."""

    def __init__(
        self,
        config: TrainConfig,
        group: Group,
        *,
        steps: int,
        done: int,
        evaluated_epochs: int,
        resumed: bool,
    ) -> None:
        """steps: at which this run stops; done: of them before it, as evaluated_epochs."""
        self.path = Path(config.run.out)
        self._config = config
        self._group = group
        self._active = group.is_first
        self._bad_images: list[str] | None = None
        self._last_saved = time.monotonic()
        self.console = RunConsole(steps, done, quiet=not self._active)
        self._resumed_at = done if resumed else None
        group.from_first(lambda: self._open(evaluated_epochs))

    def _open(self, evaluated_epochs: int) -> None:
        self._folder = RunFolder(
            self.path,
            self._config,
            say=self.console.line,
            resume_step=self._resumed_at,
            evaluated_epochs=evaluated_epochs,
        )
        self._saver = CheckpointWriter(
            self.path,
            keep=self._config.run.keep_checkpoints,
            say=self.console.line,
            flush_records=self._folder.flush,
        )

    def __enter__(self) -> Recorder:
        self.console.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if self._active:
                self._saver.close()
        finally:
            if self._active:
                self._folder.close()
            self.console.__exit__(*error)

    def announce(self, train: ImageSet, measured: Sequence[ImageSet], **run: Any) -> None:
        """What is trained on what, when it begins; run: what announcement() wants to know."""
        for line in announcement(self._config, train, measured, group=self._group, **run):
            self.console.line(line)
        if self._resumed_at is not None:
            self.console.line(f"resumed at step {self._resumed_at:,}")

    def write(self, kind: str, step: int, values: dict[str, Any], timing: dict[str, float]) -> None:
        if self._active:
            self._folder.write(kind, step, values, timing)

    def write_picture(self, name: str, picture: Image) -> None:
        if self._active:
            self._folder.write_picture(name, picture)

    def list_bad_images(self, sets: Sequence[ImageSet]) -> None:
        """Those that any rank knows of, whenever there are others than before."""
        own = {images.where(i): reason for images in sets for i, reason in images.bad.items()}
        known: dict[str, str] = {}
        for bad in self._group.gather(own):
            known |= bad
        lines = [f"{where}: {reason}" for where, reason in known.items()]
        if self._active and lines != self._bad_images:
            self._folder.write_bad_images(lines)
            self._bad_images = lines

    def write_summary(self, summary: dict[str, Any]) -> None:
        if self._active:
            self._folder.write_summary(summary)
            self.console.summary(self._config, summary)

    def write_bad_batch(self, batch: dict[str, Any]) -> str:
        """bad-batch.pt, for torch.load; returns where it is."""
        path = self.path / "bad-batch.pt"
        if self._active:
            try:
                write_atomically(path, lambda file: torch.save(batch, file))
            except OSError as error:
                self.console.line(f"warning: {path}: cannot be written ({error.strerror})")
        return str(path)

    # --- checkpoints ---

    def is_checkpoint_due(self, step: int) -> bool:
        """By --checkpoint-every or --checkpoint-minutes; never on a rank that does not write."""
        config = self._config
        if not self._active:
            return False
        if config.run.checkpoint_every and step % config.run.checkpoint_every == 0:
            return True
        seconds = 60 * config.run.checkpoint_minutes
        return bool(seconds) and time.monotonic() - self._last_saved >= seconds

    def save(self, state: dict[str, Any], *, best: bool = False) -> None:
        """Copy the state; it is written beside the training."""
        if self._active:
            self._saver.save(state, best=best)
            self._last_saved = time.monotonic()

    @property
    def has_best(self) -> bool:
        return not self._active or self._saver.has_best

    def finish_saving(self) -> None:
        """Return when all is written."""
        if self._active:
            self._saver.close()
