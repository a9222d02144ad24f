"""The training that chaos.py disturbs: fastaug.train, with a journal of what each step is made of.

    torchrun ... tests/helpers/chaos_driver.py JOURNAL FLAGS OF THE TRAINING

The journal is a FIFO, as the training's output is: a limit on the size of files, which stands for a
full disk, affects neither. A line is one write, so that lines of several processes do not mix.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastaug import cli, train
from fastaug.engine.learner import Learner

READERS = "fastaug-reader"
"""Name of the DALI loader's threads that read files."""


def drive(journal: str, flags: Sequence[str]) -> int:
    """Train, and note (pid, rank, step, indices) of each part of a step before it is computed."""
    descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND)
    who = {"pid": os.getpid(), "rank": int(os.environ.get("RANK", 0))}

    def note(**what: Any) -> None:
        os.write(descriptor, json.dumps(who | what).encode() + b"\n")

    start_step, backward = Learner.start_step, Learner.backward

    def noted_start_step(learner: Learner, step: int) -> None:
        learner.noted_step = step  # type: ignore[attr-defined]
        start_step(learner, step)

    def noted_backward(learner: Learner, batch: Any, *args: Any, **named: Any) -> Any:
        step = learner.noted_step  # type: ignore[attr-defined]
        note(step=step, indices=batch.indices.tolist(), clock=time.time())
        return backward(learner, batch, *args, **named)

    Learner.start_step = noted_start_step  # type: ignore[method-assign]
    Learner.backward = noted_backward  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR2, lambda *_: note(thread_killed=_kill_reader()))
    note(started=True)
    return cli.run(train.main, flags)


def _kill_reader() -> str:
    """End a thread of the loader by an exception that nothing catches; returns its name, "" if
    there is none. From outside, a thread cannot be ended without its process."""
    readers = [t for t in threading.enumerate() if t.name.startswith(READERS) and t.ident]
    if not readers:
        return ""
    ident = ctypes.c_ulong(readers[0].ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
    return readers[0].name


def process(
    journal: str, log: str, flags: Sequence[str], environment: Mapping[str, str] | None = None
) -> None:
    """The same, in a process that was forked with all modules loaded: an import takes seconds."""
    detach(log, environment or {})
    sys.exit(drive(journal, flags))


def detach(log: str, environment: Mapping[str, str]) -> None:
    """Make a forked process look like one that was started by a command, with its own output."""
    multiprocessing.set_start_method("fork", force=True)
    os.setsid()  # Ctrl-C in the terminal is chaos.py's
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


if __name__ == "__main__":
    sys.exit(drive(sys.argv[1], sys.argv[2:]))
