"""Rounds of chaos.py: a training with its faults, compared with an undisturbed one."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_check import account, compare, whole_epochs
from chaos_faults import FAULTS
from chaos_scene import Scene, checksum
from chaos_settings import BASE, EPOCHS, PER_STEP, SETTINGS, STEPS, Setting, Surroundings
from chaos_training import Failure, Training


@dataclass
class Result:
    """What has happened in a round."""

    setting: str
    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    """Kind -> how many have hit."""
    missed: int = 0
    """Faults that came too late, or that nothing noticed."""
    restarts: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    """How the run differs from the undisturbed one."""
    is_enumerated: bool = False
    kept: str = ""
    """The folder of a round that has failed."""

    def line(self) -> str:
        hits = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        line = f"{self.setting}, seed {self.seed}: {hits or 'no faults'}; {self.restarts} restarts"
        line += f", {self.seconds:.0f} s: "
        if not self.problems:
            return line + "equal"
        more = f" (and {len(self.problems) - 4} more)" if len(self.problems) > 4 else ""
        return f"{line}FAILED: {'; '.join(self.problems[:4])}{more}\n  kept: {self.kept}"


class Stage:
    """Undisturbed runs, one for each setting, and rounds to compare with them."""

    def __init__(
        self, surroundings: Surroundings, *, epochs: int = EPOCHS, keep: bool = False
    ) -> None:
        """keep: keep the folders of all rounds, not only of those that fail."""
        self.surroundings, self._epochs, self._keep = surroundings, epochs, keep
        self._journals: dict[str, list[dict[str, Any]]] = {}

    def undisturbed(self, name: str) -> Path:
        """The run folder of an undisturbed run of a setting."""
        folder = self.surroundings.folder / f"undisturbed-{name}-{self._epochs}"
        if folder.name in self._journals:
            return folder / "run"
        self.surroundings.shim.reset()
        training = self.training(folder.name, SETTINGS[name], checkpoint_every=5)
        try:
            training.start(folder / "run")
            if code := training.wait(300):
                raise Failure(f"the undisturbed run has ended with exit code {code}: {folder}")
        finally:
            training.close()
        if problems := whole_epochs(training.journal, steps=STEPS, images=STEPS * PER_STEP):
            raise Failure(f"the undisturbed run: {problems[0]}")
        self._journals[folder.name] = training.journal
        return folder / "run"

    def training(self, folder: str, setting: Setting, **changes: Any) -> Training:
        own = {name.replace("_", "-"): value for name, value in changes.items()}
        flags = {**BASE, **setting.flags, "epochs": self._epochs, **own}
        flags["data"] = self.surroundings.data(setting)
        words = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
        launch = self.surroundings.launch(setting)
        return Training(self.surroundings.folder / folder, words, launch)

    def play(self, name: str, seed: int, faults: Sequence[str] = ()) -> Result:
        """Play a round. faults: names of those to draw from; default: all that apply."""
        setting = SETTINGS[name]
        undisturbed = self.undisturbed(name)
        result, began = Result(name, seed), time.monotonic()
        rng = random.Random(f"{name} {seed}")
        pool = {n: FAULTS[n] for n in faults or FAULTS if FAULTS[n].applies(setting)}
        weights = [fault.weight for fault in pool.values()]
        chosen = rng.choices(list(pool), weights, k=rng.randint(8, 12))
        return self._play(result, chosen, rng, undisturbed, began)

    def play_exactly(self, name: str, seed: int, faults: Sequence[str]) -> Result:
        """Play a round with these faults, in this order."""
        undisturbed = self.undisturbed(name)
        began, rng = time.monotonic(), random.Random(seed)
        return self._play(Result(name, seed), faults, rng, undisturbed, began)

    def _play(
        self,
        result: Result,
        faults: Sequence[str],
        rng: random.Random,
        undisturbed: Path,
        began: float,
    ) -> Result:
        setting, surroundings = SETTINGS[result.setting], self.surroundings
        surroundings.shim.reset()
        training = self.training(
            f"{result.setting}-{result.seed}",
            setting,
            checkpoint_every=rng.randint(3, 7),
            keep_checkpoints=rng.randint(2, 4),
            **_workers(setting, faults, rng),
        )
        scene = Scene(training, setting, surroundings)
        before = _checksums(surroundings)
        with self.judged(result, scene, undisturbed):
            self._disturb(scene, rng, faults, result)
        if before != _checksums(surroundings):
            result.problems.append("chaos.py has not restored all data")
        result.seconds = time.monotonic() - began
        return result

    @contextmanager
    def judged(self, result: Result, scene: Scene, undisturbed: Path) -> Iterator[None]:
        """A context in which a training runs to its end; after it, the problems are in `result`."""
        training, surroundings = scene.training, self.surroundings
        try:
            yield
        except Failure as failure:
            result.problems.append(f"the training {failure}")
        finally:
            training.close()
            surroundings.shim.reset()
            surroundings.cache.empty()
            # Those that trained; torchrun starts some by itself.
            pids = {note["pid"] for note in training.journal if note.get("rank") == 0}
            result.restarts += len(pids) - 1
        if not result.problems:
            name = undisturbed.parent.name
            result.problems += compare(scene.run, undisturbed, damaged=scene.damaged)
            result.problems += account(training.journal, self._journals[name])
        if result.problems or self._keep:
            result.kept = str(training.folder)
        else:
            shutil.rmtree(training.folder)

    def _disturb(
        self, scene: Scene, rng: random.Random, faults: Sequence[str], result: Result
    ) -> None:
        """A run with its faults, to its end."""
        training = scene.training
        training.start(scene.run)
        for place, name in enumerate(faults):
            if not training.reach(rng.randint(1, 20)):
                result.missed += len(faults) - place
                break
            time.sleep(rng.uniform(0, 0.1))
            kinds = FAULTS[name].strike(scene, rng)
            result.faults.update(kinds)
            result.missed += not kinds
        if code := training.wait():
            raise Failure(f"has ended with exit code {code}")


def _workers(setting: Setting, faults: Sequence[str], rng: random.Random) -> dict[str, int]:
    # Loader processes would inherit the limit of a full disk, for their shared memory too; those
    # of remote data are not forked, and start slowly.
    if {"fill", "fill-kill"} & {*faults} or setting.data == "remote":
        return {"workers": 0}
    return {"workers": setting.flags.get("workers") or rng.choice([0, 0, 1])}


def _checksums(surroundings: Surroundings) -> dict[Path, str]:
    """The images and shards, as they lie on the disk."""
    files = (surroundings.folder / "data").rglob("*.*")
    return {file: checksum(file) for file in files if file.is_file()}
