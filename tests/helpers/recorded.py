"""Runs under torchrun that write down what each rank trains on, and take their time for it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from fastaug.config import TrainConfig

# One rank, as `python -m fastaug.train`. A line for each part of a step: process, rank, ranks,
# step, images.
RECORDED = """
import json, os, sys, time
from fastaug import cli, train
from fastaug.engine import learner

backward, start_step = learner.Learner.backward, learner.Learner.start_step
record = os.open(os.environ["RECORD"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def started(self, step):
    self.recorded_step = step
    start_step(self, step)

def recorded(self, batch, *args, **named):
    line = [os.getpid(), self.group.rank, self.group.ranks, self.recorded_step]
    os.write(record, json.dumps([*line, batch.indices.tolist()]).encode() + b"\\n")
    # Else it has ended before it can be disturbed.
    time.sleep(float(os.environ.get("ONE_RANK_SECONDS", 0.1)) if self.group.ranks == 1 else 0.1)
    return backward(self, batch, *args, **named)

learner.Learner.backward, learner.Learner.start_step = recorded, started
sys.exit(cli.run(train.main))
"""


def flags(config: TrainConfig, **changes: object) -> list[str]:
    """The command line of what `tiny` makes."""
    names = ("data", "loader", "model", "size", "views", "batch_size", "epochs", "lr", "workers")
    settings = {name: config.get(name) for name in (*names, "tta", "log_every", "kernel")}
    settings |= {"out": config.run.out, **changes}
    return [word for n, v in settings.items() for word in (f"--{n.replace('_', '-')}", str(v))]


def records(path: Path) -> list[tuple[int, int, int, int, list[int]]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(json.loads(line)) for line in lines]


def environment(path: Path) -> dict[str, str]:
    return {**os.environ, "RECORD": str(path), "OMP_NUM_THREADS": "1"}


def trained_on(path: Path, last_step: int) -> dict[int, list[int]]:
    """step -> the images of the attempt that counts: the last one, over all of its ranks."""
    found: dict[int, dict[int, list[int]]] = {}
    for pid, _, _, step, images in records(path):
        found.setdefault(step, {})[pid] = images
    counting = {}
    for step in range(last_step):
        pids = list(found[step])[-_ranks_at(path, step) :]
        counting[step] = sorted(image for pid in pids for image in found[step][pid])
    return counting


def _ranks_at(path: Path, step: int) -> int:
    return [ranks for _, _, ranks, at, _ in records(path) if at == step][-1]


def wait_for(path: Path, step: int, process: subprocess.Popen) -> int:
    """The process of rank 1 once it is in that step."""
    for _ in range(1200):
        for pid, rank, _, at, _ in records(path):
            if rank == 1 and at >= step:
                return pid
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("the training does not get there")
