"""The training that chaos.py disturbs: fastaug.train, with a journal of what each step is made of.

    torchrun ... tests/helpers/chaos_driver.py JOURNAL FLAGS OF THE TRAINING

The journal is a FIFO, as the training's output is: a limit on the size of files, which stands for a
full disk, leaves both alone. A line is written at once or not at all, whoever else writes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from typing import Any

from fastaug import cli, train
from fastaug.engine.learner import Learner


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
        note(step=learner.noted_step, indices=batch.indices.tolist())  # type: ignore[attr-defined]
        return backward(learner, batch, *args, **named)

    Learner.start_step = noted_start_step  # type: ignore[method-assign]
    Learner.backward = noted_backward  # type: ignore[method-assign]
    note(started=True)
    return cli.run(train.main, flags)


def process(journal: str, log: str, flags: Sequence[str]) -> None:
    """The same, in a process that was forked with all modules loaded: an import takes seconds."""
    multiprocessing.set_start_method("fork", force=True)  # as in a process of its own
    os.setsid()  # Ctrl-C in the terminal is chaos.py's
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.exit(drive(journal, flags))


if __name__ == "__main__":
    sys.exit(drive(sys.argv[1], sys.argv[2:]))
