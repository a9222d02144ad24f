"""--profile: what is in the trace and when, and that the training does not notice."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fastaug import train
from fastaug.config import TrainConfig
from fastaug.engine import learner, profiling
from fastaug.engine.profiling import Profiler, steps_to_record
from fastaug.engine.trainer import Trainer
from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runtime import trace as tracing
from fastaug.runtime.signals import TrainingInterruptedError

Tiny = Callable[..., TrainConfig]
PART = ["wait for data", "forward", "objective", "backward"]
LOADING = ["read", "decode", "views"]


@pytest.fixture
def short(tiny: Tiny) -> Tiny:
    """12 of the 18 steps of an epoch."""
    return lambda **changes: tiny(**{"batch_size": 4, "max_steps": 12, "tta": 0} | changes)


def events(folder: str, *names: str) -> list[dict]:
    """The ranges of these names in a trace, in the order of their starts."""
    found = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return sorted((e for e in found if e["name"] in names), key=lambda e: e["ts"])


def end(event: dict) -> float:
    return event["ts"] + event["dur"]


def within(inner: dict, outer: dict) -> bool:
    return outer["ts"] <= inner["ts"] and end(inner) <= end(outer)


def one_after_another(row: list[dict]) -> bool:
    return all(end(a) <= b["ts"] for a, b in pairwise(row))


def assert_same_weights_without(config: TrainConfig) -> None:
    plain = config.replace(profile=False, out=f"{config.run.out}-plain")
    Trainer(plain).fit()
    assert not Path(plain.run.out, "trace.json").exists()
    ours, theirs = (load_checkpoint(Path(c.run.out, "last.pt"))["model"] for c in (config, plain))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(
    "changes",
    [{}, {"workers": 1, "accumulate": 2, "ema": 0.9}, {"loader": "dali", "precision": "bf16"}],
    ids=["torch", "worker", "dali"],
)
def test_a_trace(short: Tiny, capsys: pytest.CaptureFixture, changes: dict) -> None:
    config = short(**changes, profile=True)
    Trainer(config).fit()
    check_line(capsys.readouterr().out, config.run.out)
    steps = events(config.run.out, *PART, "optimizer")
    assert [e["name"] for e in steps] == [*PART * config.optim.accumulate, "optimizer"] * 5
    assert one_after_another(steps)
    ema = events(config.run.out, "ema")
    assert len(ema) == (5 if config.optim.ema else 0)
    assert all(map(within, ema, events(config.run.out, "optimizer")))
    loading = events(config.run.out, *LOADING)
    if config.data.workers:
        check_worker_row(loading, steps)
    else:
        waits = events(config.run.out, "wait for data")
        # DALI's stages are started for one batch, and waited for of another.
        dali = [name for name in LOADING for _ in range(2)]
        each = dali if config.data.loader == "dali" else LOADING[1:]
        assert [e["name"] for e in loading] == each * len(waits)
        assert one_after_another(loading)
        assert all(within(e, waits[i // len(each)]) for i, e in enumerate(loading))
    assert_same_weights_without(config)


def check_line(shown: str, folder: str) -> None:
    (line,) = (line for line in shown.splitlines() if line.startswith("trace of"))
    assert line.startswith(f"trace of 5 steps: {folder}/trace.json (ui.perfetto.dev or chrome://")
    shares = [int(share) for share in re.findall(r"(\d+)%", line)]
    assert len(shares) == 6
    assert sum(shares) == pytest.approx(100, abs=3)  # each is rounded


def check_worker_row(row: list[dict], steps: list[dict]) -> None:
    (worker,) = {e["pid"] for e in row}
    assert worker != os.getpid()
    assert one_after_another(row)
    # Two of the ten batches may have been there before; it may be within one when this begins.
    names = [e["name"] for e in row]
    assert len(names) >= 16
    assert {*pairwise(names)} == {("decode", "views"), ("views", "decode")}
    around = {"ts": steps[0]["ts"] - 1e6, "dur": end(steps[-1]) - steps[0]["ts"] + 2e6}
    assert all(within(event, around) for event in row)


def test_rows_of_workers_are_in_the_trace_s_clock(tmp_path: Path) -> None:
    """The oracle: a span that was measured around a range of torch's is around it in the trace."""
    said: list[str] = []
    with Profiler(range(1), tmp_path / "trace.json", torch.device("cpu"), said.append) as profiled:
        profiled.reach(0)
        file = tracing.worker_trace_file()
        started = time.perf_counter_ns()
        with tracing.trace_range("forward"):
            time.sleep(0.1)
        lines = f"7\tviews\t{started}\t{time.perf_counter_ns()}\n7\tviews\t5\t6\n7\ttorn"
        Path(file).write_text(lines)
        profiled.reach(1)
    (forward,) = events(str(tmp_path), "forward")
    (views,) = events(str(tmp_path), "views")  # none of long ago
    slack = 300  # microseconds, for the reading of the clocks
    assert within(forward, {"ts": views["ts"] - slack, "dur": views["dur"] + 2 * slack})
    assert re.search(r"forward ([6-9]\d|100)%", said[0])  # the rest is the machine's
    assert not Path(file).exists()
    assert tracing.worker_trace_file() is None
    assert tracing.trace_range("forward") is tracing.trace_range("views")  # off


@pytest.mark.parametrize(
    ("run", "steps"),
    [  # (first, last, per_epoch)
        ((0, 3000, 250), range(5, 10)),
        ((0, 8, 250), range(4, 8)),
        ((0, 1, 250), range(1)),
        ((240, 3000, 250), range(245, 250)),
        ((241, 3000, 250), range(255, 260)),  # the next epoch has room
        ((0, 8, 4), range(2, 4)),
        ((3, 8, 4), range(6, 8)),
        ((9, 8, 4), range(8, 8)),
    ],
)
def test_recorded_steps_are_of_one_epoch(run: tuple[int, int, int], steps: range) -> None:
    assert steps_to_record(*run) == steps


@pytest.mark.parametrize(("stop", "recorded"), [(8, 3), (2, 0)])
def test_a_run_that_is_interrupted(
    short: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    stop: int,
    recorded: int,
) -> None:
    """It leaves what was recorded, and goes on with a trace of its own if asked for."""
    update = learner.Learner.update
    steps = iter(range(1, 100))

    def interrupt(self: learner.Learner, rate: float) -> torch.Tensor:
        if next(steps) == stop:
            os.kill(os.getpid(), signal.SIGINT)
        return update(self, rate)

    monkeypatch.setattr(learner.Learner, "update", interrupt)
    config = short(max_steps=0, epochs=1, profile=True)
    with pytest.raises(TrainingInterruptedError):
        Trainer(config).fit()
    if recorded:
        assert len(events(config.run.out, "optimizer")) == recorded
    else:
        assert not Path(config.run.out, "trace.json").exists()
        assert "ended before the steps to record; there is no trace" in capsys.readouterr().out
    assert not Trainer(*train.configure(["--resume", config.run.out])).config.run.profile
    Trainer(*train.configure(["--resume", config.run.out, "--profile"])).fit()
    assert len(events(config.run.out, "optimizer")) == 5
    assert_same_weights_without(config)


def test_a_full_disk_does_not_end_the_training(
    short: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def full(*_args: object, **_named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiling, "write_json", full)
    assert Trainer(short(profile=True)).fit()["step"] == 12
    assert "trace.json cannot be written ([Errno 28] No space left" in capsys.readouterr().out


def test_the_terminal_stays_clean(folder: Path, tmp_path: Path) -> None:
    flags = f"--data {folder} --out {tmp_path}/run --max-steps 2 --tta 0 --kernel reference"
    command = [sys.executable, "-m", "fastaug.train", "--profile", *flags.split()]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr == "loss kernel: reference\n"
    assert "trace of 1 step: " in result.stdout
