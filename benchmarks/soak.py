"""A long training run, monitored for leaks.

    python benchmarks/soak.py --minutes 60 --out runs/soak
    python benchmarks/soak.py --minutes 20 --out runs/soak-torch -- --loader torch --workers 2
    python benchmarks/soak.py --report runs/soak/soak.csv

Starts python -m fastaug.train --dali on the built-in data, with an evaluation and a checkpoint
after each epoch and more epochs than fit into the time, samples memory, threads and descriptors of
all its processes, and ends it with SIGTERM, on which it must save (exit code 143 and last.pt).
Flags after -- go to the training. --out receives soak.csv, soak.png, soak.txt (the verdict),
soak.json (command and machine), train.log (the training's output) and run/, its run folder.

Memory rises and falls within an epoch (evaluation, checkpoint, loaders that start and stop), and
over several epochs: protobuf, which TensorBoard's events use, returns all free memory to the system
(malloc_trim) after freeing 10,000 objects, every 16 epochs of the default training, and in between
the heap grows in steps of up to 30 MiB. So samples are compared in groups of whole epochs, after a
warm-up, by the lowest and the highest value of each group: a leak raises at least one of them.

Exit code 0: flat; 1: something grows; 2: no verdict, because the run was too short or the training
ended by itself or did not save; 130 or 143: interrupted, with a verdict on the time until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from parts import command, results
from parts.plotting import BLACK, BLUE, RED, save_figure
from scipy.stats import theilslopes

from fastaug import cli
from fastaug.errors import ConfigError
from fastaug.runtime.atomic import write_json
from fastaug.runtime.signals import StopSignals, TrainingInterruptedError

TRAINING = ("--dali", "--epochs", "100000", "--schedule", "halving", "--eval-every", "1")
"""The halving schedule keeps the rate constant for half of the epochs, so all hours are alike."""
START_SECONDS = 600
"""Limit for reaching the first step: data sets are scanned and kernels compiled."""
SAVE_SECONDS = 120
"""Limit for saving after SIGTERM, before the training is killed."""
SAVED = 128 + signal.SIGTERM
PR_SET_PDEATHSIG = 1

WARM_UP = 0.2
"""Share of the time that is not judged, in which pools, caches and the heap reach their size."""
WARM_UP_EPOCHS = 2
"""The second epoch is the first one after an evaluation and a checkpoint."""
GROUP_SAMPLES = 8
"""Minimum samples in a group, so that its lowest and highest value cover all phases of an epoch."""
MIN_GROUPS, MAX_GROUPS = 5, 15
"""At most 15, so that in an hour each group holds a whole cycle of malloc_trim."""
SLOPE_SHARE, SLOPE_MIB = 0.01, 5.0
"""Growth per hour that is a leak: above both. 1% an hour doubles a training in three days; below
5 MiB an hour it would take a week to reach 1 GiB."""
RISE_MIB = 4.0
"""Minimum growth in the judged time: a heap varies by pieces of about a MiB, which in a few minutes
is a steep slope."""
SPREAD = 2.0
"""Minimum growth in standard deviations of the values around the slope."""
STEP_SHARE, STEP_MIB = 0.05, 25.0
"""Growth between the first and the last third that is a leak regardless of the slope: the Theil-Sen
slope of a few large steps is zero."""


@dataclass(frozen=True)
class Options:
    """Train for a long time and report whether memory, threads or descriptors grow. Flags after --
    go to the training."""

    minutes: float = 60.0
    """How long to train, from the first step on."""
    every: float = 2.0
    """Seconds between two samples."""
    out: str = "runs/soak"
    """Folder of soak.csv, soak.png, soak.txt, train.log and run/; must not contain a soak."""
    report: str = ""
    """Do not train: judge and draw this soak.csv again."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ConfigError(f"--minutes must be above 0, got {self.minutes:g}")
        if not 0.05 <= self.every <= 600:
            raise ConfigError(f"--every must be between 0.05 and 600 seconds, got {self.every:g}")


# --- samples ---


class Sample(NamedTuple):
    """The training and all other processes of its session, together."""

    seconds: float
    """Since the start."""
    epoch: float
    """From the last line of metrics.jsonl; an integer at the end of an epoch, 0 at first."""
    step: int
    rss: float
    """Resident MiB; pages shared by two processes count twice."""
    processes: int
    threads: int
    fds: int
    zombies: int


COLUMNS = Sample._fields
MEASURED = ("seconds", "epoch", "rss")


def read_samples(file: Path) -> list[Sample]:
    return [
        Sample._make((float if name in MEASURED else int)(row[name]) for name in COLUMNS)
        for row in results.read(file, COLUMNS)
    ]


def session(pid: int) -> list[psutil.Process]:
    """The processes of a session, including orphans: a child whose parent has ended is a leak."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) == pid:
                found.append(process)
    return found


def take_sample(pid: int, seconds: float, metrics: Path) -> Sample | None:
    """None if the process has ended."""
    rss = processes = threads = fds = zombies = 0
    ended = True
    for process in session(pid):
        with contextlib.suppress(psutil.Error), process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:
                zombies += 1
                continue
            values = process.memory_info().rss, process.num_threads(), process.num_fds()
            rss, threads, fds = rss + values[0], threads + values[1], fds + values[2]
            processes += 1
            ended = ended and process.pid != pid
    if ended:
        return None
    epoch, step = read_progress(metrics)
    return Sample(seconds, epoch, step, rss / 2**20, processes, threads, fds, zombies)


def read_progress(metrics: Path) -> tuple[float, int]:
    """Epoch and step of the last complete line; zeros before the first."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().splitlines()
    except OSError:
        return 0.0, 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line, another kind
            record = json.loads(line)
            return float(record["epoch"]), int(record["step"])
    return 0.0, 0


# --- the training ---


class Training:
    """python -m fastaug.train as a child in its own session: Ctrl-C reaches only the soak, which
    then ends the training."""

    def __init__(self, flags: Sequence[str], folder: Path) -> None:
        self.run, self.log = folder / "run", folder / "train.log"
        self.command = ["python", "-m", "fastaug.train", *TRAINING, "--out", str(self.run), *flags]
        libc = ctypes.CDLL(None)

        def end_with_parent() -> None:
            # A killed soak must not leave a training of 100,000 epochs behind.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

        self.started = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def end(self) -> str:
        """Send SIGTERM and wait. Returns what went wrong, or "" if it has saved."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(SAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"did not end within {SAVE_SECONDS} s of SIGTERM, and was killed"
        if left := session(self.process.pid):
            self.kill()
            return f"left {len(left)} processes behind, which were killed"
        if code != SAVED:
            return f"ended with exit code {code} after SIGTERM, expected {SAVED}"
        if not (self.run / "last.pt").exists():
            return f"did not save: no {self.run / 'last.pt'} (it may not have made a step yet)"
        return ""

    def kill(self) -> None:
        """Kill its whole session."""
        for process in session(self.process.pid):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()


def main(args: Sequence[str]) -> int:
    args = list(args)
    split = args.index("--") if "--" in args else len(args)
    flags = args[split + 1 :]
    options = cli.parse(Options, args[:split], prog="python benchmarks/soak.py")
    if options.report:
        return report(Path(options.report).expanduser())
    if taken := [flag for flag in flags if flag.partition("=")[0] in ("--out", "--resume")]:
        raise ConfigError(f"{taken[0]} after --: not allowed, the run folder is OUT/run")
    folder = Path(options.out).expanduser()
    file = folder / "soak.csv"
    if file.exists() or (folder / "run").exists():
        raise ConfigError(
            f"--out {folder}: already contains a soak; choose another folder, or --report {file}"
        )
    return soak(options, flags, results.ResultFile(file, COLUMNS))


def soak(options: Options, flags: Sequence[str], file: results.ResultFile) -> int:
    with StopSignals() as request:
        training = Training(flags, file.path.parent)
        about = results.describe_machine(torch.device("cpu"))
        write_json(
            file.path.with_suffix(".json"), {"command": shlex.join(training.command), **about}
        )
        code = 0
        try:
            wrong = watch(training, options, file, request) or training.end()
        except TrainingInterruptedError as interrupted:
            wrong, code = training.end(), interrupted.exit_code
        finally:
            if training.process.poll() is None:  # the soak itself failed
                training.kill()
    found = report(file.path)
    if wrong:
        log = training.log.read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [f"the training {wrong}; the last lines of {training.log}:", *log[-15:]]
        print("\n    ".join(lines), file=sys.stderr)
        return 2
    print(f"the training saved and ended with exit code {SAVED}: {training.run}/last.pt")
    return code or found


def watch(
    training: Training, options: Options, file: results.ResultFile, request: StopSignals
) -> str:
    """Sample until the time is up. Returns "", or what went wrong with the training."""
    first_step, due, printed = None, 0.0, 0.0
    with command.progress_bar("soak") as bar:
        task = bar.add_task("starting", total=60 * options.minutes)
        while True:
            now = time.monotonic() - training.started
            sample = take_sample(training.process.pid, now, training.run / "metrics.jsonl")
            if sample is None:
                code = training.process.wait()
                return f"ended by itself after {now / 60:.1f} min with exit code {code}"
            row = sample._asdict()
            file.append([row | {name: round(row[name], 3) for name in MEASURED}])
            if first_step is None and sample.step:
                first_step = now
            trained = 0.0 if first_step is None else now - first_step
            line = (
                f"{trained / 60:.1f} of {options.minutes:g} min, epoch {sample.epoch:.1f}, "
                f"{sample.rss:,.0f} MiB, {sample.threads} threads, {sample.fds} descriptors"
            )
            bar.update(task, completed=trained, description=line)
            if bar.disable and now >= printed:
                print(line, file=sys.stderr, flush=True)
                printed += 60
            if trained >= 60 * options.minutes:
                return ""
            if first_step is None and now > START_SECONDS:
                training.kill()
                return f"made no step within {START_SECONDS} s, and was killed"
            due = max(due + options.every, now)  # late samples are not made up for
            while (left := training.started + due - time.monotonic()) > 0:
                request.check()
                time.sleep(min(left, 0.5))
            request.check()


# --- the verdict ---


class Trend(NamedTuple):
    """One quantity after the warm-up."""

    name: str
    first: float
    """Median of the first third of the groups."""
    last: float
    grows: bool
    slope: float = 0.0
    """MiB per hour, with its 99% interval; memory only, any growth of a count is a leak."""
    low: float = 0.0
    high: float = 0.0
    bound: float = 0.0
    """Smallest slope that would be a leak."""


def judge(samples: Sequence[Sample]) -> list[Trend]:
    """Empty if there are too few epochs after the warm-up."""
    groups = group_epochs(samples)
    if len(groups) < MIN_GROUPS:
        return []
    return [
        _memory_trend("memory, lowest", groups, min),
        _memory_trend("memory, highest", groups, max),
        *(_count_trend(name, groups) for name in ("threads", "fds", "processes", "zombies")),
    ]


def group_epochs(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Groups of whole epochs after the warm-up, without the last epoch, which is incomplete."""
    epochs: dict[int, list[Sample]] = {}
    for sample in samples:
        epochs.setdefault(int(sample.epoch), []).append(sample)
    whole = [
        members
        for epoch, members in epochs.items()
        if WARM_UP_EPOCHS <= epoch < int(samples[-1].epoch)
        and members[0].seconds >= WARM_UP * samples[-1].seconds
    ]
    if not whole:
        return []
    per_epoch = statistics.fmean(map(len, whole))
    size = max(math.ceil(GROUP_SAMPLES / per_epoch), math.ceil(len(whole) / MAX_GROUPS))
    starts = range(0, len(whole) - size + 1, size)
    return [list(chain(*whole[start : start + size])) for start in starts]


def _memory_trend(name: str, groups: Sequence[Sequence[Sample]], pick: Callable) -> Trend:
    hours = np.array([statistics.fmean(s.seconds for s in members) / 3600 for members in groups])
    values = np.array([pick(sample.rss for sample in members) for members in groups])
    slope, _, low, high = theilslopes(values, hours, alpha=0.99)
    rest = values - slope * hours
    deviation = 1.4826 * np.median(np.abs(rest - np.median(rest)))  # robust against outliers
    first, last = _ends(values)
    rise = max(RISE_MIB, SPREAD * deviation) / (hours[-1] - hours[0])
    bound = max(SLOPE_MIB, SLOPE_SHARE * first, rise)
    leaks = (slope > bound and low > 0) or last - first > max(STEP_MIB, STEP_SHARE * first)
    return Trend(name, first, last, bool(leaks), *map(float, (slope, low, high, bound)))


def _count_trend(name: str, groups: Sequence[Sequence[Sample]]) -> Trend:
    """By the lowest value of each group: samples hit a short phase with more of them by chance."""
    values = np.array([min(getattr(sample, name) for sample in members) for members in groups])
    first, last = _ends(values)
    return Trend(name, first, last, last > first)


def _ends(values: np.ndarray) -> tuple[float, float]:
    third = max(1, len(values) // 3)
    return float(np.median(values[:third])), float(np.median(values[-third:]))


def describe(samples: Sequence[Sample], trends: Sequence[Trend]) -> list[str]:
    if not samples:
        return ["no samples"]
    end = samples[-1]
    head = f"{end.seconds / 60:.1f} min, {int(end.epoch):,} epochs, {end.step:,} steps, "
    head += f"{len(samples):,} samples"
    if not trends:
        return [
            head,
            f"too short: fewer than {MIN_GROUPS} groups of whole epochs with {GROUP_SAMPLES} "
            "samples after the warm-up; increase --minutes",
        ]
    lines = [head, f"{'':16}{'first':>9}{'last':>9}  {'MiB/hour [99%]':28}{'leak above':>10}"]
    for trend in trends:
        line = f"{trend.name:16}{trend.first:>9,.1f}{trend.last:>9,.1f}"
        if trend.bound:
            interval = f"{trend.slope:+.2f} [{trend.low:+.2f}, {trend.high:+.2f}]"
            line += f"  {interval:28}{trend.bound:>10.1f}"
        lines.append(line + "  grows" * trend.grows)
    grows = ", ".join(trend.name for trend in trends if trend.grows)
    return [*lines, f"verdict: grows ({grows})" if grows else "verdict: flat"]


def report(file: Path) -> int:
    """Judge and draw a soak.csv; returns the exit code."""
    samples = read_samples(file)
    trends = judge(samples)
    lines, about_file = describe(samples, trends), file.with_suffix(".json")
    if about_file.exists():
        about: Mapping[str, Any] = json.loads(about_file.read_text(encoding="utf-8"))
        machine = f"{about['date'][:10]}, {about['commit']}, {results.machine_name(about)}"
        lines = [about["command"], machine, *lines]
    text = file.with_suffix(".txt")
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    print(f"samples: {file}, verdict: {text}")
    if len(samples) > 1:
        draw(samples, trends, file.with_suffix(".png"))
    return 2 if not trends else int(any(trend.grows for trend in trends))


def draw(samples: Sequence[Sample], trends: Sequence[Trend], path: Path) -> None:
    minutes = [sample.seconds / 60 for sample in samples]
    groups = group_epochs(samples) if trends else []

    def on(figure: Any) -> None:
        axes = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
        axes[0].plot(minutes, [sample.rss for sample in samples], color=BLACK, lw=1, label="all")
        middle = [statistics.fmean(s.seconds for s in members) / 60 for members in groups]
        for pick, color in ((min, BLUE), (max, RED)):
            values = [pick(s.rss for s in members) for members in groups]
            label = {min: "lowest", max: "highest"}[pick] + " of a group of epochs"
            axes[0].plot(middle, values, color=color, marker="o", ms=4, lw=1.5, label=label)
        judged = [sample.rss for members in groups for sample in members]
        if judged:  # close enough to see a leak of a few MiB
            margin = max(5.0, 0.5 * (max(judged) - min(judged)))
            axes[0].set_ylim(min(judged) - margin, max(judged) + margin)
        axes[0].set_ylabel("resident memory, MiB", fontsize=9)
        for name, color in (("threads", BLACK), ("processes", BLUE), ("zombies", RED)):
            axes[1].plot(minutes, [getattr(s, name) for s in samples], color=color, label=name)
        axes[2].plot(minutes, [s.fds for s in samples], color=BLACK, label="open descriptors")
        for ax in axes[1:]:
            ax.set_ylim(bottom=0)
        for ax in axes:
            if groups:
                ax.axvspan(0, groups[0][0].seconds / 60, color=BLACK, alpha=0.1, lw=0)
            ax.grid(axis="y", alpha=0.3)
            ax.tick_params(labelsize=9)
            ax.legend(fontsize=8, loc="lower right")
        axes[2].set_xlabel("minutes (gray: warm-up, not judged)", fontsize=9)
        verdict = "grows" if any(trend.grows for trend in trends) else "flat"
        title = f"{minutes[-1]:.1f} minutes of training, {int(samples[-1].epoch):,} epochs: "
        figure.suptitle(title + (verdict if trends else "too short to judge"), fontsize=11)

    save_figure(path, (9, 8), on, dpi=110)


if __name__ == "__main__":
    sys.exit(cli.run(main))
