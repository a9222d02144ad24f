"""Trainings, sweeps and loaders under load: what is lost, what differs, what it costs.

    python benchmarks/load.py trainings --out runs/load-trainings
    python benchmarks/load.py sweep --out runs/load-sweep
    python benchmarks/load.py storage --out runs/load-storage

trainings: --count trainings at once on one empty cache, each compared with one that ran alone.
sweep: a sweep of --count runs by --workers workers on one storage, of which one is killed every
--kill-every seconds and replaced.
storage: a loader that reads for --minutes while a share of all reads, --errors, fails. Every epoch
is also read without errors, and the batches are compared.

Prints a table, and writes it to --out as load.json. Exit code 0: nothing was lost and nothing
differs; 1 otherwise.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import psutil
import torch
from parts import results
from tyro.conf import arg

from fastaug import cli
from fastaug.config import TrainConfig
from fastaug.data.loader import ViewLoader
from fastaug.data.storage import Files
from fastaug.engine.loaders import build_loader
from fastaug.errors import ConfigError
from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runs.console import show_table
from fastaug.runtime.atomic import write_json
from fastaug.settings import Settings, setting

TRAINING = (
    *("--dali", "--epochs", "1", "--views", "2", "--batch-size", "16", "--workers", "1"),
    *("--tta", "0", "--eval-every", "1", "--seed", "3"),
)
SWEPT = (
    *("--views", "1", "--kl-weight", "0", "--epochs", "1", "--tune-seeds", "0", "--jobs", "1"),
    *("--heartbeat", "5", "--size", "12", "--crop", "pad", "--batch-size", "16", "--workers", "0"),
    *("--tta", "0", "--validation", "0.2"),
)
TRAINING_MIB = 450
"""Memory that a training does not share with others."""
SECONDS_LIMIT = 3 * 3600
_started: list[subprocess.Popen] = []
"""All child processes."""
Row = tuple[str, float | str]


@dataclass(frozen=True)
class Options(Settings):
    """Put trainings, a sweep or a loader under load, and compare with an undisturbed run."""

    part: Annotated[Literal["trainings", "sweep", "storage"], arg(metavar="PART")]
    """What to load."""
    out: str = ""
    """A new folder for everything that is made; default: runs/load-PART."""
    count: int = setting(0, at_least=0)
    """Trainings at once, or runs of the sweep; 0: 24, or 200."""
    steps: int = setting(50, at_least=1)
    """Steps of each training."""
    workers: int = setting(3, at_least=1)
    """Workers of the sweep at a time."""
    kill_every: float = setting(20.0, at_least=0.1)
    """Seconds between two kills of a worker."""
    minutes: float = setting(60.0, at_least=0)
    """How long the loader reads, at least one epoch."""
    errors: float = setting(0.01, at_least=0, at_most=1)
    """Share of reads that fail."""
    loader: Literal["dali", "torch"] = "dali"
    """The loader that reads."""
    data: str = "shapes"
    """Class folders that the loader reads; default: the built-in data set."""
    batch_size: int = setting(128, at_least=2)
    """Views in a batch of the loader, two of each image."""
    debug: bool = False
    """Show the traceback of an error."""


def main(args: Sequence[str]) -> int:
    options = cli.parse(Options, args, prog="python benchmarks/load.py")
    folder = Path(options.out or f"runs/load-{options.part}").expanduser().absolute()
    if folder.exists():
        raise ConfigError(f"--out {folder}: exists; choose another folder")
    folder.mkdir(parents=True)
    run = {"trainings": load_trainings, "sweep": load_sweep, "storage": load_storage}
    try:
        rows, wrong = run[options.part](options, folder)
    finally:
        for process in _started:
            process.terminate()
    rows.append(("wrong", "; ".join(wrong) or "nothing"))
    show_table(f"load: {options.part}", [(name, _text(value)) for name, value in rows])
    command = shlex.join(["python", "benchmarks/load.py", *args])
    machine = results.describe_machine(torch.device("cpu"))
    write_json(folder / "load.json", {"command": command, **dict(rows), "machine": machine})
    return 1 if wrong else 0


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.{2 if isinstance(value, float) else 0}f}"


# --- trainings at once on one cache ---


def load_trainings(options: Options, folder: Path) -> tuple[list[Row], list[str]]:
    count = options.count or 24
    needed, free = count * TRAINING_MIB / 1024, psutil.virtual_memory().available / 2**30
    if needed > free:
        raise ConfigError(
            f"--count {count} needs about {needed:.1f} GiB of memory, {free:.1f} GiB are free; "
            "lower it, or free some"
        )
    alone, alone_seconds, alone_memory = _train(folder, "alone", 1, options.steps)
    many, seconds, memory = _train(folder, "many", count, options.steps)
    wrong = [f"{run.name}: exit code {code}" for run, code in {**alone, **many}.items() if code]
    if wrong:
        return [("trainings", count)], wrong
    (expected,) = (_weights(run) for run in alone)
    wrong += [f"{run.name}: other weights" for run in many if _weights(run) != expected]
    compiled = sum(_log(run).count("\ncompiling ") for run in many)
    left = [file.name for file in (folder / "many-cache").rglob(".*.tmp*")]
    wrong += [f"the cache has {name}" for name in left]
    rows: list[Row] = [
        ("trainings at once", count),
        ("steps of each", options.steps),
        ("with the weights of the one alone", count - len(wrong)),
        ("kernels compiled, over all trainings", compiled),
        ("kernels compiled, alone", sum(_log(run).count("\ncompiling ") for run in alone)),
        ("seconds", seconds),
        ("seconds, alone", alone_seconds),
        ("memory at its peak (PSS), MiB", memory),
        ("memory at its peak (PSS), alone, MiB", alone_memory),
    ]
    return rows, wrong


def _train(folder: Path, name: str, count: int, steps: int) -> tuple[dict[Path, int], float, float]:
    """Train at once on one empty cache: run folder -> exit code, seconds, most MiB at a time."""
    environment = {"FASTAUG_CACHE": str(folder / f"{name}-cache"), "OMP_NUM_THREADS": "1"}
    started, processes = time.monotonic(), {}
    for i in range(count):
        run = folder / f"{name}-{i:02}"
        flags = [*TRAINING, "--max-steps", str(steps), "--out", str(run)]
        processes[run] = start(["-m", "fastaug.train", *flags], f"{run}.txt", environment)
    peak = 0.0
    while any(process.poll() is None for process in processes.values()):
        peak = max(peak, sum(_memory(process.pid) for process in processes.values()))
        time.sleep(0.5)
    codes = {run: process.wait() for run, process in processes.items()}
    return codes, time.monotonic() - started, peak


def _log(run: Path) -> str:
    return "\n" + Path(f"{run}.txt").read_text(errors="replace")


def _memory(pid: int) -> float:
    """MiB of a process, its share of pages that it has in common with others."""
    with suppress(psutil.Error, OSError):
        return psutil.Process(pid).memory_full_info().pss / 2**20
    return 0.0


def _weights(run: Path) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(load_checkpoint(run / "last.pt")["model"].items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def start(
    arguments: Sequence[str], log: str, environment: dict[str, str] | None = None
) -> subprocess.Popen:
    with open(log, "ab") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | (environment or {}),
        )
    _started.append(process)
    return process


# --- a sweep whose workers die ---


def load_sweep(options: Options, folder: Path) -> tuple[list[Row], list[str]]:
    count, rng = options.count or 200, random.Random(0)
    rates = next(n for n in (20, 10, 8, 5, 4, 2, 1) if count % n == 0)
    lr = [f"{0.01 * (1 + i):g}" for i in range(rates)]
    flags = ["shapes", "--data", str(_small_images(folder / "images.npz")), *SWEPT]
    flags += ["--lr", *lr, "--seeds", str(count // rates), "--out", str(folder / "sweep")]
    workers: list[subprocess.Popen] = []
    started, kills, numbers = time.monotonic(), 0, 0
    due = started + options.kill_every
    while True:
        while len(workers) < options.workers:
            numbers += 1
            log = f"{folder}/worker-{numbers:03}.txt"
            workers.append(start(["-m", "fastaug.sweep", *flags], log, {"OMP_NUM_THREADS": "1"}))
        time.sleep(0.2)
        if any(worker.poll() is not None for worker in workers):
            break  # every run is done, or an error: the others follow
        if time.monotonic() > due:
            workers.pop(_killed(workers, rng)).wait()
            kills, due = kills + 1, time.monotonic() + options.kill_every
        if time.monotonic() - started > SECONDS_LIMIT:
            break
    codes = [worker.wait(600) for worker in workers]
    seconds = time.monotonic() - started
    wrong = [f"a worker ended with exit code {code}" for code in codes if code]
    finished, lost, starts = _outcome(folder / "sweep")
    if len(finished) != count:
        wrong.append(f"{count - len(finished)} runs are missing")
    wrong += [f"{name}: done {n} times" for name, n in finished.items() if n != 1]
    rows: list[Row] = [
        ("runs", count),
        ("done exactly once", sum(n == 1 for n in finished.values())),
        ("workers at a time", options.workers),
        ("workers killed", kills),
        ("runs that lost their worker, and were continued", lost),
        ("trainings started", starts),
        ("seconds", seconds),
    ]
    return rows, wrong


def _killed(workers: list[subprocess.Popen], rng: random.Random) -> int:
    place = rng.randrange(len(workers))
    workers[place].send_signal(signal.SIGKILL)
    return place


def _outcome(sweep: Path) -> tuple[Counter[str], int, int]:
    """How often each run is done; trials that lost their worker; trainings that were started."""
    import optuna
    from optuna.trial import TrialState

    url = f"sqlite:///{sweep / 'sweep.db'}"
    finished: Counter[str] = Counter()
    lost = 0
    for name in optuna.get_all_study_names(url):
        for trial in optuna.load_study(study_name=name, storage=url).get_trials():
            finished[trial.params["run"]] += trial.state == TrialState.COMPLETE
            lost += trial.state == TrialState.FAIL
    outputs = sweep.glob("runs/*/output.txt")
    starts = sum(file.read_text().count("$ -m fastaug.train") for file in outputs)
    for run in list(finished):
        if not (sweep / "runs" / run / "summary.json").is_file():
            finished[run] = 0
    return finished, lost, starts


def _small_images(file: Path) -> Path:
    """An .npz of 12-pixel images in three colors."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 60), ("test", 12)):
        labels = np.arange(count) % 3
        noise = rng.integers(0, 100, (count, 12, 12, 3), np.uint8)
        noise[np.arange(count), :, :, labels] += 120
        arrays |= {f"{split}_images": noise, f"{split}_labels": labels}
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file


# --- a loader whose storage fails ---


def load_storage(options: Options, folder: Path) -> tuple[list[Row], list[str]]:
    logging.getLogger("fastaug").setLevel(logging.ERROR)  # a warning for each error
    config = TrainConfig.from_flat(
        data=options.data,
        loader=options.loader,
        views=2,
        batch_size=options.batch_size,
        size=64,
        workers=2,
        epochs=1_000_000,
    )
    clean, faulty = build_loader(config), build_loader(config)
    injector = StorageErrors(options.errors)
    seconds = {"clean": 0.0, "faulty": 0.0}
    wrong: list[str] = []
    memory: list[float] = []
    epochs = seen = 0
    end = time.monotonic() + 60 * options.minutes
    while not epochs or time.monotonic() < end:
        expected, took = _epoch(clean, epochs)
        seconds["clean"] += took
        with injector.active():
            found, took = _epoch(faulty, epochs)
        seconds["faulty"] += took
        if found != expected:
            wrong.append(f"epoch {epochs}: the batches differ")
        epochs, seen = epochs + 1, seen + len(faulty) * config.images_per_part(1)
        memory.append(psutil.Process().memory_info().rss / 2**20)
        if time.monotonic() > end - 1 or epochs % 50 == 0:
            print(f"{epochs} epochs, {injector.raised} errors, {memory[-1]:,.0f} MiB", flush=True)
    if faulty.images.bad:
        wrong.append(f"{len(faulty.images.bad)} images count as bad")
    third = len(memory) // 3
    middle = memory[third : len(memory) - third]
    rows: list[Row] = [
        ("epochs, each with and without errors", epochs),
        ("images read under errors", seen),
        ("reads that failed", injector.raised),
        ("share of reads that failed, %", 100 * injector.raised / max(1, injector.reads)),
        ("images lost", len(faulty.images.bad)),
        ("epochs with another batch", len(wrong)),
        ("images/s without errors", seen / seconds["clean"]),
        ("images/s with errors", seen / seconds["faulty"]),
        ("memory in the second third, median MiB", float(np.median(middle))),
        ("memory in the last third, median MiB", float(np.median(memory[-third:]))),
        ("minutes", sum(seconds.values()) / 60),
    ]
    return rows, wrong


def _epoch(loader: ViewLoader, epoch: int) -> tuple[list[str], float]:
    """A digest of each batch of an epoch, and the seconds that it took."""
    loader.set_epoch(epoch)
    started, found = time.monotonic(), []
    for batch in loader:
        digest = hashlib.blake2b(batch.indices.numpy().tobytes() + batch.labels.numpy().tobytes())
        digest.update(batch.views.permute(0, 1, 3, 4, 2).contiguous().numpy().data)
        found.append(digest.hexdigest())
    return found, time.monotonic() - started


class StorageErrors:
    """Makes a share of all reads of files fail with EIO, in this process."""

    def __init__(self, share: float) -> None:
        self._share, self._random = share, random.Random(0)
        self.reads = self.raised = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        read: Callable[[Files, int], bytes] = Files.read

        def sometimes_failing(files: Files, index: int) -> bytes:
            self.reads += 1
            if self._random.random() < self._share:
                self.raised += 1
                return self.fail(files, index)
            return read(files, index)

        Files.read = sometimes_failing  # type: ignore[method-assign]
        try:
            yield
        finally:
            Files.read = read  # type: ignore[method-assign]

    def fail(self, _files: Files, _index: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


if __name__ == "__main__":
    sys.exit(cli.run(main))
