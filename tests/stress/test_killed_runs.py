"""Signals to a run that was started in a shell: what was trained is kept, and repeated exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from training import assert_same_weights, metrics, run, tiny_config

from fastaug import cli, train
from fastaug.config import TrainConfig
from fastaug.experiments.training_process import train_flags
from fastaug.runs.checkpoint import load_checkpoint

Whole = tuple[TrainConfig, Path]
STEPS = 120


@pytest.fixture(scope="module")
def wholes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    """Undisturbed runs, by loader."""
    found: dict[str, Whole] = {}
    for loader in ("torch", "dali"):
        out = tmp_path_factory.mktemp("whole") / loader
        changes = {"epochs": STEPS // 4, "eval_every": STEPS // 4, "augment": "randaugment"}
        config = tiny_config(folder, out, loader=loader, workers=1, **changes)
        found[loader] = (config, run(config))
    return found


def start_in_a_shell(config: TrainConfig, *more: str) -> subprocess.Popen:
    """The run as a command; returns after its first steps."""
    flags = train_flags(config, Path(config.run.out))
    process = subprocess.Popen(
        [sys.executable, "-m", "fastaug.train", *flags, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(Path(config.run.out) / "metrics.jsonl", process)
    return process


def wait_for(file: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not (file.exists() and file.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def resume(config: TrainConfig) -> None:
    assert 0 < load_checkpoint(Path(config.run.out) / "last.pt")["step"] < STEPS
    assert cli.run(train.main, ["--resume", config.run.out]) == 0


@pytest.mark.parametrize(
    ("loader", "signum", "send"),
    [
        ("torch", signal.SIGINT, os.killpg),
        ("torch", signal.SIGTERM, os.killpg),
        ("torch", signal.SIGTERM, os.kill),
        ("dali", signal.SIGINT, os.killpg),
        ("dali", signal.SIGTERM, os.kill),
    ],
    ids=["ctrl-c", "terminate-group", "terminate", "dali-ctrl-c", "dali-terminate"],
)
def test_a_signal_saves_and_ends(
    wholes: dict[str, Whole],
    loader: str,
    signum: int,
    send: Callable[[int, int], None],
    tmp_path: Path,
) -> None:
    """Ctrl-C and a cluster's SIGTERM go to the whole process group, workers included."""
    config, whole = wholes[loader]
    config = config.replace(out=str(tmp_path / "run"))
    process = start_in_a_shell(config)
    send(process.pid, signum)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signum, err
    assert "Traceback" not in out + err
    assert f"--resume {config.run.out}" in out.replace("\n", "")
    resume(config)
    assert_same_weights(Path(config.run.out), whole)


def test_a_killed_run_ends_with_the_same_weights(wholes: dict[str, Whole], tmp_path: Path) -> None:
    """After SIGKILL within an epoch the last checkpoint is complete, and the rest is repeated."""
    config, whole = wholes["dali"]
    config = config.replace(out=str(tmp_path / "run"))
    process = start_in_a_shell(config, "--checkpoint-every", "3")
    wait_for(Path(config.run.out) / "last.pt", process)
    process.kill()
    process.communicate()
    resume(config)
    assert_same_weights(Path(config.run.out), whole)
    assert metrics(Path(config.run.out)) == metrics(whole)
