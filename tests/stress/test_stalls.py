"""A loader or a rank that hangs ends the run, which says where, and loses no step."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import start_ranks, train_until_signalled

from fastaug.config import TrainConfig
from fastaug.engine.loaders import build_loader
from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runtime.watchdog import EXIT_CODE

Tiny = Callable[..., TrainConfig]
PATIENCE = "5"
"""Seconds. Beside other work on two cores, a sound run was silent for up to 0.8."""
# As python -m fastaug.train, whose training replaces an image by a pipe that nobody feeds.
WITH_A_PIPE = """
import os, sys
from fastaug import cli, train
from fastaug.engine import learner

update, steps = learner.Learner.update, []

def after_the_second_step(self, rate):
    steps.append(1)
    if len(steps) == 2:
        victim = os.environ["VICTIM"]
        os.unlink(victim)
        os.mkfifo(victim)
    return update(self, rate)

learner.Learner.update = after_the_second_step
sys.exit(cli.run(train.main))
"""


@pytest.mark.parametrize("loader", ["torch", "dali"])
def test_a_loader_that_hangs(tiny: Tiny, folder: Path, tmp_path: Path, loader: str) -> None:
    data = Path(shutil.copytree(folder, tmp_path / "data"))
    config = tiny(data=str(data), loader=loader)
    keys = list(build_loader(config).batches())  # 4 of the epoch, some read ahead
    victim = sorted(p for p in (data / "train").rglob("*.jpg"))[keys[-1].indices[0]]
    flags = ["--data", str(data), "--loader", loader, "--workers", "1", "--prefetch", "1"]
    flags += ["--size", "16", "--views", "2", "--batch-size", "16", "--stall-timeout", PATIENCE]
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_PIPE, *flags, "--out", config.run.out],
        env={**os.environ, "VICTIM": str(victim), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == EXIT_CODE, done.stderr
    assert f"the training has made no progress for {PATIENCE} s (--stall-timeout)" in done.stderr
    where = (Path(config.run.out) / "stall.txt").read_text()
    assert where.splitlines()[0] in done.stderr
    assert "in _train_rest_of_epoch" in where  # the training's thread
    # The one that reads: a thread here, or a worker, which is asked for its stack by a signal.
    assert re.search(r'storage\.py", line \d+ in read', where if loader == "dali" else done.stderr)
    assert load_checkpoint(Path(config.run.out) / "last.pt")["step"] >= 2


def test_a_rank_that_hangs(tiny: Tiny) -> None:
    config = tiny(stall_timeout=float(PATIENCE), epochs=20)
    (first, second), _ = start_ranks(2, train_until_signalled, config, signal.SIGSTOP)
    first.join(120)
    assert first.exitcode == EXIT_CODE
    os.kill(second.pid, signal.SIGKILL)
    second.join()
    said = (Path(config.run.out) / "stall.txt").read_text()
    assert f"rank 0 has made no progress for {PATIENCE} s" in said
    assert "while training, or waiting for another rank;" in said
    assert "in backward" in said  # it waits for the other's gradients
    assert load_checkpoint(Path(config.run.out) / "last.pt")["step"] == 2
