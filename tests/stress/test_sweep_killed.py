"""A sweep of real trainings, whose worker is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from optuna.trial import TrialState
from tiny_sweep import TINY, trials_of, write_colors


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come in {seconds} s"
        time.sleep(0.1)


def start(flags: list[str], log: Path) -> subprocess.Popen:
    with open(log, "wb") as out:
        command = [sys.executable, "-m", "fastaug.sweep", *flags]
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_worker_loses_no_run(tmp_path: Path) -> None:
    """Two workers on one storage, one of them killed in the middle of a run."""
    out, data = tmp_path / "sweep", write_colors(tmp_path / "colors.npz")
    grid = "--views 2 --lr 0.01 0.02 --epochs 40 --kl-weight 0 --jobs 1 --heartbeat 1"
    saving = "--checkpoint-every 5 --eval-every 40"
    args = ["shapes", "--data", str(data), *TINY, "--out", str(out), *f"{grid} {saving}".split()]
    first = start(args, tmp_path / "first.txt")
    wait_for(lambda: any(out.glob("runs/*/checkpoints/*.pt")), 120, "a checkpoint")
    (training,) = children_of(first.pid)
    (begun,) = {file.parent.parent.name for file in out.glob("runs/*/checkpoints/*.pt")}
    second = start(args, tmp_path / "second.txt")
    first.send_signal(signal.SIGKILL)
    first.wait()
    # Its training does not go on without it: it saves and ends.
    wait_for(lambda: not Path(f"/proc/{training}").exists(), 30, "the end of its training")
    assert second.wait(timeout=300) == 0, (tmp_path / "second.txt").read_text()
    assert len(list(out.glob("runs/*/summary.json"))) == 2
    trials = trials_of(out / "sweep.db")
    assert Counter(trial.state for trial in trials)[TrialState.COMPLETE] == 2
    (lost,) = [trial for trial in trials if trial.state == TrialState.FAIL]
    assert lost.params["run"] == begun
    # The other worker continued from its checkpoint.
    output = (out / "runs" / begun / "output.txt").read_text()
    assert output.count("$ -m fastaug.train") == 2
    assert "resumed at step" in output
    assert json.loads((out / "selection.json").read_text())["failed"] == []
