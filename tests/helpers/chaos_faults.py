"""The faults of chaos.py. Each is real: a signal, a limit of the kernel, a file that changes.

A fault is a function of the scene and of random numbers. It returns the kinds of faults that have
hit the training; one that came too late, or that nothing noticed, does not count.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import time
from pathlib import Path

from chaos_around import AROUND
from chaos_files import FILE_FAULTS
from chaos_scene import Fault, Scene, send
from chaos_settings import Setting

# --- signals ---


def kill(scene: Scene, rng: random.Random) -> list[str]:
    """SIGKILL of the process; of several ranks: one, which torchrun restarts, or all of them."""
    if scene.training.ranks > 1 and rng.random() < 0.6:
        return _lose_rank(scene, rng, signal.SIGKILL)
    if not scene.stop(signal.SIGKILL):
        return []
    scene.resume()
    return [scene.killed]


def kill_saving(scene: Scene, rng: random.Random) -> list[str]:
    """While a checkpoint is written."""
    folder = scene.run / "checkpoints"
    if not scene.training.until(folder.exists):
        return []
    before = folder.stat().st_mtime_ns
    give_up = time.monotonic() + 3
    while folder.stat().st_mtime_ns == before and time.monotonic() < give_up:
        pass
    time.sleep(rng.uniform(0, 0.01))
    if not scene.stop(signal.SIGKILL):
        return []
    scene.resume()
    return ["SIGKILL while saving"]


def kill_twice(scene: Scene, rng: random.Random) -> list[str]:
    """SIGKILL, and again while it starts."""
    if not scene.stop(signal.SIGKILL):
        return []
    scene.resume()
    time.sleep(rng.uniform(0, 1.5 if scene.training.ranks == 1 else 12))
    begun = len(scene.training.steps())
    if not scene.stop(signal.SIGKILL):
        return [scene.killed]
    scene.resume()
    return [scene.killed, scene.killed if begun else "SIGKILL while starting"]


def terminate(scene: Scene, rng: random.Random) -> list[str]:
    return _ask_to_end(scene, rng, signal.SIGTERM)


def interrupt(scene: Scene, rng: random.Random) -> list[str]:
    return _ask_to_end(scene, rng, signal.SIGINT)


def _ask_to_end(scene: Scene, rng: random.Random, signum: signal.Signals) -> list[str]:
    if scene.training.ranks > 1 and rng.random() < 0.5:
        return _lose_rank(scene, rng, signum)
    if not scene.stop(signum):
        return []
    scene.resume()
    return [signum.name if scene.training.ranks == 1 else f"{signum.name} to torchrun"]


def _lose_rank(scene: Scene, rng: random.Random, signum: signal.Signals) -> list[str]:
    """torchrun restarts all ranks, from what was saved."""
    training = scene.training
    training.bound(scene.next_start() or 0)
    before = training.pids()
    send(rng.choice(before), signum)
    restarted = training.until(
        lambda: not set(before) & set(training.pids()) and bool(training.steps())
    )
    if not restarted and set(before) & set(training.pids()):
        return []  # it had finished
    return [f"{signum.name} of a rank"]


# --- the disk ---


def fill(scene: Scene, rng: random.Random) -> list[str]:
    """No file grows beyond a size for a while, for the rank that writes: as on a full disk."""
    training = scene.training
    pid, line = training.pids()[0], len(training.log)
    size = rng.choice([0, 0, rng.randrange(20_000), rng.randrange(600_000)])
    try:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
        time.sleep(rng.uniform(0.3, 2.5))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
    except ProcessLookupError:
        return []
    return ["no space"] if scene.is_logged(line, "cannot be written") else []


def fill_and_kill(scene: Scene, rng: random.Random) -> list[str]:
    """Killed once a checkpoint can be written again: is what else had to wait written, too?"""
    training, line = scene.training, len(scene.training.log)
    hits = fill(scene, rng)
    if not hits:
        return []
    written = "the checkpoint is written now"
    if not training.until(lambda: training.logged(line, written)):
        return hits
    if not scene.stop(signal.SIGKILL):
        return hits
    scene.resume()
    return [*hits, scene.killed]


def read_only(scene: Scene, rng: random.Random) -> list[str]:
    """A plain file in the place of checkpoints/: root would write to a folder that is read-only."""
    line, folder = len(scene.training.log), scene.run / "checkpoints"
    if not folder.exists():
        return []
    other = scene.run.with_name("instead-of-checkpoints")
    other.touch()
    _exchange(folder, other)
    try:
        time.sleep(rng.uniform(0.3, 2))
    finally:
        for half in other.glob(".*.tmp*"):  # was being written when its folder went
            half.unlink(missing_ok=True)
        _exchange(folder, other)
        other.unlink()
    return ["no folder"] if scene.is_logged(line, "cannot be written") else []


def _exchange(one: Path, other: Path) -> None:
    """At once: the training makes a folder that is missing."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = os.fsencode(one), os.fsencode(other)
    if _LIBC.renameat2(here, names[0], here, names[1], exchange):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(one))


_LIBC = ctypes.CDLL(None, use_errno=True)


def _has_no_workers(setting: Setting) -> bool:
    return not setting.flags.get("workers")


FAULTS: dict[str, Fault] = {
    "kill": Fault(kill),
    "kill-saving": Fault(kill_saving),
    "kill-twice": Fault(kill_twice),
    "terminate": Fault(terminate),
    "interrupt": Fault(interrupt),
    "fill": Fault(fill, _has_no_workers),
    "fill-kill": Fault(fill_and_kill, _has_no_workers),
    "read-only": Fault(read_only),
    **FILE_FAULTS,
    **AROUND,
}
