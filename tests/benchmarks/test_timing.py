"""Rounds, turns, and rows of results, by hand-made calls and a fake clock. Nothing is timed."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from parts import results, timing
from parts.timing import Memory, Stream

from fastaug.diagnostics import timing as device_timing
from fastaug.errors import ConfigError

CPU = torch.device("cpu")


# --- results ---


def test_a_summary_has_the_quantiles() -> None:
    row = results.summarize([4.0, 1.0, 3.0, 2.0, 5.0, 6.0], "ms")
    assert row == {"median": 3.5, "p20": 2.0, "p80": 5.0, "n": 6, "unit": "ms", "status": "ok"}
    assert results.summarize([1 / 3], "ms")["median"] == 0.333333
    assert results.summarize([2.0, 3.9], "bytes")["p80"] == 4  # 3.52


def test_rows_are_appended(tmp_path: Path) -> None:
    path, columns = tmp_path / "new" / "x.csv", ("date", "a", "b")
    results.ResultFile(path, columns).append([{"date": 1, "a": 'x, "y"', "b": 0.5}])
    first = path.read_text()
    path.write_text(first.rstrip("\n"))  # as some editors leave it
    results.ResultFile(path, columns).append([{"date": 2, "b": 7}, {"date": 2, "a": "z"}])
    assert path.read_text().startswith(first)
    rows = results.read(path, columns)
    assert rows == [
        {"date": "1", "a": 'x, "y"', "b": "0.5"},
        {"date": "2", "a": "", "b": "7"},
        {"date": "2", "a": "z", "b": ""},
    ]
    assert results.select_run(rows) == rows[1:]
    assert results.select_run(rows, "1") == rows[:1]
    assert results.select_run([]) == []


def test_a_file_with_other_columns_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,c\n1,2\n")
    for refused in (results.ResultFile, results.read):
        with pytest.raises(ConfigError, match=r"x\.csv.*\(b, c\)"):
            refused(path, ("a", "b"))
    assert path.read_text() == "a,c\n1,2\n"


# --- rounds ---


def test_ratios_are_of_the_same_round() -> None:
    drift = [1.0, 7.0, 2.0, 30.0]
    assert timing.median_ratio([3 * d for d in drift], drift) == 3


def test_a_sample_has_enough_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_timing, "seconds_of", lambda call, loops, device: loops * 3e-5)
    loops = timing.calibrate(lambda: None, CPU, least=0.005)
    assert 0.005 <= loops * 3e-5 < 0.011


@pytest.fixture
def one_call_per_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "calibrate", lambda call, device: call() or 1)


@pytest.mark.usefixtures("one_call_per_sample")
def test_contenders_take_turns() -> None:
    made: list[str] = []
    samples: dict[str, list[float]] = {}
    starts: list[int] = []
    assert not timing.time_calls(
        {name: lambda name=name: made.append(name) for name in "abc"},
        samples,
        rounds=3,
        device=CPU,
        on_round=lambda done: starts.append(len(made)),
    )
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3, "c": 3}
    rounds = [made[start:end] for start, end in itertools.pairwise([*starts, len(made)])]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1  # in a new order


@pytest.mark.usefixtures("one_call_per_sample")
def test_one_that_fails_leaves_the_others() -> None:
    made = itertools.count()

    def fails_later() -> None:
        if next(made) == 4:
            raise RuntimeError("no more\nand a second line")

    def fails_at_once() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    samples: dict[str, list[float]] = {}
    calls = {"good": lambda: None, "later": fails_later, "at once": fails_at_once}
    failed = timing.time_calls(calls, samples, rounds=6, device=CPU)
    assert {name: timing.status_of(error) for name, error in failed.items()} == {
        "at once": "out of memory: CUDA out of memory",
        "later": "failed: no more",
    }
    assert timing.status_of(timing.UnfitError("needs ffcv")) == "needs ffcv"
    assert {name: len(values) for name, values in samples.items()} == {"good": 6}


@pytest.mark.usefixtures("one_call_per_sample")
def test_only_whole_rounds_are_kept_after_an_interrupt() -> None:
    samples: dict[str, list[float]] = {}
    started: list[int] = []

    def interrupted() -> None:
        if len(started) == 3:
            raise KeyboardInterrupt

    calls = {"other": lambda: None, "interrupted": interrupted}
    with pytest.raises(KeyboardInterrupt):
        timing.time_calls(calls, samples, rounds=9, device=CPU, on_round=started.append)
    assert {name: len(values) for name, values in samples.items()} == {"other": 2, "interrupted": 2}


def test_peak_memory_is_what_is_alive_at_once() -> None:
    def one_by_one() -> None:
        for _ in range(3):
            torch.empty(250_000)

    def together() -> None:
        first = torch.empty(250_000)
        first + torch.empty(250_000)

    assert timing.peak_memory(one_by_one, CPU) == 1_000_000
    assert timing.peak_memory(together, CPU) == 3_000_000


# --- turns ---


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing, "cpu_seconds", lambda: 2 * self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def stream(clock: Clock, *, ahead: int, each: float, work: float = 0.0, closed: list) -> Stream:
    """The first batch takes 0.9 s, prefetched ones nothing, all others `each`."""

    def batches() -> Generator[int]:
        try:
            for number in range(10**6):
                clock.now += 0.9 if number == 0 else 0.0 if number <= ahead else each
                yield number
        finally:
            closed.append(True)

    def worked(batch: int) -> None:
        clock.now += work

    return Stream(batches, ahead, worked)


def test_prefetched_batches_are_not_counted_as_speed(clock: Clock) -> None:
    closed: list = []
    found = timing.turn(stream(clock, ahead=3, each=0.02, work=0.005, closed=closed), 10, CPU, 0.7)
    assert found.seconds == pytest.approx(0.025)
    assert found.wait == pytest.approx(0.02)
    assert found.cpu == pytest.approx(0.05)
    assert closed == [True]


def test_long_steps_settle_after_one(clock: Clock) -> None:
    long = stream(clock, ahead=6, each=0.0, work=5.0, closed=[])
    before = clock.now
    assert timing.turn(long, 2, CPU, 0.7).seconds == pytest.approx(5.0)
    assert clock.now - before == pytest.approx(0.9 + 3 * 5.0)  # one to settle, two counted


def test_the_first_call_is_not_counted(clock: Clock) -> None:
    costs = iter([7.0, 1.0, 2.0, 3.0])

    def call() -> None:
        clock.now += next(costs)

    assert timing.repeat(call, 3, CPU) == pytest.approx((2.0, 4.0, 0.0))


def test_a_pass_is_closed_when_its_work_fails(clock: Clock) -> None:
    closed: list = []

    def fails(batch: int) -> None:
        raise RuntimeError("no")

    failing = stream(clock, ahead=0, each=0.1, closed=closed)._replace(work=fails)
    with pytest.raises(RuntimeError, match="no"):
        timing.turn(failing, 1, CPU, 0.7)
    assert closed == [True]


@pytest.mark.parametrize(("each", "count"), [(0.01, 50), (0.3, 4), (0.7, 2)])
def test_how_many_batches_a_turn_has(clock: Clock, each: float, count: int) -> None:
    found, memory = timing.first_turn(stream(clock, ahead=1, each=each, closed=[]), CPU, 0.5)
    assert (found, memory.device) == (count, 0)


def test_batches_that_come_in_bursts_are_counted_over_many(clock: Clock) -> None:
    """One in sixteen takes 3.2 ms, the others nothing: 0.2 ms each."""

    def batches() -> Generator[int]:
        for number in range(10**6):
            clock.now += 0.0032 if number % 16 == 0 else 0.0
            yield number

    count, _ = timing.first_turn(Stream(batches, 2), CPU, seconds=0.7)
    assert count == pytest.approx(0.7 / 0.0002, rel=0.05)


def test_memory_is_what_the_batches_add(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter([1000, 5000, 4000])
    monkeypatch.setattr(timing, "host_memory", lambda: next(held))
    found = timing.first_turn(stream(clock, ahead=0, each=1.0, closed=[]), CPU, seconds=0.5)
    assert found[1] == Memory(4000, 0)


def test_what_a_worker_uses_counts() -> None:
    """A child that burns CPU time and holds 256 MiB, as a loader's worker."""
    import multiprocessing

    def work(ready: object) -> None:
        held = bytearray(b"x") * (256 << 20)
        while timing.time.process_time() < 0.3:
            pass
        ready.wait()
        ready.wait()
        del held

    ready = multiprocessing.get_context("fork").Barrier(2)
    cpu, memory = timing.cpu_seconds(), timing.host_memory()
    child = multiprocessing.get_context("fork").Process(target=work, args=(ready,))
    child.start()
    ready.wait()
    try:
        assert timing.cpu_seconds() - cpu > 0.25
        # What this process shares with others, such as libraries, changes with them.
        assert 200 < (timing.host_memory() - memory) / 2**20 < 320
    finally:
        ready.wait()
        child.join()
