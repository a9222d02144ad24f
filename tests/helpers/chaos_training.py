"""A training under chaos.py's eyes: started, watched through FIFOs, stopped, started again."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chaos_driver
import chaos_launchers

PATIENCE = 90.0
"""Seconds without a step, or until an end, after which a training is taken to hang."""
_PRELOADED = [
    *("chaos_driver", "chaos_launchers", "fastaug.pipelines.loader", "tyro"),
    *("PIL.JpegImagePlugin", "torch._dynamo", "torch.utils.tensorboard", "obstore.store"),
]
"""Modules that a training loads: they take seconds, and a process is started often."""


def start_forkserver(environment: Mapping[str, str]) -> None:
    """Start the process that trainings are forked from, with these variables."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        _context().Process(target=int).start()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


@dataclass(frozen=True)
class Launch:
    """How the processes of a training are started."""

    ranks: int = 1
    is_command: bool = False
    """Ranks are started by the command torchrun, as users do, instead of forked."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that differ from those of start_forkserver."""
    networks: tuple[str, ...] = ()
    """Files of the network namespaces, one for each rank; empty: torchrun on this machine."""
    address: str = ""
    """Address of rank 0 in its namespace."""


class Failure(Exception):
    """The training did what it must not do."""


class Channel:
    """A FIFO whose lines go into a file and to whoever wants them."""

    def __init__(self, file: Path, on_line: Callable[[str], None]) -> None:
        self.fifo = str(file.with_suffix(".fifo"))
        os.mkfifo(self.fifo)
        # For writing too: it never comes to an end, whoever else writes and ends.
        self._descriptor = os.open(self.fifo, os.O_RDWR | os.O_NONBLOCK)
        self._file, self._on_line = file, on_line
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rest = b""
        with open(self._file, "ab", buffering=0) as file:
            while True:
                ready, _, _ = select.select([self._descriptor], [], [], 0.05)
                if not ready:
                    if self._closing:
                        return
                    continue
                read = os.read(self._descriptor, 1 << 16)
                file.write(read)
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    self._on_line(line.decode(errors="replace"))

    def close(self) -> None:
        """After what was written has been read."""
        self._closing = True
        self._thread.join()
        os.close(self._descriptor)
        os.unlink(self.fifo)


class Training:
    """One run through all its processes: a single one, or a launcher and its ranks."""

    def __init__(self, folder: Path, flags: Sequence[str], launch: Launch) -> None:
        """folder: for the journal and the log; flags: of the training, without --out."""
        self.folder, self.flags, self.launch = folder, flags, launch
        self.ranks = launch.ranks
        self.starts = 0
        self.journal: list[dict[str, Any]] = []
        """What the processes noted, and {"least", "most"}: bounds of the step from which the
        processes after that note may start."""
        self.log: list[str] = []
        self._first = 0
        """Where the journal of the newest start begins."""
        self._noted = threading.Condition()
        folder.mkdir(parents=True)
        self._channels = (
            Channel(folder / "journal.jsonl", self._note),
            Channel(folder / "train.log", self.log.append),
        )
        self._process: Any = None

    def _note(self, line: str) -> None:
        with self._noted:
            self.journal.append(json.loads(line))
            self._noted.notify_all()

    # --- starting and ending ---

    def start(self, out: Path) -> None:
        self.starts += 1
        self._first = len(self.journal)
        journal, log = (channel.fifo for channel in self._channels)
        flags = [*self.flags, "--resume", "auto", "--out", str(out)]
        launch = self.launch
        if launch.is_command:
            self._process = self._torchrun(journal, log, flags)
            return
        target: Any = chaos_driver.process
        more: tuple[Any, ...] = ()
        if launch.networks:
            target, more = chaos_launchers.on_hosts, (launch.networks, launch.address)
        elif self.ranks > 1:
            target, more = chaos_launchers.torchrun, (self.ranks,)
        args = (journal, log, flags, launch.environment, *more)
        self._process = _context().Process(target=target, args=args, daemon=False)
        self._process.start()

    def _torchrun(self, journal: str, log: str, flags: Sequence[str]) -> subprocess.Popen:
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        try:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run"),
                    *chaos_launchers.torchrun_flags(self.ranks),
                    *(chaos_driver.__file__, journal, *flags),
                ],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | self.launch.environment,
            )
        finally:
            os.close(output)

    @property
    def pid(self) -> int:
        """The process that was started: the training, or the launcher of its ranks."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        if self._process is None:
            return None
        is_popen = isinstance(self._process, subprocess.Popen)
        return self._process.poll() if is_popen else self._process.exitcode

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit code, once there is one."""
        if isinstance(self._process, subprocess.Popen):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        else:
            self._process.join(seconds)
        if self.exit_code is None:
            raise Failure(f"has not ended for {seconds:g} s")
        time.sleep(0.1)  # until its last lines are read
        return self.exit_code

    def kill(self) -> None:
        """All of its processes, as when a machine goes down."""
        if self._process is None or self.exit_code is not None:
            return
        for pid in (self.pid, *descendants(self.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()

    def close(self) -> None:
        self.kill()
        for channel in self._channels:
            channel.close()

    # --- watching ---

    def pids(self) -> list[int]:
        """The newest process of each rank that has started in this start, by rank."""
        newest = {
            note["rank"]: note["pid"] for note in self.journal[self._first :] if "pid" in note
        }
        return [newest[rank] for rank in sorted(newest)]

    def steps(self) -> list[int]:
        """The steps that the newest process of rank 0 has begun, once for each part."""
        return self._steps(self.pids()[:1])

    def _steps(self, pids: Sequence[int]) -> list[int]:
        notes = self.journal[self._first :]
        return [note["step"] for note in notes if note.get("pid") in pids and "step" in note]

    def reach(self, steps: int) -> bool:
        """Wait for so many further parts of steps; False if the training has ended well instead."""
        target = len(self.steps()) + steps
        return self.until(lambda: len(self.pids()) == self.ranks and len(self.steps()) >= target)

    def progress(self) -> bool:
        """Wait for a step of any process; False if the training has ended well instead."""
        first = len(self.journal)
        return self.until(lambda: any("step" in note for note in self.journal[first:]))

    def ends_or_continues(self, seconds: float = 60.0) -> bool:
        """Wait until the process has ended, or has made 50 further parts of steps; whether it has
        ended with an error."""
        target, give_up = len(self.steps()) + 50, time.monotonic() + seconds
        while self.exit_code is None and time.monotonic() < give_up:
            if len(self.steps()) >= target:
                return False
            time.sleep(0.05)
        return bool(self.exit_code)

    def until(self, happened: Callable[[], bool]) -> bool:
        """Wait until this has happened; False if the training has ended well instead."""
        give_up = time.monotonic() + PATIENCE
        while True:
            with self._noted:
                if happened():
                    return True
                self._noted.wait(0.05)
            if self.exit_code is not None:
                if self.exit_code:
                    raise Failure(f"has ended by itself, with exit code {self.exit_code}")
                return False
            if time.monotonic() > give_up:
                raise Failure(f"no step for {PATIENCE:g} s")

    def bound(self, least: int, most: int | None = None) -> None:
        """The step from which the processes that start from now on may continue."""
        with self._noted:
            self.journal.append({"least": least, "most": most})

    def logged(self, line: int, *texts: str) -> bool:
        """Whether the log, from this line on, has all texts, however its lines were broken."""
        said = "".join("".join(self.log[line:]).split())
        return all("".join(text.split()) in said for text in texts)


def descendants(pid: int) -> list[int]:
    """The children of a process, and theirs."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in thread.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found
