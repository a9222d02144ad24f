"""What a run prints where there is no terminal."""

from __future__ import annotations

import re

import pytest

from fastaug.runs import console
from fastaug.runs.console import RunConsole

VALUES = {"loss": 0.9, "nll": 0.7, "kl": 0.2}
TIMING = {"images_per_s": 400.0, "views_per_s": 1600.0, "wait_for_data": 0.08}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def train(run: RunConsole, clock: list[float], steps: int, seconds: float) -> None:
    for _ in range(steps):
        clock[0] += seconds
        run.advance()


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "FASTAUG_NONE"])
def test_a_progress_line_every_30_seconds(
    clock: list[float],
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    """Also where colors are wanted in a file, as in notebooks and CI services."""
    monkeypatch.setenv(variable, "1")
    with RunConsole(1_000, 400, progress_every=30) as run:
        run.status(VALUES, TIMING)
        train(run, clock, steps=100, seconds=1)
    lines = capsys.readouterr().out.splitlines()
    steps = [re.match(r"step (\d+)/1,000 ", line)[1] for line in lines]
    assert steps == ["430", "460", "490"]
    assert "eta 0:09:30" in lines[0]  # 570 steps of a second
    for part in ("loss 0.900", "kl 0.200", "1,600 views/s", "8% waiting for data"):
        assert part in lines[0]


def test_lines_before_the_first_metrics_and_in_an_evaluation(
    clock: list[float], capsys: pytest.CaptureFixture
) -> None:
    with RunConsole(10, 0, progress_every=30) as run:
        train(run, clock, steps=1, seconds=40)
        for batch in range(1, 5):
            clock[0] += 20
            run.evaluating(batch, 4)
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "step 1/10  eta 0:06:00"
    assert others == ["evaluating: batch 2/4", "evaluating: batch 4/4"]


@pytest.mark.parametrize("settings", [{"progress_every": 0}, {"progress_every": 9, "quiet": True}])
def test_no_lines(clock: list[float], capsys: pytest.CaptureFixture, settings: dict) -> None:
    with RunConsole(10, 0, **settings) as run:
        train(run, clock, steps=9, seconds=40)
    assert capsys.readouterr().out == ""
