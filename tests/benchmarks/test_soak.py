"""benchmarks/soak.py: its verdict on series with known leaks, its sampler against a process that
the test steers, and real short runs."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import theilslopes

from fastaug import cli
from fastaug.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import records
import soak
import soak_sampler
import soak_verdict
from soak_sampler import COLUMNS, Sample
from soak_verdict import Verdict, judge

EPOCH = 6.0
"""Seconds, of the series below."""


def series(minutes: float = 60.0, every: float = 2.0, noise: float = 2.0) -> list[Sample]:
    """A training that leaks nothing: 100 MiB more in the evaluation that an epoch begins with,
    with 4 threads and 3 files of its own."""
    rng = np.random.default_rng(0)
    samples = []
    for seconds in np.arange(0.1, 60 * minutes, every):
        epoch = seconds / EPOCH
        evaluates = bool(epoch % 1 < 0.3)
        memory = 600.0 + 100.0 * evaluates + noise * rng.standard_normal()
        samples.append(
            Sample(
                seconds=float(seconds),
                epoch=float(epoch),
                step=int(250 * epoch),
                processes=1,
                rss=400.0 + memory,
                children_rss=0.0,
                pss=390.0 + memory,
                uss=380.0 + memory,
                own=memory,
                threads=36 + 4 * evaluates,
                fds=7 + 3 * evaluates,
                files=6 + 3 * evaluates,
                pipes=1,
                sockets=0,
                shm=0,
                other=0,
                dev_shm=0.0,
                zombies=0,
            )
        )
    return samples


def leaking(samples: list[Sample], mib_per_epoch: float) -> list[Sample]:
    """Anonymous memory, after every epoch."""
    return [
        replace(s, own=s.own + leak, rss=s.rss + leak)
        for s in samples
        for leak in [mib_per_epoch * int(s.epoch)]
    ]


def growing(verdict: Verdict | None) -> set[str]:
    assert verdict is not None
    assert verdict.grows == any(trend.grows for trend in verdict.trends)
    return {trend.name for trend in verdict.trends if trend.grows}


MEMORY = {f"{name}, {phase}" for name in ("resident", "own memory") for phase in ("min", "max")}


# --- the verdict ---


@pytest.mark.parametrize("minutes", [3, 15, 60])
@pytest.mark.parametrize("noise", [0.0, 2.0, 20.0])
def test_a_sawtooth_with_noise_is_flat(minutes: float, noise: float) -> None:
    assert growing(judge(series(minutes, noise=noise))) == set()


def test_the_slope_of_a_leak_beneath_the_sawtooth() -> None:
    """A twentieth of a MiB an epoch, where an epoch breathes 100: 600 epochs an hour, 30 MiB."""
    verdict = judge(leaking(series(), 0.05))
    assert growing(verdict) == MEMORY
    for trend in verdict.trends:
        if trend.slope:
            assert trend.slope.middle == pytest.approx(30.0, abs=2.0)
            assert trend.slope.low < 30.0 < trend.slope.high
            assert trend.last - trend.first == pytest.approx(30.0 * 0.8 * 2 / 3, abs=3.0)


def test_the_bounds() -> None:
    """1% of 1,000 MiB resident is 10 MiB an hour, 1% of 600 own is 6."""
    quiet = series(noise=0.01)
    assert growing(judge(leaking(quiet, 5.5 / 600))) == set()
    assert growing(judge(leaking(quiet, 9.0 / 600))) == {"own memory, min", "own memory, max"}
    assert growing(judge(leaking(quiet, 12.0 / 600))) == MEMORY
    small = [replace(s, own=s.own - 550, rss=s.rss - 950) for s in series(180, noise=0.01)]
    assert growing(judge(leaking(small, 4.0 / 600))) == set()  # 8%, but 4 MiB
    assert growing(judge(leaking(small, 6.0 / 600))) == MEMORY


def test_in_a_few_minutes_a_leak_must_be_steeper() -> None:
    """4 MiB in the time that is judged, about 2.3 of 3 minutes: 30 epochs in them make 105 MiB
    an hour the least."""
    quiet = series(3, noise=0.01)
    assert growing(judge(leaking(quiet, 80 / 600))) == set()
    assert growing(judge(leaking(quiet, 150 / 600))) == MEMORY


def test_the_least_and_the_most_of_an_epoch_are_apart() -> None:
    """An evaluation that takes ever more, and gives all of it back."""
    samples = [
        replace(s, own=s.own + more, rss=s.rss + more)
        for s in series()
        for more in [0.05 * int(s.epoch) * (s.fds > 7)]
    ]
    assert growing(judge(samples)) == {"resident, max", "own memory, max"}


@pytest.mark.parametrize(("leak", "grows"), [(0.0, False), (20.0, True)])
@pytest.mark.parametrize("seed", range(5))
def test_a_heap_that_is_handed_back_now_and_then(leak: float, grows: bool, seed: int) -> None:
    """As measured: each 3 minutes 200 MiB less for some seconds, and in between steps of any height
    at any time. What is beneath them counts."""
    rng = np.random.default_rng(seed)
    samples, height, left = [], 0.0, 0.0
    for one in series():
        left -= 2.0
        if left <= 0:
            left, height = rng.uniform(120, 200), -200.0
        elif height == -200.0 and rng.random() < 0.3:
            height = rng.uniform(-20, 0)
        elif height > -200.0 and rng.random() < 0.03:
            height = min(height + rng.uniform(5, 20), 25.0)
        memory = 660.0 + height + leak * one.seconds / 3600
        samples.append(replace(one, own=memory, rss=memory + 50))
    assert bool(growing(judge(samples))) == grows


def test_memory_that_falls_is_flat() -> None:
    assert growing(judge(leaking(series(), -0.1))) == set()


def test_growth_in_the_warm_up_alone_is_flat() -> None:
    samples = [
        replace(s, own=s.own - early, rss=s.rss - early, fds=s.fds - more, threads=s.threads - more)
        for s in series()
        for early, more in [(300 * max(0, 1 - s.seconds / 600), int(s.seconds < 600))]
    ]
    assert growing(judge(samples)) == set()
    later = [replace(s, seconds=s.seconds - 600) for s in samples if s.seconds > 600]
    assert growing(judge(later)) == set()


def test_growth_that_outlasts_the_warm_up_is_seen() -> None:
    samples = [
        replace(s, own=s.own + late, rss=s.rss + late)
        for s in series()
        for late in [60 * min(1, s.seconds / 2000)]
    ]
    verdict = judge(samples)
    assert growing(verdict) == MEMORY
    for trend in verdict.trends:
        if trend.slope:
            assert abs(trend.later) < 10 < 20 < trend.slope.middle  # it has settled since


@pytest.mark.parametrize("place", [0.35, 0.6, 0.8])
def test_one_large_step_is_seen(place: float) -> None:
    """Theil and Sen's slope of a step near an end is zero."""
    samples = [
        replace(s, own=s.own + late, rss=s.rss + late)
        for s in series()
        for late in [80 * (s.seconds > place * 3600)]
    ]
    assert growing(judge(samples)) == MEMORY


@pytest.mark.parametrize(
    ("name", "column"), [("descriptors", "fds"), ("threads", "threads"), ("zombies", "zombies")]
)
@pytest.mark.parametrize("epochs", [1, 100, 400])
def test_one_more_of_a_thing_every_so_many_epochs(name: str, column: str, epochs: int) -> None:
    samples = [
        replace(s, **{column: getattr(s, column) + int(s.epoch) // epochs}) for s in series()
    ]
    assert growing(judge(samples)) == {name}


def test_a_thing_that_comes_and_goes_is_no_growth() -> None:
    """However often the samples happen to meet it."""
    rng = np.random.default_rng(1)
    samples = [
        replace(s, fds=s.fds + 9 * int(rng.random() < (0.5 if s.seconds > 1800 else 0.02)))
        for s in series()
    ]
    assert growing(judge(samples)) == set()


def test_groups_are_whole_epochs_after_the_warm_up() -> None:
    groups = soak_verdict.group(series(10))
    for members in groups:
        assert len(members) >= soak_verdict.GROUP
        epochs = {int(s.epoch) for s in members}
        assert len(members) == sum(3 for _ in epochs)  # a sample each 2 s of 6
    assert groups[0][0].seconds >= 120
    assert groups[0][0].seconds < 120 + EPOCH + 2
    assert int(groups[-1][-1].epoch) < 99


def test_two_epochs_at_least_are_warm_up() -> None:
    """Of ten long epochs a fifth of the time is two, of four it is less than one."""
    for count in (4, 7, 10):
        long = [replace(s, epoch=s.epoch * count / 100) for s in series(10)]
        assert int(soak_verdict.group(long)[0][0].epoch) == 2


def test_too_short() -> None:
    assert judge([]) is None
    assert judge(series(0.5)) is None
    assert judge([replace(s, epoch=0.0) for s in series()]) is None  # no record was written
    assert "too short" in soak_verdict.describe(series(0.5), None)[-1]


def test_theil_sen_is_scipys() -> None:
    rng = np.random.default_rng(2)
    for count in (5, 12, 61):
        x, y = np.sort(rng.random(count)), rng.standard_normal(count)
        ours, theirs = soak_verdict.theil_sen(x, y), theilslopes(y, x, alpha=0.95)
        assert ours.middle == pytest.approx(theirs.slope)
        slopes = np.sort(
            [(y[j] - y[i]) / (x[j] - x[i]) for i in range(count) for j in range(i + 1, count)]
        )
        for mine, other in ((ours.low, theirs.low_slope), (ours.high, theirs.high_slope)):
            near = abs(int(np.searchsorted(slopes, mine)) - int(np.searchsorted(slopes, other)))
            assert near <= 1  # whole ranks, rounded


# --- the sampler ---

STEERED = """
import os, socket, subprocess, sys, threading, time
held = []
def files(n): held.extend(open("/dev/null") for _ in range(n))
def pipes(n): held.extend(os.pipe() for _ in range(n))
def sockets(n): held.extend(socket.socket() for _ in range(n))
def memfds(n): held.extend(os.memfd_create("x") for _ in range(n))
def eventfds(n): held.extend(os.eventfd(0) for _ in range(n))
def threads(n):
    for _ in range(n): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def memory(n): held.append(b"x" * (n << 20))
def zombies(n):
    for _ in range(n):
        if os.fork() == 0: os._exit(0)
def forks(n):
    for _ in range(n):
        if os.fork() == 0: time.sleep(60); os._exit(0)
def orphans(n):
    if os.fork() == 0: forks(n); os._exit(0)
    os.wait()
print("ready", flush=True)
for line in sys.stdin:
    name, count = line.split()
    globals()[name](int(count))
    time.sleep(0.05)
    print("done", flush=True)
"""


class Steered:
    def __init__(self, metrics: Path) -> None:
        self.metrics = metrics
        self.process = subprocess.Popen(
            [sys.executable, "-c", STEERED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def do(self, what: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def sample(self) -> Sample:
        found = soak_sampler.take(self.process.pid, 1.0, self.metrics)
        assert found is not None
        return found


@pytest.fixture
def steered(tmp_path: Path) -> Iterator[Steered]:
    process = Steered(tmp_path / "metrics.jsonl")
    with process.process:
        yield process
        os.killpg(process.process.pid, signal.SIGKILL)


def more(steered: Steered, what: str) -> dict[str, float]:
    """What changed in the counts."""
    before = steered.sample()
    steered.do(what)
    after = steered.sample()
    names = ("processes", "threads", "fds", "files", "pipes", "sockets", "shm", "other", "zombies")
    changes = {name: getattr(after, name) - getattr(before, name) for name in names}
    return {name: change for name, change in changes.items() if change}


def test_the_sampler_counts_descriptors_threads_and_zombies(steered: Steered) -> None:
    assert steered.sample().processes == 1
    assert steered.sample().threads == 1
    assert more(steered, "files 3") == {"fds": 3, "files": 3}
    assert more(steered, "pipes 2") == {"fds": 4, "pipes": 4}
    assert more(steered, "sockets 2") == {"fds": 2, "sockets": 2}
    assert more(steered, "memfds 2") == {"fds": 2, "shm": 2}
    assert more(steered, "eventfds 1") == {"fds": 1, "other": 1}
    assert more(steered, "threads 4") == {"threads": 4}
    assert more(steered, "zombies 2") == {"zombies": 2}
    held = steered.sample().fds
    inherited = more(steered, "forks 1")
    assert (inherited["processes"], inherited["threads"], inherited["fds"]) == (1, 1, held)


def test_the_sampler_counts_memory_once(steered: Steered) -> None:
    before = steered.sample()
    steered.do("memory 64")
    grown = steered.sample()
    for name in ("rss", "pss", "uss", "own"):
        assert getattr(grown, name) - getattr(before, name) == pytest.approx(64, abs=2), name
    steered.do("forks 2")
    shared = steered.sample()
    assert shared.processes == 3
    assert 2 * 60 < shared.children_rss < 2 * shared.rss + 1  # each has the 64 MiB
    assert shared.own == pytest.approx(grown.own, abs=4)  # which are there once
    assert shared.uss < grown.uss - 50


def test_orphans_are_found(steered: Steered) -> None:
    steered.do("orphans 2")
    assert steered.sample().processes == 3


def test_a_process_that_has_ended(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        while soak_sampler.family(ended.pid) != {ended.pid: "Z"}:
            time.sleep(0.01)
        assert soak_sampler.take(ended.pid, 0.0, tmp_path / "none") is None
    assert soak_sampler.take(ended.pid, 0.0, tmp_path / "none") is None


def test_progress_is_the_last_whole_record(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert soak_sampler.progress(metrics) == (0.0, 0)
    lines = [json.dumps({"kind": "train", "step": i, "epoch": i / 4}) for i in range(1, 2000)]
    metrics.write_text("\n".join(lines) + '\n{"kind": "train", "step": 2000, "epo')
    assert soak_sampler.progress(metrics) == (1999 / 4, 1999)


# --- the tool ---


def write(samples: list[Sample], folder: Path) -> Path:
    records.Records(folder / "soak.csv", COLUMNS).append(sample.row() for sample in samples)
    return folder / "soak.csv"


@pytest.mark.parametrize(("leak", "code", "word"), [(0.0, 0, "flat"), (0.2, 1, "grows")])
def test_a_report_from_the_rows(
    leak: float, code: int, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(leaking(series(20), leak), tmp_path)
    assert cli.run(soak.main, ["--report", str(file)]) == code
    assert f"verdict: {word}" in capsys.readouterr().out
    assert f"verdict: {word}" in (tmp_path / "soak.txt").read_text()
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


def test_rows_keep_the_samples(tmp_path: Path) -> None:
    samples = series(1)
    back = [soak_sampler.from_row(r) for r in records.read(write(samples, tmp_path), COLUMNS)]
    for one, two in zip(samples, back, strict=True):
        for name in COLUMNS:
            assert math.isclose(getattr(one, name), getattr(two, name), abs_tol=0.0006)
            assert isinstance(getattr(two, name), type(getattr(one, name)))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--minutes must be above 0, got 0"):
        soak.main(["--minutes", "0"])
    with pytest.raises(ConfigError, match="--every must be between"):
        soak.main(["--every", "0"])
    with pytest.raises(ConfigError, match="--out after --"):
        soak.main(["--", "--out", "x"])
    write(series(1), tmp_path)
    with pytest.raises(ConfigError, match="holds a soak already"):
        soak.main(["--out", str(tmp_path)])


def run(out: Path, data: Path, minutes: float, *flags: str) -> int:
    tiny = ["--data", str(data), "--size", "16", "--views", "2", "--batch-size", "8"]
    tiny += ["--views-engine", "dali", "--eval-views", "0", "--log-every", "1"]
    tiny += ["--kernel", "reference", "--workers", "1"]
    own = ["--minutes", str(minutes), "--every", "0.1", "--out", str(out)]
    return cli.run(soak.main, [*own, "--", *tiny, *flags])


def test_a_short_run_ends_with_a_saved_training(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "soak"
    code = run(out, folder, 0.1)
    said, errors = capsys.readouterr()
    # So short a run may do nothing but warm up: what it says must fit its code.
    word = {0: "verdict: flat", 1: "verdict: grows", 2: "too short"}[code]
    assert word in said, said + errors
    assert "exit code 143" in said, said + errors
    assert "0.0 of 0.1 min, epoch 0.0" in errors  # no terminal: a line a minute
    assert (out / "run/last.pt").exists()
    samples = [soak_sampler.from_row(r) for r in records.read(out / "soak.csv", COLUMNS)]
    trained = [sample.seconds for sample in samples if sample.step]
    assert trained[-1] - trained[0] == pytest.approx(6, abs=1)
    assert samples[-1].epoch >= 1
    assert samples[-1].rss > 200
    assert samples[-1].threads > 1
    assert samples[-1].files >= 3
    assert {path.name for path in out.iterdir()} == {
        *("soak.csv", "soak.json", "soak.png", "soak.txt", "train.log", "run"),
    }


def test_ctrl_c_ends_the_training_as_well(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "soak"

    def press() -> None:
        while soak_sampler.progress(out / "run/metrics.jsonl")[1] < 2:
            time.sleep(0.1)
            if (out / "soak.txt").exists():  # it has ended without a step
                return
        os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press)
    presses.start()
    code = run(out, folder, 1)
    presses.join()
    said, errors = capsys.readouterr()
    assert code == 130, said + errors
    assert "samples" in said
    assert "exit code 143" in said
    assert (out / "run/last.pt").exists()
    assert (out / "soak.png").exists()


def test_a_training_that_dies_is_quoted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "soak", folder, 1, "--crop", "nonsense") == 2
    errors = capsys.readouterr().err
    assert "ended by itself" in errors
    assert "with exit code 2" in errors
    assert "nonsense" in errors
