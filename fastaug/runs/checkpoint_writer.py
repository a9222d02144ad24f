"""Asynchronous checkpoint writer: the training copies its state, a thread writes it.

A run folder has last.pt, best.pt (and best.safetensors, its weights for other programs), and the
newest few in checkpoints/, of which last.pt is one. A write that fails is retried while the
training continues; earlier checkpoints stay.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastaug.errors import CheckpointError
from fastaug.runs.checkpoint import write_atomically, write_checkpoint
from fastaug.runs.weights import weights_as_safetensors
from fastaug.runtime.atomic import TEMPORARY, atomic_write
from fastaug.runtime.folder_files import check_real_folder

FOLDER = "checkpoints"
RETRY_SECONDS = (1.0, 3.0, 10.0, 30.0, 60.0)
"""Waits before a write is retried; the last one repeats."""
PATIENCE_AT_THE_END = 60.0
"""Seconds for which a run that has ended retries its last checkpoint."""


class CheckpointWriter:
    """Takes states and returns at once. A newer state replaces an older one that still waits."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        say: Callable[[str], None],
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        """flush: called before a checkpoint is written, in another thread than the
        training's; raises OSError if that cannot be done now."""
        self._folder, self._keep, self._say = folder, keep, say
        self._flush = flush
        self._waiting: dict[str, dict[str, Any]] = {}
        """last or best -> the state to write."""
        self._closing = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        for half in (*folder.glob(TEMPORARY), *folder.glob(f"{FOLDER}/{TEMPORARY}")):
            half.unlink(missing_ok=True)  # of a process that was killed
        self._thread = threading.Thread(target=self._run, name="fastaug-saver", daemon=True)
        self._thread.start()

    def save(self, state: dict[str, Any], *, best: bool = False) -> None:
        """Copy the state, for last.pt and, if it is the best so far, for best.pt."""
        state = _copied(state)
        with self._changed:
            self._waiting["last"] = state
            if best:
                self._waiting["best"] = state
            self._changed.notify()

    @property
    def has_best(self) -> bool:
        """True if there is a best.pt, or will be."""
        with self._changed:
            return "best" in self._waiting or (self._folder / "best.pt").exists()

    def close(self) -> None:
        """Wait until all is written; raise CheckpointError if that takes too long."""
        with self._changed:
            if self._error is not None and not self._closing:
                self._say(f"retrying the last checkpoint {_for_a_while()}")
            self._closing = True
            self._changed.notify()
        self._thread.join()
        if self._error is not None:
            what = f"{self._folder}: the last checkpoint cannot be written"
            what += f" ({_reason(self._error)}); "
            advice = "free some space or fix the permissions, then "
            if kept_checkpoints(self._folder / FOLDER):
                what += f"the ones before are intact: {advice}--resume"
            else:
                what += f"there is none before it: {advice}start again"
            raise CheckpointError(what) from self._error

    # --- the thread ---

    def _run(self) -> None:
        tries, give_up = 0, float("inf")
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                if self._closing:
                    give_up = min(give_up, time.monotonic() + PATIENCE_AT_THE_END)
                todo = dict(self._waiting)
            try:
                self._write(todo)
            except Exception as error:  # the training does not depend on it
                self._error = error
                if time.monotonic() >= give_up:
                    return
                self._wait_after(error, tries)
                tries += 1
            else:
                self._error = None
                if tries:
                    self._say("the checkpoint is written now")
                tries = 0

    def _write(self, todo: dict[str, dict[str, Any]]) -> None:
        """Write the waiting states; keep those that newer ones have replaced meanwhile."""
        # A resumed run does not write again what its checkpoint says is in metrics.jsonl.
        self._flush()
        # The best first: last.pt counts its evaluation as done.
        for name, state in sorted(todo.items()):
            self._write_last(state) if name == "last" else self._write_best(state)
            with self._changed:
                if self._waiting.get(name) is state:
                    del self._waiting[name]

    def _write_last(self, state: dict[str, Any]) -> None:
        kept = self._folder / FOLDER
        kept.mkdir(parents=True, exist_ok=True)
        check_real_folder(kept)
        newest = kept / step_name(state["step"])
        write_checkpoint(newest, state)
        _link(newest, self._folder / "last.pt")
        # Checkpoints of later steps, left by a run that was resumed before them, do not count.
        for old in [path for path in kept_checkpoints(kept) if path <= newest][self._keep :]:
            old.unlink(missing_ok=True)

    def _write_best(self, state: dict[str, Any]) -> None:
        write_checkpoint(self._folder / "best.pt", state)
        weights = weights_as_safetensors(state)
        write_atomically(self._folder / "best.safetensors", lambda file: file.write(weights))

    def _wait_after(self, error: Exception, tries: int) -> None:
        seconds = RETRY_SECONDS[min(tries, len(RETRY_SECONDS) - 1)]
        if tries == 0:
            later = "training continues, earlier checkpoints are kept, and it will be retried"
            self._say(
                f"warning: a checkpoint cannot be written to {self._folder} ({_reason(error)}); "
                + (f"retrying {_for_a_while()}" if self._closing else later)
            )
        with self._changed:
            if not self._closing:
                self._changed.wait(seconds)
                return
        time.sleep(min(seconds, 3.0))


def _for_a_while() -> str:
    return f"for up to {PATIENCE_AT_THE_END:g} s more"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def step_name(step: int) -> str:
    return f"step-{step:09}.pt"


def kept_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    return sorted(folder.glob("step-*.pt"), reverse=True)


def _link(file: Path, name: Path) -> None:
    """Give the file a second name, atomically."""
    with atomic_write(name) as temporary:
        temporary.unlink(missing_ok=True)
        try:
            os.link(file, temporary)
        except OSError:  # some network and memory-stick file systems have no links
            shutil.copyfile(file, temporary)


def _copied(value: Any) -> Any:
    """A deep copy of the state in host memory, which later steps do not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value
