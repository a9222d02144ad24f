"""A turn of a loader in benchmarks/throughput.py, by a false clock."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import turns
from turns import Memory, Stream

CPU = torch.device("cpu")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(turns.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(turns, "cpu_seconds", lambda: 2 * self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def stream(clock: Clock, *, ahead: int, each: float, work: float = 0.0, closed: list) -> Stream:
    """Its first batch takes a second; those ahead are free; then each takes its time."""

    def batches() -> Iterator[int]:
        try:
            for number in range(10**6):
                clock.now += 0.9 if number == 0 else 0.0 if number <= ahead else each
                yield number
        finally:
            closed.append(True)

    def worked(batch: int) -> None:
        clock.now += work

    return Stream(batches, ahead, worked)


def test_what_is_ahead_is_not_counted_as_speed(clock: Clock) -> None:
    closed: list = []
    found = turns.turn(stream(clock, ahead=3, each=0.02, work=0.005, closed=closed), 10, CPU, 0.7)
    assert found.seconds == pytest.approx(0.025)
    assert found.wait == pytest.approx(0.02)
    assert found.cpu == pytest.approx(0.05)
    assert closed == [True]


def test_long_steps_settle_after_one(clock: Clock) -> None:
    closed: list = []
    long = stream(clock, ahead=6, each=0.0, work=5.0, closed=closed)
    before = clock.now
    assert turns.turn(long, 2, CPU, 0.7).seconds == pytest.approx(5.0)
    assert clock.now - before == pytest.approx(0.9 + 3 * 5.0)  # one to settle, two counted


def test_the_first_call_is_not_counted(clock: Clock) -> None:
    costs = iter([7.0, 1.0, 2.0, 3.0])

    def call() -> None:
        clock.now += next(costs)

    assert turns.repeat(call, 3, CPU).seconds == pytest.approx(2.0)


def test_a_pass_is_closed_when_its_work_fails(clock: Clock) -> None:
    closed: list = []

    def fails(batch: int) -> None:
        raise RuntimeError("no")

    failing = stream(clock, ahead=0, each=0.1, closed=closed)._replace(work=fails)
    with pytest.raises(RuntimeError, match="no"):
        turns.turn(failing, 1, CPU, 0.7)
    assert closed == [True]


@pytest.mark.parametrize(("each", "count"), [(0.01, 50), (0.3, 4), (0.7, 2)])
def test_how_many_batches_a_turn_has(clock: Clock, each: float, count: int) -> None:
    found, memory = turns.first_turn(stream(clock, ahead=1, each=each, closed=[]), CPU, seconds=0.5)
    assert found == count
    assert memory.device == 0


def test_batches_that_come_in_bursts_are_counted_over_many(clock: Clock) -> None:
    """One in sixteen takes 3.2 ms, the others nothing: 0.2 ms each."""

    def batches() -> Iterator[int]:
        for number in range(10**6):
            clock.now += 0.0032 if number % 16 == 0 else 0.0
            yield number

    count, _ = turns.first_turn(Stream(batches, 2), CPU, seconds=0.7)
    assert count == pytest.approx(0.7 / 0.0002, rel=0.05)


def test_memory_is_what_the_batches_add(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter([1000, 5000, 4000])
    monkeypatch.setattr(turns, "host_memory", lambda: next(held))
    found = turns.first_turn(stream(clock, ahead=0, each=1.0, closed=[]), CPU, seconds=0.5)
    assert found[1] == Memory(4000, 0)
