"""Disturb real trainings with real faults, and see whether they end as if nothing had happened.

    python tests/helpers/chaos.py --rounds 10 --out runs/chaos
    python tests/helpers/chaos.py --rounds 3 --out runs/chaos --ranks 2 --loader dali

A round is a run of some seconds that is hit by several faults, at random steps: its processes are
killed, stopped or asked to end, its checkpoints damaged, its disk full, its images gone for a
moment (chaos_faults.py has all of them). It is started again as a user or torchrun would do it.
In the end its folder must equal that of an undisturbed run, bit for bit but for times and names,
and each step of each process must have had the very images of that step (chaos_check.py).

What is drawn follows from --seed: round N of seed S is round 0 of seed S + N. Where exactly a fault
hits depends on the machine's speed, too. A fault that came too late, or that the training could not
notice, is not counted. A round that fails keeps its folder in --out, with the training's log and
the journal of its steps. Exit code 0: all rounds equal; 1: some are not; 130: Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from chaos_check import account, compare, whole_epochs
from chaos_faults import FAULTS
from chaos_scene import Scene, checksum
from chaos_training import Failure, Training
from PIL import Image
from rich.console import Console
from rich.table import Table

from fastaug import cli
from fastaug.errors import ConfigError

CLASSES, PER_CLASS = 3, 14
PER_STEP = 8
STEPS = CLASSES * PER_CLASS // PER_STEP
"""Of an epoch."""
EPOCHS = 40
SETTINGS: dict[str, Any] = {
    "workers": 0,
    "model": "wrn-10-1",
    "size": 16,
    "views": 2,
    "batch-size": 2 * PER_STEP,
    # Parts of a step, an average of the weights: what more there is to lose.
    "accumulate": 2,
    "ema": 0.9,
    "lr": 0.01,
    "kernel": "reference",
    "device": "cpu",
    "seed": 3,
    "eval-every": 2,
    "tta": 2,
    # Out of step with epochs and checkpoints: most of these hold means that are not yet read.
    "log-every": 7,
    "checkpoint-minutes": 0,
    "stall-timeout": 150,
}
"""Of the training: a run of some seconds that comes out the same to the last bit."""


@dataclass(frozen=True)
class Options:
    """Disturb trainings with faults, and compare them with one that was left alone."""

    rounds: int = 10
    """Runs that are disturbed."""
    seed: int = 0
    """Of the faults of the first round; each further round takes the next one."""
    out: str = "runs/chaos"
    """Folder of the data, of the undisturbed run and of the rounds that fail; must be new."""
    ranks: Literal[1, 2] = 1
    """2: two processes under torchrun, which restarts them by itself."""
    loader: Literal["torch", "dali"] = "torch"
    """As of the training."""
    faults: tuple[str, ...] = ()
    """Names of those that a round draws from; default: all."""
    keep: bool = False
    """Keep the folders of all rounds."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"--rounds must be at least 1, got {self.rounds}")
        for name in self.faults:
            if name not in FAULTS:
                raise ConfigError(f"--faults: no fault {name!r}; one of {', '.join(FAULTS)}")


@dataclass
class Tally:
    """What has happened so far."""

    faults: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    """Faults that came too late, or that nothing noticed."""
    rounds: int = 0
    restarts: int = 0
    failures: int = 0


def main(args: Sequence[str]) -> int:
    options = cli.parse(Options, args, prog="python tests/helpers/chaos.py", default=Options())
    out = Path(options.out).expanduser().absolute()
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: is not empty; choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    os.environ["FASTAUG_CACHE"] = str(out / "cache")
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # end in the same way
    tally = Tally()
    try:
        chaos = Chaos(options, out)
        for number in range(options.rounds):
            print(chaos.round(options.seed + number, tally), flush=True)
    except KeyboardInterrupt:
        print("interrupted; so far:", file=sys.stderr)
        return 130
    finally:
        Console().print(_table(tally))
    return 1 if tally.failures else 0


class Chaos:
    """The data, the undisturbed run, and rounds to compare with it."""

    def __init__(self, options: Options, out: Path, *, epochs: int = EPOCHS) -> None:
        self._options, self._out, self._epochs = options, out, epochs
        self.data = write_images(out / "data")
        self.undisturbed = out / "undisturbed"
        training = self._training("undisturbed", checkpoint_every=5)
        try:
            training.start(self.undisturbed / "run")
            if code := training.wait():
                raise Failure(f"the undisturbed run has ended with exit code {code}")
        finally:
            training.close()
        self._journal = training.journal
        images = STEPS * PER_STEP
        if problems := whole_epochs(self._journal, steps=STEPS, images=images):
            raise Failure(f"the undisturbed run: {problems[0]}")

    def round(self, seed: int, tally: Tally, faults: Sequence[str] = ()) -> str:
        """Play one, count what has happened, and say it in a line. faults: those and no others."""
        began = time.monotonic()
        rng = random.Random(seed)
        pool = self._options.faults or tuple(FAULTS)
        faults = faults or rng.choices(pool, k=rng.randint(6, 10))
        # Loader processes would inherit the limit of a full disk, for their shared memory too.
        workers = 0 if {"fill", "fill-kill"} & {*faults} else rng.choice([0, 0, 1])
        training = self._training(
            f"round-{seed}",
            checkpoint_every=rng.randint(3, 7),
            keep_checkpoints=rng.randint(2, 4),
            workers=workers,
        )
        scene = Scene(training, self.data)
        before = {file: checksum(file) for file in self.data.rglob("*.jpg")}
        hits: Counter[str] = Counter()
        problems: list[str] = []
        try:
            missed = self._play(scene, rng, faults, hits)
        except Failure as failure:
            missed, problems = 0, [f"the training {failure}"]
        finally:
            training.close()
            tally.faults.update(hits)
            # Of those that came as far as to train; torchrun starts some by itself.
            restarts = len({n["pid"] for n in training.journal if n.get("rank") == 0}) - 1
            tally.restarts += restarts
        if not problems:
            problems += compare(scene.run, self.undisturbed / "run", damaged=scene.damaged)
            problems += account(training.journal, self._journal)
        if before != {file: checksum(file) for file in self.data.rglob("*.jpg")}:
            problems.append("chaos.py has not put back all images")
        tally.rounds += 1
        tally.missed += missed
        tally.failures += bool(problems)
        if not problems and not self._options.keep:
            shutil.rmtree(training.folder)
        said = ", ".join(f"{kind} {count}" for kind, count in sorted(hits.items())) or "none"
        line = f"seed {seed}: {said}; {restarts} restarts, "
        line += f"{time.monotonic() - began:.0f} s: "
        return line + (self._failed(seed, training.folder, problems) if problems else "equal")

    def _play(
        self, scene: Scene, rng: random.Random, faults: Sequence[str], hits: Counter[str]
    ) -> int:
        """A run with its faults, to its end; returns how many of them came to nothing."""
        training, missed = scene.training, 0
        training.start(scene.run)
        for place, name in enumerate(faults):
            if not training.reach(rng.randint(1, 20)):
                missed += len(faults) - place
                break
            time.sleep(rng.uniform(0, 0.1))
            kinds = FAULTS[name](scene, rng)
            hits.update(kinds)
            missed += not kinds
        if code := training.wait():
            raise Failure(f"has ended with exit code {code}")
        return missed

    def _failed(self, seed: int, folder: Path, problems: Sequence[str]) -> str:
        command = [
            "python",
            "tests/helpers/chaos.py",
            "--rounds",
            "1",
            "--seed",
            str(seed),
            "--out",
            "NEW",
        ]
        command += ["--ranks", str(self._options.ranks), "--loader", self._options.loader]
        command += ["--faults", *self._options.faults] if self._options.faults else []
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        return (
            f"FAILED: {'; '.join(problems[:4])}{more}\n  kept: {folder}\n"
            f"  once more: {shlex.join(command)}"
        )

    def _training(self, name: str, **settings: Any) -> Training:
        own = {key.replace("_", "-"): value for key, value in settings.items()}
        flags: dict[str, Any] = SETTINGS | {"data": self.data, "epochs": self._epochs} | own
        flags["loader"] = self._options.loader
        words = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
        return Training(self._out / name, words, ranks=self._options.ranks)


def write_images(root: Path) -> Path:
    """Noise with one channel raised a little: classes that take some epochs to be learned."""
    rng = np.random.default_rng(0)
    for split, count in (("train", PER_CLASS), ("test", 6)):
        for label in range(CLASSES):
            folder = root / split / "abc"[label]
            folder.mkdir(parents=True)
            for number in range(count):
                image = rng.integers(0, 200, (20, 20, 3))
                image[..., label] += 12
                Image.fromarray(image.astype(np.uint8)).save(folder / f"{number:02}.jpg")
    return root


def _table(tally: Tally) -> Table:
    table = Table("fault", "times")
    for kind, count in sorted(tally.faults.items()):
        table.add_row(kind, str(count))
    table.add_section()
    table.add_row("all", str(sum(tally.faults.values())))
    table.add_row("came to nothing (not counted)", str(tally.missed))
    table.add_row("restarts", str(tally.restarts))
    table.add_row("rounds", str(tally.rounds))
    table.add_row("failures", str(tally.failures))
    return table


if __name__ == "__main__":
    sys.exit(cli.run(main))
