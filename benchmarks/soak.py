"""A long training, watched: does it leak?

    python benchmarks/soak.py --minutes 60 --out runs/soak
    python benchmarks/soak.py --minutes 20 --out runs/soak-torch -- --loader torch --workers 2
    python benchmarks/soak.py --report runs/soak/soak.csv

It starts python -m fastaug.train --dali on the built-in data, with an evaluation and a checkpoint
after each epoch and far more epochs than fit, samples memory, threads and descriptors of it and of
its children, and ends it with SIGTERM, which must save (exit code 143 and last.pt). Flags after --
go to the training. In --out: soak.csv, soak.png, soak.txt (the verdict), soak.json (what was run,
on what), train.log (what the training said) and run/, its run folder.

Exit code 0: flat; 1: it grows (benchmarks/soak_verdict.py has the bounds and why); 2: no verdict,
as the run was too short, the training ended by itself or did not save; 130 or 143: interrupted,
with a verdict on what there was.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import records
import soak_sampler
import torch
from progress import progress_bar
from soak_plot import draw
from soak_sampler import COLUMNS, Sample
from soak_verdict import describe, judge

from fastaug import cli
from fastaug.errors import ConfigError
from fastaug.runtime.atomic import write_json
from fastaug.runtime.signals import StopSignals, TrainingInterruptedError

TRAINING = ("--dali", "--epochs", "100000", "--schedule", "halving", "--eval-every", "1")
"""The halving schedule leaves the rate alone for half of the epochs: all hours are alike."""
START_SECONDS = 600
"""How long it may take to its first steps: data sets are scanned and kernels compiled."""
SAVE_SECONDS = 120
"""How long the training may take to save after SIGTERM, before it is killed."""
SAVED = 128 + signal.SIGTERM
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Options:
    """Train for a long time and tell whether memory, threads or descriptors grow. Flags after --
    go to the training."""

    minutes: float = 60.0
    """How long to train, from the first steps on."""
    every: float = 2.0
    """Seconds between two samples."""
    out: str = "runs/soak"
    """Folder of soak.csv, soak.png, soak.txt, train.log and run/; it must not hold a soak yet."""
    report: str = ""
    """Train nothing: verdict and picture of this soak.csv once more, beside it."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ConfigError(f"--minutes must be above 0, got {self.minutes:g}")
        if not 0.05 <= self.every <= 600:
            raise ConfigError(f"--every must be between 0.05 and 600 seconds, got {self.every:g}")


class Training:
    """python -m fastaug.train as a child, in a session of its own: Ctrl-C in the terminal reaches
    the soak alone, which then ends the training in its own way."""

    def __init__(self, flags: Sequence[str], folder: Path) -> None:
        self.run, self.log = folder / "run", folder / "train.log"
        self.command = ["python", "-m", "fastaug.train", *TRAINING, "--out", str(self.run), *flags]
        libc = ctypes.CDLL(None)

        def end_with_parent() -> None:
            # A soak that is killed must not leave 100,000 epochs behind.
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

    def sample(self) -> Sample | None:
        """None if it has ended."""
        seconds = time.monotonic() - self.started
        return soak_sampler.take(self.process.pid, seconds, self.run / "metrics.jsonl")

    def end(self) -> str:
        """SIGTERM, and wait. What was wrong with its end, or "" if it has saved."""
        pid = self.process.pid
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(SAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"did not end within {SAVE_SECONDS} s of SIGTERM, and was killed"
        if left := soak_sampler.family(pid):
            self.kill()
            return f"left {len(left)} processes behind, which were killed"
        if code != SAVED:
            return f"ended with exit code {code} after SIGTERM, not {SAVED}"
        if not (self.run / "last.pt").exists():
            return f"did not save: no {self.run / 'last.pt'} (it may not have made a step yet)"
        return ""

    def kill(self) -> None:
        """All of its session."""
        for member in soak_sampler.family(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        self.process.wait()

    def last_lines(self, count: int = 15) -> list[str]:
        with self.log.open(encoding="utf-8", errors="replace") as log:
            return [line.rstrip("\n") for line in deque(log, count)]


def main(args: Sequence[str]) -> int:
    args = list(args)
    split = args.index("--") if "--" in args else len(args)
    flags = args[split + 1 :]
    options = cli.parse(Options, args[:split], prog="python benchmarks/soak.py")
    if options.report:
        return report(Path(options.report).expanduser())
    if taken := [flag for flag in flags if flag.partition("=")[0] in ("--out", "--resume")]:
        raise ConfigError(f"{taken[0]} after --: the run folder is run in soak.py's own --out")
    soak_sampler.check_system()
    folder = Path(options.out).expanduser()
    file = folder / "soak.csv"
    if file.exists() or (folder / "run").exists():
        raise ConfigError(
            f"--out {folder}: holds a soak already; --report {file} shows it, "
            "or choose another folder"
        )
    return soak(options, flags, records.Records(file, COLUMNS))


def soak(options: Options, flags: Sequence[str], file: records.Records) -> int:
    folder = file.path.parent
    with StopSignals() as request:
        training = Training(flags, folder)
        about = {"command": shlex.join(training.command), **records.machine(torch.device("cpu"))}
        write_json(file.path.with_suffix(".json"), about)
        wrong, code = "", 0
        try:
            ended = watch(training, options, file, request)
            wrong = ended or training.end()
        except TrainingInterruptedError as interrupted:
            wrong, code = training.end(), interrupted.exit_code
        finally:
            if training.process.poll() is None:  # an error of the soak's own
                training.kill()
    found = report(file.path)
    if wrong:
        print(f"the training {wrong}; the last lines of {training.log}:", file=sys.stderr)
        print("\n".join(f"    {line}" for line in training.last_lines()), file=sys.stderr)
        return 2
    print(f"the training saved and ended as it should: exit code {SAVED}, {training.run}/last.pt")
    return code or found


def watch(training: Training, options: Options, file: records.Records, request: StopSignals) -> str:
    """Sample until the time is up: "", or what was wrong with the training before."""
    trained_since, due, told = None, 0.0, 0.0
    with progress_bar("soak") as bar:
        task = bar.add_task("starting", total=60 * options.minutes)
        while True:
            now = time.monotonic() - training.started
            sample = training.sample()
            if sample is None:
                code = training.process.wait()
                return f"ended by itself after {now / 60:.1f} min with exit code {code}"
            file.append([sample.row()])
            if trained_since is None and sample.step:
                trained_since = now
            trained = 0.0 if trained_since is None else now - trained_since
            bar.update(task, completed=trained, description=_line(sample, trained, options))
            if bar.disable and now >= told:
                print(_line(sample, trained, options), file=sys.stderr, flush=True)
                told += 60
            if trained >= 60 * options.minutes:
                return ""
            if trained_since is None and now > START_SECONDS:
                training.kill()
                return f"made no step within {START_SECONDS} s, and was killed"
            due = max(due + options.every, now)  # late: go on from here, catch up nothing
            while (left := training.started + due - time.monotonic()) > 0:
                request.check()
                time.sleep(min(left, 0.5))
            request.check()


def _line(sample: Sample, trained: float, options: Options) -> str:
    return (
        f"{trained / 60:.1f} of {options.minutes:g} min, epoch {sample.epoch:.1f}, "
        f"{sample.rss + sample.children_rss:,.0f} MiB ({sample.own:,.0f} own), "
        f"{sample.threads} threads, {sample.fds} descriptors"
    )


def report(file: Path) -> int:
    """Verdict and picture of a soak.csv; the exit code that it stands for."""
    samples = [soak_sampler.from_row(row) for row in records.read(file, COLUMNS)]
    verdict = judge(samples)
    lines = [*_about(file.with_suffix(".json")), *describe(samples, verdict)]
    picture, text = file.with_suffix(".png"), file.with_suffix(".txt")
    try:
        text.write_text("\n".join(lines) + "\n", encoding="utf-8")
        drawn = draw(samples, verdict, picture)
    except OSError as error:
        raise ConfigError(f"{file.parent}: cannot be written ({error.strerror})") from error
    print("\n".join(lines))
    print(f"rows: {file}, verdict: {text}" + f", picture: {picture}" * drawn)
    return 2 if verdict is None else int(verdict.grows)


def _about(file: Path) -> list[str]:
    """What was run, when and on what; nothing where a CSV came alone."""
    if not file.exists():
        return []
    about = json.loads(file.read_text(encoding="utf-8"))
    return [
        about["command"],
        f"{about['date'][:10]}, {about['commit']}, {records.machine_of(about)}",
    ]


if __name__ == "__main__":
    sys.exit(cli.run(main))
