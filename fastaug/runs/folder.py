"""The run folder: config.json, metrics.jsonl, summary.json, views.png, checkpoints, logs.

A disk that is full for a while must not end a run: lines that cannot be written wait for the next.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, printable
from fastaug.runs.checkpoint import write_atomically
from fastaug.runs.checkpoint_writer import CheckpointWriter
from fastaug.runs.contents import check_contents
from fastaug.runs.lock import FolderLock
from fastaug.runs.loggers.open import open_loggers
from fastaug.runs.metrics_records import BadLines, metrics_lines, parse_record
from fastaug.runtime.atomic import atomic_write, make_folder, sync, sync_folder, write_json
from fastaug.runtime.folder_files import BadFileError, create_file, open_regular

SUMMARY_TRIES = 10
"""Attempts to write the last file of a run, a second apart."""


class RunFolder:
    """All that a run writes. Nothing is touched before open(), and nothing is written after close()
    or, if the folder is not opened (on ranks above 0), at all.

    Values under "timing" depend on the machine, all others on the run only.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        say: Callable[[str], None],
        resume_step: int | None = None,
        evaluated_epochs: int | None = None,
    ) -> None:
        """resume_step: the step that the run continues from, None for a new run;
        evaluated_epochs: epochs that are not evaluated again; None: all before resume_step."""
        self.path = Path(config.run.out)
        self._config, self._say = config, say
        self._resume_step, self._evaluated_epochs = resume_step, evaluated_epochs
        self._is_open = False
        self._waiting = b""
        """Lines of metrics.jsonl that are not on the disk yet."""
        self._writing = threading.Lock()
        self._failing = False
        self._bad_images: list[str] | None = None
        self._last_saved = 0.0
        self._summary: dict[str, Any] | None = None

    def open(self) -> RunFolder:
        """Lock the folder and begin to write, or raise ConfigError."""
        path, resume_step = self.path, self._resume_step
        try:
            make_folder(path)
            self._lock = FolderLock(path, self._say)
            with ExitStack() as undo:
                undo.callback(self._lock.release)
                check_contents(path)
                self._check_still()
                write_json(path / "config.json", self._config.to_flat())
                metrics = path / "metrics.jsonl"
                self._keep_metrics_until(metrics, resume_step or 0, self._evaluated_epochs)
                self._metrics = open_regular(metrics, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                undo.callback(os.close, self._metrics)
                sync_folder(path)
                self._loggers = open_loggers(self._config, resume_step, self._say)
                undo.pop_all()
        except BadFileError as error:
            raise ConfigError(
                f"{error.filename}: {error.strerror}; move it aside, or choose another --out"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"--out {path}: cannot be written ({error.strerror or error})"
            ) from error
        keep = self._config.run.keep_checkpoints
        self._checkpoints = CheckpointWriter(path, keep=keep, say=self._say, flush=self.sync)
        self._last_saved = time.monotonic()
        self._is_open = True
        return self

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def write(self, kind: str, step: int, values: dict[str, Any], timing: dict[str, float]) -> None:
        """One record: a line of metrics.jsonl, and its numbers for the loggers."""
        if not self._is_open:
            return
        # JSON knows neither nan nor infinity: a mean over nothing is null.
        known = {name: None if _is_non_finite(value) else value for name, value in values.items()}
        record = {"kind": kind, "step": step, **known, "timing": timing}
        with self._writing:
            self._waiting += json.dumps(record).encode() + b"\n"
        self._try_to_write()
        numbers = {
            f"{kind}/{name}": value
            for name, value in (values | timing).items()
            if isinstance(value, (int, float))
        }
        for logger in self._loggers:
            logger.log(step, numbers)

    def write_picture(self, name: str, picture: Image) -> None:
        if not self._is_open:
            return
        for logger in self._loggers:
            logger.picture(name, picture)
        with suppress(OSError), atomic_write(self.path / f"{name}.png", ".png") as temporary:
            picture.save(temporary)

    def write_bad_images(self, lines: list[str]) -> None:
        """bad-images.txt: a line for each image that the run does without, if there is one."""
        if not self._is_open or lines == self._bad_images:
            return
        self._bad_images = lines
        file = self.path / "bad-images.txt"
        with suppress(OSError):
            if not lines:
                file.unlink(missing_ok=True)
                return
            with open(create_file(file), "w", encoding="utf-8", errors="backslashreplace") as out:
                out.writelines(f"{printable(line)}\n" for line in lines)

    def write_bad_batch(self, batch: dict[str, Any]) -> Path:
        """bad-batch.pt, for torch.load."""
        path = self.path / "bad-batch.pt"
        if self._is_open:
            try:
                write_atomically(path, lambda file: torch.save(batch, file))
            except OSError as error:
                self._say(f"warning: {path}: cannot be written ({error.strerror})")
        return path

    def write_summary(self, summary: dict[str, Any]) -> None:
        if not self._is_open:
            return
        self._summary = summary
        for tries_left in reversed(range(SUMMARY_TRIES)):
            try:
                write_json(self.path / "summary.json", summary)
                return
            except OSError as error:
                if not tries_left:
                    self._say(f"warning: summary.json cannot be written ({error.strerror})")
                    return
                time.sleep(1)

    def remove_summary(self) -> None:
        """Remove summary.json, which says that the run has finished: it is extended."""
        if self._is_open:
            (self.path / "summary.json").unlink(missing_ok=True)
            sync_folder(self.path)

    def flush(self) -> None:
        """All lines of metrics.jsonl, or an OSError; from any thread."""
        with self._writing:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._metrics, self._waiting) :]

    def sync(self) -> None:
        """All lines of metrics.jsonl on disk, or an OSError; from any thread. A power cut must not
        take lines that a checkpoint counts as written."""
        self.flush()
        sync(self._metrics)  # not locked: the training writes lines meanwhile

    # --- checkpoints ---

    @property
    def is_checkpoint_time(self) -> bool:
        """True if the last checkpoint is --checkpoint-minutes old."""
        seconds = 60 * self._config.run.checkpoint_minutes
        is_due = bool(seconds) and time.monotonic() - self._last_saved >= seconds
        return self._is_open and is_due

    def save(self, state: dict[str, Any], *, best: bool = False) -> None:
        """Copy the state; it is written asynchronously."""
        if self._is_open:
            self._checkpoints.save(state, best=best)
            self._last_saved = time.monotonic()

    @property
    def has_best(self) -> bool:
        """True if there is a best.pt, or will be."""
        return not self._is_open or self._checkpoints.has_best

    def finish_saving(self) -> None:
        """Wait until all checkpoints are written."""
        if self._is_open:
            self._checkpoints.close()

    # --- the end ---

    def close(self) -> None:
        """Write what is left and release the folder."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._checkpoints.close()
        finally:
            self._close_records()

    def _close_records(self) -> None:
        self._try_to_write()
        if self._waiting:
            lines = self._waiting.count(b"\n")
            self._say(f"warning: the last {lines} lines of metrics.jsonl could not be written")
        os.close(self._metrics)
        for logger in self._loggers:
            logger.close(self._summary)
        self._lock.release()

    def _try_to_write(self) -> None:
        try:
            self.flush()
        except OSError as error:
            if not self._failing:
                self._say(
                    f"warning: metrics.jsonl cannot be written ({error.strerror}); its lines are "
                    "kept in memory and retried"
                )
            self._failing = True
        else:
            self._failing = False

    def _check_still(self) -> None:
        """Raise ConfigError if another process has changed the folder before it was locked."""
        resume_step = self._resume_step
        if resume_step is None:
            check_unused(self.path)
        elif self._lock.waited and (newest := _newest_step(self.path)) > resume_step:
            raise ConfigError(
                f"--out {self.path}: another process has just trained in it, up to step "
                f"{newest:,}; run the same command again to continue from there"
            )

    def _keep_metrics_until(self, file: Path, step: int, evaluated_epochs: int | None) -> None:
        """Drop lines that a resumed run writes again, those of the stop, a torn one, and those that
        are not records."""
        if not file.exists():
            return
        bad = BadLines()
        with atomic_write(file) as temporary, temporary.open("w", encoding="utf-8") as kept:
            for line in metrics_lines(file):
                if (record := parse_record(line.text)) is None:
                    bad.add(line)
                    continue
                kind, again = record["kind"], False
                if kind == "eval" and evaluated_epochs is not None:
                    # Ended between an evaluation and the checkpoint that knows of it.
                    again = record["epoch"] > evaluated_epochs
                if record["step"] <= step and kind not in ("partial", "final") and not again:
                    kept.write(line.text + "\n")
        if bad.count:
            self._say(f"warning: {self.path}: {bad.describe()}")


def check_writable(path: Path) -> None:
    """Refuse a run folder that cannot be made or written, or has links. Leaves nothing behind."""
    check_contents(path)
    made = []
    try:
        for folder in (*reversed(path.parents), path):
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"--out {path}: cannot be written ({error.strerror or error}); choose another folder"
        ) from error
    finally:
        for folder in reversed(made):
            with suppress(OSError):  # another process may use it by now
                folder.rmdir()


def check_unused(path: Path) -> None:
    """A new run does not begin where another one is. One that ended before its first checkpoint
    holds nothing to keep."""
    if (path / "last.pt").exists() or _newest_step(path) >= 0:
        raise ConfigError(
            f"--out {path}: already contains a run; continue it with --resume {path}, "
            "or choose another folder"
        )


def _newest_step(path: Path) -> int:
    """Step of the newest checkpoint in a run folder; -1 if it has none."""
    names = (file.stem.partition("-")[2] for file in path.glob("checkpoints/step-*.pt"))
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=-1)


def _is_non_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
