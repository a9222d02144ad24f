"""Under torchrun: a killed rank restarts the group, which resumes by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from recorded import RECORDED, environment, flags, records, trained_on, wait_for

from fastaug.config import TrainConfig
from fastaug.runs.checkpoint import load_checkpoint

Tiny = Callable[..., TrainConfig]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.fixture
def whole(tiny: Tiny, tmp_path: Path) -> tuple[TrainConfig, Path, Path]:
    """The config of a run, where it ends undisturbed on two ranks, and what it was trained on."""
    config = tiny(epochs=3, kernel="reference", out=str(tmp_path / "whole"))
    script = tmp_path / "recorded.py"
    script.write_text(RECORDED)
    record = tmp_path / "whole.jsonl"
    command = [*TORCHRUN, "--nproc-per-node", "2", str(script), *flags(config)]
    done = subprocess.run(command, env=environment(record), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return config, Path(config.run.out), record


def test_a_killed_rank_restarts_the_group(whole: tuple, tmp_path: Path) -> None:
    config, undisturbed, expected = whole
    out, record, every = tmp_path / "run", tmp_path / "run.jsonl", 2
    command = [
        *TORCHRUN,
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        str(tmp_path / "recorded.py"),
    ]
    command += flags(config, out=out, checkpoint_every=every)
    process = subprocess.Popen(
        command, env=environment(record), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    os.kill(wait_for(record, 6, process), signal.SIGKILL)  # in the middle of the second epoch
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "torchrun: resuming from" in errors
    resumed = int(said.partition("resumed at step ")[2].split()[0])
    ended = max(step for pid, _, _, step, _ in records(record) if pid == records(record)[0][0])
    assert 4 <= ended - every <= resumed <= ended + 1  # what no checkpoint had, was trained again

    ours, theirs = (load_checkpoint(folder / "last.pt") for folder in (out, undisturbed))
    for part in ("model", "optimizer"):
        torch.testing.assert_close(ours[part], theirs[part], rtol=0, atol=0)
    # By index: every step had the images that it should have had, in its last attempt; and only
    # steps after the checkpoint had more than one.
    assert trained_on(record, 12) == trained_on(expected, 12)
    attempts = Counter(step for _, rank, _, step, _ in records(record) if rank == 0)
    assert all(count == 1 for step, count in attempts.items() if not resumed <= step <= ended)
    assert max(attempts.values()) <= 2
    seen = Counter(image for step in range(4) for image in trained_on(record, 12)[step])
    assert set(seen.values()) == {1}  # of an epoch


def test_another_number_of_ranks_goes_on(whole: tuple, tmp_path: Path) -> None:
    config, undisturbed, expected = whole
    out, record = tmp_path / "run", tmp_path / "run.jsonl"
    script = str(tmp_path / "recorded.py")
    start = [*TORCHRUN, "--nproc-per-node", "2", script]
    process = subprocess.Popen(
        [*start, *flags(config, out=out, checkpoint_every=2)],
        env=environment(record),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    os.kill(wait_for(record, 5, process), signal.SIGKILL)
    process.communicate(timeout=300)
    assert process.returncode != 0  # no restarts were asked for
    more = [*TORCHRUN, "--nproc-per-node", "4", script, "--resume", "auto", "--out", str(out)]
    subprocess.run(more, env=environment(record), check=True, capture_output=True)
    assert trained_on(record, 12) == trained_on(expected, 12)
    ours, theirs = (load_checkpoint(folder / "last.pt") for folder in (out, undisturbed))
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=1e-4, atol=2e-5)


def test_the_command_of_the_readme(tmp_path: Path) -> None:
    command = [*TORCHRUN, "--nproc-per-node", "2", "-m", "fastaug.train", "--dali"]
    assert (
        "torchrun --nproc-per-node 2 -m fastaug.train --dali"
        in Path("docs/guide/many-gpus.md").read_text()
    )
    done = subprocess.run(
        [*command, "--max-steps", "4", "--tta", "0", "--out", str(tmp_path / "run")],
        env=environment(tmp_path / "none"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "on 2 ranks, each on cpu" in done.stdout
    assert json.loads((tmp_path / "run/summary.json").read_text())["step"] == 4
