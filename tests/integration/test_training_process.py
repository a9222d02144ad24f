"""A sweep's training process; a shell script stands in for Python with fastaug.train."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fastaug.experiments import training_process
from fastaug.experiments.training_process import (
    RunDivergedError,
    RunFailedError,
    RunRejectedError,
    run_training,
)
from fastaug.recipes import get_recipe
from fastaug.runtime.signals import TrainingInterruptedError

SUMMARY = """echo '{"finished": true, "slot": "'$SLOT'"}' > summary.json"""


class Process:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.program = folder / "python"
        self.steps: list[int] = []

    def run(self, script: str, signum: Callable[[], int] = lambda: 0, ranks: int = 1) -> dict:
        self.program.write_text(f"#!/bin/sh\ncd {self.folder}\n{script}\n")
        self.program.chmod(0o755)
        return run_training(
            get_recipe("shapes"),
            self.folder,
            ranks=ranks,
            environment={"SLOT": "3"},
            on_step=self.steps.append,
            signum=signum,
        )

    def output(self) -> str:
        return (self.folder / "output.txt").read_text()


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    made = Process(tmp_path)
    monkeypatch.setattr(sys, "executable", str(made.program))
    monkeypatch.setattr(training_process, "_POLL_SECONDS", 0.02)
    return made


def test_the_summary_is_returned_and_steps_are_reported(process: Process) -> None:
    metrics = """echo '{"kind": "train", "step": 5}' > metrics.jsonl; sleep 0.3"""
    assert process.run(f"{metrics}\n{SUMMARY}")["slot"] == "3"
    assert process.steps[-1] == 5
    assert process.output().startswith("$ -m fastaug.train --recipe shapes --resume auto --out")


def test_several_ranks_are_started_by_torchrun(process: Process) -> None:
    process.run(SUMMARY, ranks=2)
    assert "torch.distributed.run --standalone --nproc-per-node 2 -m fastaug" in process.output()


@pytest.mark.parametrize(
    ("script", "kind", "named"),
    [
        ("echo 'error: no kernel nativ' >&2; exit 2", RunRejectedError, "run: no kernel nativ"),
        ("echo oh; echo no; exit 1", RunFailedError, r"1 \(no\)"),
        ("exit 0", RunFailedError, "run: "),  # without a summary.json
        ("touch bad-batch.pt; exit 1", RunDivergedError, "learning rate"),
    ],
)
def test_an_end_without_a_result_is_an_error_of_one_line(
    process: Process, script: str, kind: type[Exception], named: str
) -> None:
    with pytest.raises(kind, match=named) as error:
        process.run(script)
    assert "\n" not in str(error.value)


def test_a_signal_is_passed_on_and_waited_for(process: Process) -> None:
    script = "trap 'sleep 0.2; echo saved; exit 0' TERM\ntouch ready\nwhile :; do sleep 0.05; done"
    ready = process.folder / "ready"
    with pytest.raises(TrainingInterruptedError) as error:
        process.run(script, signum=lambda: signal.SIGINT if ready.exists() else 0)
    assert error.value.exit_code == 130
    assert process.output().endswith("saved\n")
