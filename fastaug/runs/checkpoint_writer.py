"""Checkpoints of a run, written beside the training: a thread writes what was copied for it.

A run folder has last.pt, best.pt (and best.safetensors, its weights for others), and the newest few
in checkpoints/, of which last.pt is one. What cannot be written is tried again, while the training
goes on and what was written before stays.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fastaug.errors import CheckpointError, DamagedCheckpointError
from fastaug.runs.checkpoint import load_checkpoint, write_atomically, write_checkpoint
from fastaug.runs.lock import wait_until_free
from fastaug.runs.weights import weights_as_safetensors
from fastaug.runtime.atomic import TEMPORARY, atomic_write

FOLDER = "checkpoints"
RETRY_SECONDS = (1.0, 3.0, 10.0, 30.0, 60.0)
"""Waits before a write is tried again; the last one repeats."""
PATIENCE_AT_THE_END = 60.0
"""Seconds for which a run that has ended tries to write its last checkpoint."""


class CheckpointWriter:
    """Takes states and returns at once. The newest one counts: an older one that still waits when
    it comes is dropped."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        say: Callable[[str], None],
        flush_records: Callable[[], None] = lambda: None,
    ) -> None:
        """flush_records: called before a checkpoint is written, in another thread than the
        training's; raises OSError if that cannot be done now."""
        self._folder, self._keep, self._say = folder, keep, say
        self._flush_records = flush_records
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
        """Whether there is a best.pt, or will be."""
        with self._changed:
            return "best" in self._waiting or (self._folder / "best.pt").exists()

    def close(self) -> None:
        """Return when all is written, or end with an error if that takes too long."""
        with self._changed:
            if self._error is not None and not self._closing:
                self._say(f"the last checkpoint is tried {_for_a_while()}")
            self._closing = True
            self._changed.notify()
        self._thread.join()
        if self._error is not None:
            what = f"{self._folder}: the last checkpoint cannot be written"
            what += f" ({_reason(self._error)}); "
            mend = "free some space or mend the permissions, then "
            if _steps(self._folder / FOLDER):
                what += f"the ones before are whole: {mend}--resume"
            else:
                what += f"there is none before it: {mend}start anew"
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
            except Exception as error:  # whatever it is, the training does not depend on it
                self._error = error
                if time.monotonic() >= give_up:
                    return
                self._wait_after(error, tries)
                tries += 1
            else:
                self._error = None
                if tries:
                    self._say("the checkpoint could be written now")
                tries = 0

    def _write(self, todo: dict[str, dict[str, Any]]) -> None:
        """Write what waits; what was written waits no longer, unless something newer came."""
        # What a checkpoint knows to be in the records is not written again by who goes on from it.
        self._flush_records()
        # The best first: last.pt knows of its evaluation, which is not made again for best.pt.
        for name, state in sorted(todo.items()):
            self._write_last(state) if name == "last" else self._write_best(state)
            with self._changed:
                if self._waiting.get(name) is state:
                    del self._waiting[name]

    def _write_last(self, state: dict[str, Any]) -> None:
        kept = self._folder / FOLDER
        kept.mkdir(parents=True, exist_ok=True)
        newest = kept / _step_name(state["step"])
        write_checkpoint(newest, state)
        _link(newest, self._folder / "last.pt")
        # Later ones, of a run that went on from before them, take no place of those that count.
        for old in [path for path in _steps(kept) if path <= newest][self._keep :]:
            old.unlink(missing_ok=True)

    def _write_best(self, state: dict[str, Any]) -> None:
        write_checkpoint(self._folder / "best.pt", state)
        weights = weights_as_safetensors(state)
        write_atomically(self._folder / "best.safetensors", lambda file: file.write(weights))

    def _wait_after(self, error: Exception, tries: int) -> None:
        seconds = RETRY_SECONDS[min(tries, len(RETRY_SECONDS) - 1)]
        if tries == 0:
            goes_on = "the training goes on, the earlier ones are kept, and it is tried again"
            self._say(
                f"warning: a checkpoint cannot be written to {self._folder} ({_reason(error)}); "
                + (f"it is tried again {_for_a_while()}" if self._closing else goes_on)
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


def newest_checkpoint(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint of a run folder; None if it has none at all.

    A damaged one is put aside, so that no later step counts as older than it, and said. If none is
    whole they stay where they are: to try again must not mean to start from the beginning.
    """
    wait_until_free(folder, say)
    whole: dict[Path, int] = {}
    damaged: dict[Path, DamagedCheckpointError] = {}
    for path in (folder / "last.pt", *_steps(folder / FOLDER)):
        # last.pt is a second name of the newest, or of the one before, if the run was killed
        # between the two: the next one is looked at, too, unless it cannot be newer.
        if not path.exists() or any(path.name <= _step_name(step) for step in whole.values()):
            continue
        try:
            whole[path] = load_checkpoint(path)["step"]
        except DamagedCheckpointError as error:
            damaged[path] = error
    if damaged and not whole:
        raise CheckpointError(f"{folder}: no checkpoint of it is whole; {_best_of(folder)}")
    for bad, reason in damaged.items():
        with suppress(OSError):  # of a folder that cannot be written, said soon enough
            bad.replace(bad.with_name(f"{bad.name}.damaged"))
        say(f"warning: {reason}; it is put aside, and the one before is taken")
    return max(whole, key=lambda path: whole[path], default=None)


def find_checkpoint(resume: str, out: str, say: Callable[[str], None]) -> Path | None:
    """What --resume means: a file, a run folder, or "auto": --out, else the newest run of runs/.

    None if "auto" finds nothing: the run then starts from the beginning.
    """
    if resume == "auto":
        folder = Path(out).expanduser() if out else _newest_run()
        return None if folder is None else newest_checkpoint(folder, say)
    path = Path(resume).expanduser()
    if not path.is_dir():
        return path
    if (newest := newest_checkpoint(path, say)) is None:
        raise CheckpointError(
            f"{path}: no checkpoint to go on from, neither last.pt nor any in {FOLDER}/; "
            f"{_best_of(path)}"
        )
    return newest


def _best_of(folder: Path) -> str:
    """What to do with a folder that has no checkpoint to go on from."""
    best = folder / "best.pt"
    try:
        step = load_checkpoint(best)["step"]
    except CheckpointError:
        return "start anew, in another --out"
    return f"its best.pt is whole, of step {step:,}: --resume {best} --out NEW"


def _newest_run() -> Path | None:
    files = [*Path("runs").glob("*/last.pt*"), *Path("runs").glob(f"*/{FOLDER}/step-*.pt")]
    newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else run_of(newest)


def run_of(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint is of."""
    folder = checkpoint.parent
    return folder.parent if folder.name == FOLDER else folder


def _step_name(step: int) -> str:
    return f"step-{step:09}.pt"


def _steps(folder: Path) -> list[Path]:
    """The checkpoints in it, the newest first."""
    return sorted(folder.glob("step-*.pt"), reverse=True)


def _link(file: Path, name: Path) -> None:
    """The file under a second name, which changes from one whole file to the next at once."""
    with atomic_write(name) as temporary:
        temporary.unlink(missing_ok=True)
        try:
            os.link(file, temporary)
        except OSError:  # some network and memory-stick file systems know one name alone
            shutil.copyfile(file, temporary)


def _copied(value: Any) -> Any:
    """A state that no later step changes, in the memory of the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value
