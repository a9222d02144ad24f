"""A training that chaos.py disturbs: its run folder, what was done to it, stopping and resuming."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from chaos_settings import Setting, Surroundings
from chaos_training import Failure, Training, descendants


class Scene:
    """A training, the folder it writes to, and what was done to its files."""

    def __init__(self, training: Training, setting: Setting, surroundings: Surroundings) -> None:
        self.training, self.setting, self.surroundings = training, setting, surroundings
        self.run = training.folder / "run"
        self.damaged: set[str] = set()
        """Checksums of files that were damaged on purpose."""
        surroundings.shim.watch(self.run)

    def is_logged(self, line: int, *texts: str) -> bool:
        """Whether the training has logged all texts, from this line of the log on."""
        self.training.reach(1)
        return self.training.logged(line, *texts)

    # --- checkpoints: the newest step, or last.pt, or an older step: the first that is whole

    def checkpoints(self) -> list[Path]:
        steps = sorted((self.run / "checkpoints").glob("step-*.pt"), reverse=True)
        last = self.run / "last.pt"
        return [path for path in (*steps[:1], last, *steps[1:]) if path.exists()]

    def next_start(self) -> int | None:
        """The step that a resumed training begins with; None: no checkpoint is whole."""
        found = self.checkpoints()
        for path in found:
            with suppress(FileNotFoundError):  # an old one, of a run that continues
                if checksum(path) not in self.damaged:
                    return int(torch.load(path, weights_only=True)["step"])
        return None if found else 0

    def resume(self) -> None:
        """Start it again, as a user does: in another folder, if no checkpoint is intact."""
        training, start = self.training, self.next_start()
        training.bound(start or 0, start or 0)
        line = len(training.log)
        training.start(self.run)
        if start is None:
            complaint = "all checkpoints are damaged"
            if training.ranks > 1:  # torchrun would try again, and again
                training.until(lambda: training.logged(line, complaint))
                training.kill()
            elif (code := training.wait()) != 2 or not training.logged(line, complaint):
                raise Failure(f"no checkpoint is whole, and it ends with exit code {code}")
            self.run = self.run.with_name(f"run-{training.starts}")
            self.surroundings.shim.watch(self.run)
            training.bound(0, 0)
            training.start(self.run)

    def stop(self, signum: int) -> bool:
        """Send a signal to the training, or to its launcher; returns whether that has ended it."""
        training = self.training
        begun = training.steps()
        ranks = descendants(training.pid) if training.ranks > 1 else []
        send(training.pid, signum)
        if signum == signal.SIGKILL:  # a torchrun that is killed leaves its ranks behind
            for pid in ranks:
                send(pid, signum)
        code = training.wait()
        for pid in ranks:
            _wait_for_end(pid)
        self.check_files()
        if code == 0:
            return False
        expected = -signum if signum == signal.SIGKILL else 128 + signum
        if training.ranks == 1 and code != expected:
            raise Failure(f"exit code {code} after {signal.Signals(signum).name}")
        if signum != signal.SIGKILL and begun:
            start = self.next_start()
            if start is None or start < begun[-1]:
                name = signal.Signals(signum).name
                raise Failure(f"{name} in step {begun[-1]} or later, and saved is step {start}")
        return True

    def resume_after(self, expected: int) -> None:
        """Resume a single process that ends by itself, with this exit code."""
        if (code := self.training.wait()) != expected:
            raise Failure(f"has ended with exit code {code}, not {expected}")
        self.check_files()
        self.resume()

    @property
    def killed(self) -> str:
        """The fault that SIGKILL of the training is."""
        return "SIGKILL" if self.training.ranks == 1 else "SIGKILL of the launcher and all ranks"

    def check_files(self) -> None:
        """Whatever has ended the training: a file is complete or absent."""
        for path in (*self.run.rglob("*.pt"), *self.run.glob("*.json")):
            try:
                if path.suffix == ".json":
                    json.loads(path.read_text())
                elif checksum(path) not in self.damaged:
                    torch.load(path, weights_only=True)
            except Exception as error:
                raise Failure(f"has left half of {path.relative_to(self.run)}: {error}") from error


Strike = Callable[[Scene, random.Random], list[str]]
"""Disturbs a training; returns the kinds of faults that have hit it."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to a training."""

    strike: Strike
    applies: Callable[[Setting], bool] = lambda _: True
    weight: float = 1.0
    """How often it is drawn, relative to others."""


def send(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError):  # it has ended: with what, is looked at later
        os.kill(pid, signum)


def _wait_for_end(pid: int) -> None:
    """Wait for a process that is not a child of this one."""
    for _ in range(600):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.05)
    raise Failure(f"process {pid} lives on, and torchrun has ended")


def checksum(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
