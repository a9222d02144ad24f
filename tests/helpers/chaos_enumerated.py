"""Faults of chaos.py that are enumerated instead of drawn: all lengths to which a checkpoint may be
cut, in steps of 4 KB, and all file operations at which a process may be killed."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from chaos_round import Result, Stage
from chaos_scene import Scene, checksum
from chaos_settings import SETTINGS
from chaos_training import PATIENCE, Failure

from fastaug.runs.resume import newest_checkpoint

BLOCK = 4096
SETTING = "plain"
EPOCHS = 8
LONG_LIVED = ("metrics.jsonl",)
"""Files that stay open: only their first writes are operations of their own."""


# --- checkpoints that are cut short ---


def resume_every_cut(stage: Stage, *, trained: int = 10) -> Result:
    """Cut last.pt at every 4 KB: the checkpoint before it must be found. So many of the cuts are
    also trained to the end from there."""
    stage, began = Stage(stage.surroundings, epochs=EPOCHS), time.monotonic()
    undisturbed = stage.undisturbed(SETTING)
    result = Result("cuts", 0, is_enumerated=True)
    newest, older = sorted((undisturbed / "checkpoints").glob("step-*.pt"), reverse=True)[:2]
    work = stage.surroundings.folder / "cuts"
    lengths = range(0, newest.stat().st_size, BLOCK)
    for length in lengths:
        with _cut_copy(work, newest, older, length) as run:
            if (found := newest_checkpoint(run, lambda _: None)) != run / "checkpoints" / older.name:
                result.problems.append(f"last.pt cut to {length} bytes: resumes from {found}")
    result.faults["last.pt cut at a multiple of 4 KB"] = len(lengths)
    for length in lengths[:: max(1, len(lengths) // trained)]:
        _train_after_cut(stage, result, undisturbed, length)
    result.seconds = time.monotonic() - began
    return result


@contextmanager
def _cut_copy(work: Path, newest: Path, older: Path, length: int) -> Iterator[Path]:
    """A run folder with two checkpoints. The newest one, which is also last.pt, is cut."""
    (work / "checkpoints").mkdir(parents=True)
    try:
        os.link(older, work / "checkpoints" / older.name)
        with open(newest, "rb") as file:
            (work / "last.pt").write_bytes(file.read(length))
        os.link(work / "last.pt", work / "checkpoints" / newest.name)
        yield work
    finally:
        shutil.rmtree(work)


def _train_after_cut(stage: Stage, result: Result, undisturbed: Path, length: int) -> None:
    """A run that is killed, resumes with its newest checkpoint cut, and trains to the end."""
    training = stage.training(f"cut-{length}", SETTINGS[SETTING], checkpoint_every=3)
    scene = Scene(training, SETTINGS[SETTING], stage.surroundings)
    with stage.judged(result, scene, undisturbed):
        training.start(scene.run)
        if not training.reach(20) or not scene.stop(signal.SIGKILL):
            raise Failure("was too fast to be killed")
        last = scene.run / "last.pt"
        os.truncate(last, min(length, last.stat().st_size - 1))
        scene.damaged.add(checksum(last))
        scene.resume()
        if code := training.wait():
            raise Failure(f"has ended with exit code {code}")
        result.faults["last.pt cut at a multiple of 4 KB, then trained to the end"] += 1


# --- SIGKILL at file operations ---


def kill_at_every_operation(stage: Stage, *, only: Sequence[str] = ()) -> Result:
    """Kill a training before each of the file operations that it makes, and in the middle of some
    writes. only: those that begin with one of these words."""
    stage, began = Stage(stage.surroundings, epochs=EPOCHS), time.monotonic()
    undisturbed = stage.undisturbed(SETTING)
    result = Result("operations", 0, is_enumerated=True)
    waiting = [op for op in operations(stage) if op.startswith(tuple(only) or "")]
    tries: Counter[str] = Counter()
    while waiting and not result.problems:
        number = sum(tries.values())
        training = stage.training(f"operations-{number}", SETTINGS[SETTING], checkpoint_every=3)
        scene = Scene(training, SETTINGS[SETTING], stage.surroundings)
        with stage.judged(result, scene, undisturbed):
            _kill_at_each(scene, waiting, tries, result)
    result.seconds = time.monotonic() - began
    return result


def operations(stage: Stage) -> list[str]:
    """The operations of a run and of its resumption, in the order in which they first occur."""
    shim = stage.surroundings.shim
    training = stage.training("logged", SETTINGS[SETTING], checkpoint_every=3)
    scene = Scene(training, SETTINGS[SETTING], stage.surroundings)
    shim.start_log()
    try:
        training.start(scene.run)
        if training.reach(16) and scene.stop(signal.SIGKILL):
            scene.resume()
        if code := training.wait(300):
            raise Failure(f"has ended with exit code {code}")
    finally:
        training.close()
        logged = list(dict.fromkeys(shim.stop_log()))
    shutil.rmtree(training.folder)
    found: list[str] = []
    for operation in logged:
        name, _, ordinal = operation.rpartition(" ")
        is_write = name.startswith("write ")
        if is_write and name.endswith(LONG_LIVED) and int(ordinal) > 2:
            continue
        found.append(operation)
        if is_write and int(ordinal) in (1, 2, 10):
            found.append(f"half of {operation}")
    return found


def _kill_at_each(
    scene: Scene, waiting: list[str], tries: Counter[str], result: Result
) -> None:
    """One run that is killed at one operation after another, until it has ended, or none is left."""
    training, shim = scene.training, scene.surroundings.shim
    is_first = True
    while True:
        operation = waiting[0] if waiting else ""
        before = shim.killed
        shim.kill_before(operation)
        if is_first:
            training.start(scene.run)
        else:
            scene.resume()
        is_first = False
        code = training.wait(PATIENCE)
        shim.kill_before("")
        if code not in (0, -signal.SIGKILL) or (code != 0) != (shim.killed > before):
            raise Failure(f"has ended with exit code {code} at {operation!r}")
        scene.check_files()
        tries[operation] += 1
        if code == 0:
            if operation and tries[operation] >= 2:  # also not in a run of its own
                result.missed += 1
                waiting.pop(0)
            return
        waiting.pop(0)
        result.faults["SIGKILL before a file operation"] += not operation.startswith("half")
        result.faults["SIGKILL in the middle of a write"] += operation.startswith("half")
