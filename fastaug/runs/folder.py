"""The run folder's records: config.json, metrics.jsonl, summary.json, views.png and TensorBoard's
events.

A disk that is full for a while must not end a run: lines that cannot be written wait for the next.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, printable
from fastaug.runs.lock import FolderLock
from fastaug.runtime.atomic import atomic_write, write_json

SUMMARY_TRIES = 10
"""A second apart, for the last file of a run."""


class RunFolder:
    """Writes a run's records. Values under "timing" are the machine's, all others the run's."""

    def __init__(
        self,
        path: Path,
        config: TrainConfig,
        *,
        say: Callable[[str], None],
        resume_step: int | None = None,
        evaluated_epochs: int | None = None,
    ) -> None:
        """resume_step: None for a new run, else the step that the run continues from;
        evaluated_epochs: it does not evaluate these again; None: all until then."""
        self.path, self._say = path, say
        self._waiting = b""
        """Lines of metrics.jsonl that are not on the disk yet."""
        self._writing = threading.Lock()
        self._failing = False
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(path, say)
            with ExitStack() as undo:
                undo.callback(self._lock.release)
                self._check_still(resume_step)
                write_json(path / "config.json", config.to_flat())
                metrics = path / "metrics.jsonl"
                self._keep_metrics_until(metrics, resume_step or 0, evaluated_epochs)
                self._metrics = os.open(metrics, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                self._events = TensorBoardWriter(
                    path, None if resume_step is None else resume_step + 1
                )
                undo.pop_all()
        except OSError as error:
            raise ConfigError(
                f"--out {path}: cannot be written ({error.strerror or error})"
            ) from error

    def write(self, kind: str, step: int, values: dict[str, Any], timing: dict[str, float]) -> None:
        """One record: a line of metrics.jsonl, and a scalar of TensorBoard for each number."""
        # JSON knows neither nan nor infinity: a mean over nothing is null.
        known = {name: None if _is_no_number(value) else value for name, value in values.items()}
        record = {"kind": kind, "step": step, **known, "timing": timing}
        with self._writing:
            self._waiting += json.dumps(record).encode() + b"\n"
        self._try_to_write()
        for name, value in (values | timing).items():
            if isinstance(value, (int, float)):
                self._events.add_scalar(f"{kind}/{name}", value, step)

    def write_picture(self, name: str, picture: Image) -> None:
        self._events.add_picture(name, picture)
        with suppress(OSError), atomic_write(self.path / f"{name}.png", ".png") as temporary:
            picture.save(temporary)

    def write_bad_images(self, lines: list[str]) -> None:
        """bad-images.txt: a line for each image that the run does without, if there is one."""
        file = self.path / "bad-images.txt"
        with suppress(OSError):
            file.unlink(missing_ok=True)
            if lines:
                text = "".join(f"{printable(line)}\n" for line in lines)
                file.write_text(text, encoding="utf-8", errors="backslashreplace")

    def write_summary(self, summary: dict[str, Any]) -> None:
        for tries_left in reversed(range(SUMMARY_TRIES)):
            try:
                write_json(self.path / "summary.json", summary)
                return
            except OSError as error:  # noqa: PERF203
                if not tries_left:
                    self._say(f"warning: summary.json cannot be written ({error.strerror})")
                    return
                time.sleep(1)

    def flush(self) -> None:
        """All lines of metrics.jsonl, or an OSError; from any thread."""
        with self._writing:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._metrics, self._waiting) :]

    def close(self) -> None:
        self._try_to_write()
        if self._waiting:
            lines = self._waiting.count(b"\n")
            self._say(f"warning: the last {lines} lines of metrics.jsonl could not be written")
        os.close(self._metrics)
        self._events.close()
        self._lock.release()

    def _try_to_write(self) -> None:
        try:
            self.flush()
        except OSError as error:
            if not self._failing:
                self._say(
                    f"warning: metrics.jsonl cannot be written ({error.strerror}); its lines are "
                    "kept and tried again"
                )
            self._failing = True
        else:
            self._failing = False

    def _check_still(self, resume_step: int | None) -> None:
        """That the folder, now that it is ours, is what the run was going to begin with."""
        if resume_step is None:
            check_unused(self.path)
        elif self._lock.waited and (newest := _newest_step(self.path)) > resume_step:
            raise ConfigError(
                f"--out {self.path}: another process has trained in it until now, to step "
                f"{newest:,}; give the same command again to go on from there"
            )

    @staticmethod
    def _keep_metrics_until(file: Path, step: int, evaluated_epochs: int | None) -> None:
        """Drop what a resumed run writes again, what the stop alone wrote, and a torn line."""
        if not file.exists():
            return
        kept = []
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            kind, again = record["kind"], False
            if kind == "eval" and evaluated_epochs is not None:
                # Ended between an evaluation and the checkpoint that knows of it.
                again = record["epoch"] > evaluated_epochs
            if record["step"] <= step and kind not in ("partial", "final") and not again:
                kept.append(line + "\n")
        with atomic_write(file) as temporary:
            temporary.write_text("".join(kept), encoding="utf-8")


def check_unused(path: Path) -> None:
    """A new run does not begin where another one is. One that ended before its first checkpoint
    holds nothing to keep."""
    if (path / "last.pt").exists() or _newest_step(path) >= 0:
        raise ConfigError(
            f"--out {path}: holds a run already; continue it with --resume {path}, "
            "or choose another folder"
        )


def _newest_step(path: Path) -> int:
    """Of the checkpoints in a run folder; -1 if it has none."""
    names = (file.stem.partition("-")[2] for file in path.glob("checkpoints/step-*.pt"))
    return max((int(name) for name in names if name.isdigit()), default=-1)


class TensorBoardWriter:
    """TensorBoard's events. What cannot be written is lost: metrics.jsonl has the same numbers."""

    _TRY_AGAIN = 60.0

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        self._folder, self._purge_step = folder, purge_step
        self._writer: Any = None
        self._next_try = 0.0
        self._open()

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        self._purge_step = None  # of what an earlier run wrote: once

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
    """A picture for TensorBoard alone, outside a run."""
    events = TensorBoardWriter(folder)
    events.add_picture(name, picture)
    events.close()


def _is_no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
