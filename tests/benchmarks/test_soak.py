"""benchmarks/soak.py: verdicts on series with known leaks, samples of a process that the test
controls, and short real runs."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import soak
from parts import results
from soak import COLUMNS, Sample, judge

from fastaug import cli
from fastaug.errors import ConfigError

EPOCH = 6.0
"""Seconds of an epoch of the series."""
MEMORY = {"memory, lowest", "memory, highest"}


def series(minutes: float = 60.0, noise: float = 2.0) -> list[Sample]:
    """A training without a leak, sampled every 2 s: each epoch begins with an evaluation, which
    takes 100 MiB, 4 threads and 3 files more."""
    rng = np.random.default_rng(0)
    samples = []
    for seconds in np.arange(0.1, 60 * minutes, 2.0).tolist():
        epoch = seconds / EPOCH
        more = int(epoch % 1 < 0.3)
        rss = 1000.0 + 100 * more + noise * rng.standard_normal()
        samples.append(
            Sample(seconds, epoch, int(250 * epoch), rss, 1, 36 + 4 * more, 7 + 3 * more, 0)
        )
    return samples


def changed(samples: list[Sample], **change: Callable[[Sample], float]) -> list[Sample]:
    """Add to some fields of each sample."""
    return [
        s._replace(**{name: getattr(s, name) + add(s) for name, add in change.items()})
        for s in samples
    ]


def leaking(samples: list[Sample], mib_per_hour: float) -> list[Sample]:
    """A bit more memory after every epoch."""
    return changed(samples, rss=lambda s: mib_per_hour * int(s.epoch) * EPOCH / 3600)


def growing(samples: list[Sample]) -> set[str]:
    trends = judge(samples)
    assert trends
    return {trend.name for trend in trends if trend.grows}


# --- the verdict ---


@pytest.mark.parametrize("minutes", [3, 15, 60])
@pytest.mark.parametrize("noise", [0.0, 2.0, 20.0])
def test_a_sawtooth_with_noise_is_flat(minutes: float, noise: float) -> None:
    assert growing(series(minutes, noise)) == set()


def test_the_slope_of_a_leak_beneath_the_sawtooth() -> None:
    """30 MiB an hour, where an epoch varies by 100."""
    trends = judge(leaking(series(), 30.0))
    assert {trend.name for trend in trends if trend.grows} == MEMORY
    for trend in trends[:2]:
        assert trend.slope == pytest.approx(30.0, abs=2.0)
        assert trend.low < 30.0 < trend.high
        assert trend.last - trend.first == pytest.approx(30.0 * 0.8 * 2 / 3, abs=3.0)


def test_the_bounds() -> None:
    """1% of 1,000 MiB is 10 MiB an hour, and 5 MiB an hour are the least."""
    quiet = series(noise=0.01)
    assert growing(leaking(quiet, 9.0)) == set()
    assert growing(leaking(quiet, 12.0)) == MEMORY
    small = changed(series(180, noise=0.01), rss=lambda s: -950.0)
    assert growing(leaking(small, 4.0)) == set()  # 8%, but 4 MiB
    assert growing(leaking(small, 6.0)) == MEMORY
    # 4 MiB in the judged time, about 2.3 of 3 minutes, are about 105 MiB an hour.
    short = series(3, noise=0.01)
    assert growing(leaking(short, 80.0)) == set()
    assert growing(leaking(short, 160.0)) == MEMORY


def test_an_evaluation_that_takes_ever_more_and_returns_it() -> None:
    samples = changed(series(), rss=lambda s: 0.05 * int(s.epoch) * (s.fds > 7))
    assert growing(samples) == {"memory, highest"}


@pytest.mark.parametrize(("leak", "grows"), [(0.0, False), (20.0, True)])
@pytest.mark.parametrize("seed", range(5))
def test_a_heap_that_is_trimmed_now_and_then(leak: float, grows: bool, seed: int) -> None:
    """As measured: every 3 minutes 200 MiB less for some seconds, and steps in between."""
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
        samples.append(one._replace(rss=710.0 + height + leak * one.seconds / 3600))
    assert bool(growing(samples)) == grows


def test_growth_in_the_warm_up_and_memory_that_falls_are_flat() -> None:
    early = changed(
        series(),
        rss=lambda s: -300 * max(0, 1 - s.seconds / 600),
        fds=lambda s: -int(s.seconds < 600),
        threads=lambda s: -int(s.seconds < 600),
    )
    assert growing(early) == set()
    assert growing(leaking(series(), -60.0)) == set()


def test_growth_that_outlasts_the_warm_up() -> None:
    assert growing(changed(series(), rss=lambda s: 60 * min(1, s.seconds / 2000))) == MEMORY


@pytest.mark.parametrize("place", [0.35, 0.6, 0.8])
def test_one_large_step(place: float) -> None:
    """The slope of a step near an end is zero."""
    assert growing(changed(series(), rss=lambda s: 80 * (s.seconds > place * 3600))) & MEMORY


@pytest.mark.parametrize("name", ["fds", "threads", "processes", "zombies"])
@pytest.mark.parametrize("epochs", [1, 100, 400])
def test_one_more_every_so_many_epochs(name: str, epochs: int) -> None:
    assert growing(changed(series(), **{name: lambda s: int(s.epoch) // epochs})) == {name}


def test_descriptors_that_come_and_go_do_not_grow() -> None:
    """However often the samples hit them."""
    rng = np.random.default_rng(1)
    samples = changed(
        series(), fds=lambda s: 9 * int(rng.random() < (0.5 if s.seconds > 1800 else 0.02))
    )
    assert growing(samples) == set()


def test_groups_are_whole_epochs_after_the_warm_up() -> None:
    groups = soak.group_epochs(series(10))
    for members in groups:
        assert len(members) >= 8
        assert len(members) == 3 * len({int(s.epoch) for s in members})  # every 2 s of 6
    assert 120 <= groups[0][0].seconds < 120 + EPOCH + 2
    assert int(groups[-1][-1].epoch) < 99
    for count in (4, 7, 10):  # at least two epochs of warm-up, however long
        long = [s._replace(epoch=s.epoch * count / 100) for s in series(10)]
        assert int(soak.group_epochs(long)[0][0].epoch) == 2


def test_too_short() -> None:
    for samples in ([], series(0.5), [s._replace(epoch=0.0) for s in series()]):
        assert judge(samples) == []


# --- samples ---

CONTROLLED = """
import os, sys, threading, time
held = []
def files(n): held.extend(open("/dev/null") for _ in range(n))
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


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", CONTROLLED]
    with subprocess.Popen(command, **pipe, start_new_session=True) as child:
        child.stdout.readline()
        yield child
        os.killpg(child.pid, signal.SIGKILL)


def added(process: subprocess.Popen, what: str) -> dict[str, float]:
    """What a command to the process changed in the counts."""
    before = soak.take_sample(process.pid, 1.0, Path("none"))
    process.stdin.write(what + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"
    after = soak.take_sample(process.pid, 1.0, Path("none"))
    changes = {name: getattr(after, name) - getattr(before, name) for name in COLUMNS}
    return {name: round(change) for name, change in changes.items() if abs(change) >= 1}


def test_samples_of_a_process(process: subprocess.Popen) -> None:
    first = soak.take_sample(process.pid, 1.0, Path("none"))
    assert (first.processes, first.threads, first.zombies, first.seconds) == (1, 1, 0, 1.0)
    assert added(process, "files 3") == {"fds": 3}
    assert added(process, "threads 4") == {"threads": 4}
    assert added(process, "memory 64")["rss"] == pytest.approx(64, abs=2)
    assert added(process, "zombies 2")["zombies"] == 2
    forked = added(process, "forks 1")
    assert (forked["processes"], forked["threads"], forked["fds"]) == (1, 1, first.fds + 3)
    assert added(process, "orphans 2")["processes"] == 2


def test_a_process_that_has_ended(tmp_path: Path) -> None:
    with subprocess.Popen(["true"], start_new_session=True) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # now a zombie
        assert soak.take_sample(ended.pid, 0.0, tmp_path / "none") is None
    assert soak.take_sample(ended.pid, 0.0, tmp_path / "none") is None


def test_progress_is_the_last_complete_line(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert soak.read_progress(metrics) == (0.0, 0)
    lines = [json.dumps({"kind": "train", "step": i, "epoch": i / 4}) for i in range(1, 2000)]
    metrics.write_text("\n".join(lines) + '\n{"kind": "train", "step": 2000, "epo')
    assert soak.read_progress(metrics) == (1999 / 4, 1999)


# --- the tool ---


def write(samples: list[Sample], folder: Path) -> Path:
    results.ResultFile(folder / "soak.csv", COLUMNS).append(s._asdict() for s in samples)
    return folder / "soak.csv"


@pytest.mark.parametrize(("leak", "code", "word"), [(0.0, 0, "flat"), (120.0, 1, "grows")])
def test_a_report_from_the_file(
    leak: float, code: int, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = leaking(series(20), leak)
    file = write(samples, tmp_path)
    assert cli.run(soak.main, ["--report", str(file)]) == code
    assert f"verdict: {word}" in capsys.readouterr().out
    assert f"verdict: {word}" in (tmp_path / "soak.txt").read_text()
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
    for one, two in zip(samples, soak.read_samples(file), strict=True):
        assert all(math.isclose(a, b, abs_tol=6e-4) for a, b in zip(one, two, strict=True))
        assert [type(value) for value in one] == [type(value) for value in two]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--minutes", "0"], "--minutes"),
        (["--every", "0"], "--every"),
        (["--", "--out", "x"], "--out"),
        (["--out", "."], "--out"),
    ],
)
def test_refusals(
    flags: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(series(1), tmp_path)
    with pytest.raises(ConfigError, match=named):
        soak.main(flags)


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
    code = run(out, folder, 0.05)
    said, errors = capsys.readouterr()
    # So short a run may be all warm-up: what it prints must match its code.
    word = {0: "verdict: flat", 1: "verdict: grows", 2: "too short"}[code]
    assert word in said, said + errors
    assert "exit code 143" in said, said + errors
    assert "0.0 of 0.05 min, epoch 0.0" in errors  # no terminal: a line a minute
    assert (out / "run/last.pt").exists()
    samples = soak.read_samples(out / "soak.csv")
    trained = [sample.seconds for sample in samples if sample.step]
    assert trained[-1] - trained[0] == pytest.approx(3, abs=1)
    assert samples[-1].rss > 200
    assert samples[-1].threads > 1
    assert {path.name for path in out.iterdir()} == {
        *("soak.csv", "soak.json", "soak.png", "soak.txt", "train.log", "run"),
    }


def test_ctrl_c_ends_the_training_too(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "soak"

    def press() -> None:
        while soak.read_progress(out / "run/metrics.jsonl")[1] < 2:
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
    assert "exit code 143" in said
    assert (out / "run/last.pt").exists()
    assert (out / "soak.png").exists()


def test_a_training_that_dies_is_quoted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "soak", folder, 1, "--crop", "nonsense") == 2
    errors = capsys.readouterr().err
    assert "exit code 2" in errors
    assert "nonsense" in errors
