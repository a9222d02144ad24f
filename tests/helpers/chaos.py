"""Disturb real trainings with real faults, and check that they end as if nothing had happened.

    python tests/helpers/chaos.py --out runs/chaos --faults-total 1000
    python tests/helpers/chaos.py --out runs/chaos-2 --rounds 3 --settings 4-ranks dali

A round is a run of some seconds that is hit by several faults, at random steps: its processes are
killed, frozen or asked to end, its checkpoints damaged, its disk full, its data gone for a moment,
its clock set, its network cut (chaos_faults.py has all of them). It is started again as a user or
torchrun would do it. In the end its folder must equal that of an undisturbed run, bit for bit
except for times and names, and each step of each process must have had the images of that step
(chaos_check.py). Rounds take turns with the settings of chaos_settings.py. Before them, faults that
can be enumerated are: checkpoints cut at every 4 KB, SIGKILL before every file operation of a save
(chaos_enumerated.py).

What is drawn follows from the setting and the seed of a round; where exactly a fault hits depends
on the machine's speed, too. A fault that came too late, or that the training could not notice, is
not counted. A round that fails keeps its folder in --out, with the training's log and the journal
of its steps. The counts are in OUT/chaos.json. A command with the same --out adds to them, with
further seeds. Exit code 0: all rounds equal; 1: some are not; 130: Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

from chaos_enumerated import kill_at_every_operation, resume_every_cut
from chaos_faults import FAULTS
from chaos_report import Report
from chaos_round import Result, Stage
from chaos_settings import SETTINGS, Surroundings, why_not
from rich.console import Console

from fastaug import cli
from fastaug.errors import ConfigError

_ENUMERATED = {
    "cuts": resume_every_cut,
    "operations": kill_at_every_operation,
}


@dataclass(frozen=True)
class Options:
    """Disturb trainings with faults, and compare them with undisturbed ones."""

    faults_total: int = 1000
    """Play rounds until this many faults have hit, those of earlier commands included."""
    rounds: int = 0
    """Play this many rounds instead."""
    minutes: float = 0.0
    """Start no round after this many minutes; 0: no limit."""
    jobs: int = 2
    """Rounds that are played at the same time."""
    out: str = "runs/chaos"
    """Folder for chaos.json, the data, undisturbed runs and the rounds that fail."""
    settings: tuple[str, ...] = ()
    """Names of the settings to play; default: all that this machine allows."""
    faults: tuple[str, ...] = ()
    """Names of the faults to draw from; default: all."""
    seed: int = -1
    """Seed of the first round; each further one takes the next. -1: the first that is not used."""
    enumerate: bool = True
    """Begin with the enumerated faults, unless an earlier command has done that."""
    keep: bool = False
    """Keep the folders of all rounds."""

    def __post_init__(self) -> None:
        for flag, given, known in (
            ("--settings", self.settings, SETTINGS),
            ("--faults", self.faults, FAULTS),
        ):
            for name in given:
                if name not in known:
                    raise ConfigError(f"{flag} {name}: unknown; one of {', '.join(known)}")
        if self.jobs < 1:
            raise ConfigError(f"--jobs must be at least 1, got {self.jobs}")


Task = tuple[str, int]
"""Name of a setting or of an enumeration, and seed."""


def main(args: Sequence[str]) -> int:
    options = cli.parse(Options, args, prog="python tests/helpers/chaos.py", default=Options())
    out = Path(options.out).expanduser().absolute()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # end in the same way
    report = Report(out / "chaos.json")
    names = [name for name in options.settings or SETTINGS if _is_possible(name)]
    jobs = [Job(number, options, out) for number in range(options.jobs)]
    try:
        _play(options, names, jobs, report)
    except KeyboardInterrupt:
        print("interrupted; so far:", file=sys.stderr)
        return 130
    finally:
        for job in jobs:
            job.stop()
        Console().print(report.table())
    return 1 if report.failures else 0


def _is_possible(name: str) -> bool:
    if reason := why_not(SETTINGS[name]):
        print(f"{name}: not played, {reason}", file=sys.stderr)
    return not reason


def _play(
    options: Options, names: Sequence[str], jobs: Sequence[Job], report: Report
) -> None:
    """Give each job its next round until there are enough."""
    began, first = time.monotonic(), len(report.results)
    seed = report.next_seed if options.seed < 0 else options.seed
    wanted = [n for n in _ENUMERATED if options.enumerate and not report.has_enumerated(n)]
    waiting: list[Task] = [(name, 0) for name in wanted]
    turn = 0
    while True:
        busy = [job for job in jobs if job.task is not None]
        played = len(report.results) - first + sum(job.task[0] in names for job in busy if job.task)
        is_late = options.minutes and time.monotonic() - began > 60 * options.minutes
        is_enough = (
            played >= options.rounds if options.rounds else report.faults >= options.faults_total
        )
        for job in jobs:
            if job.task is not None or is_late:
                continue
            if waiting:
                job.give(waiting.pop(0))
            elif not is_enough:
                # A job stays with its settings, for each of which it needs an undisturbed run.
                own = names[job.number :: len(jobs)] or names
                job.give((own[turn // len(jobs) % len(own)], seed))
                seed, turn, played = seed + 1, turn + 1, played + 1
                is_enough = bool(options.rounds) and played >= options.rounds
        if not any(job.task for job in jobs):
            return
        for job in jobs:
            for result in job.results():
                report.add(result)
                print(result.line(), flush=True)


class Job:
    """A process that plays rounds, with its own data, cache and undisturbed runs."""

    def __init__(self, number: int, options: Options, out: Path) -> None:
        self.number, self.task = number, None
        context = multiprocessing.get_context("spawn")
        self._tasks, self._results = context.SimpleQueue(), context.Queue()
        folder = out / f"job-{number}-{os.getpid()}"
        args = (folder, options, self._tasks, self._results)
        self._process = context.Process(target=_work, args=args)
        self._process.start()

    task: Task | None

    def give(self, task: Task) -> None:
        self.task = task
        self._tasks.put(task)

    def results(self) -> list[Result]:
        """What it has finished; waits for a moment."""
        try:
            result = self._results.get(timeout=0.2)
        except Empty:
            if self._process.exitcode is None or self.task is None:
                return []
            name, seed = self.task
            problem = f"chaos.py: the job has ended with exit code {self._process.exitcode}"
            self._process = None
            raise RuntimeError(f"{name}, seed {seed}: {problem}") from None
        self.task = None
        return [result]

    def stop(self) -> None:
        if self._process is None:
            return
        if self.task is None:
            self._tasks.put(None)
        elif self._process.pid and self._process.exitcode is None:
            os.kill(self._process.pid, signal.SIGINT)
        self._process.join(120)


def _work(folder: Path, options: Options, tasks: Any, results: Any) -> None:
    surroundings = Surroundings(folder, own_mounts=True)
    stage = Stage(surroundings, keep=options.keep)
    try:
        while (task := tasks.get()) is not None:
            name, seed = task
            try:
                if name in _ENUMERATED:
                    result = _ENUMERATED[name](stage)
                else:
                    result = stage.play(name, seed, options.faults)
            except Exception as error:  # of the undisturbed run, or of chaos.py itself
                traceback.print_exc()
                result = Result(name, seed, problems=[f"{type(error).__name__}: {error}"])
            results.put(result)
    except KeyboardInterrupt:
        pass
    finally:
        surroundings.close()


if __name__ == "__main__":
    sys.exit(cli.run(main))
