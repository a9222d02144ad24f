"""The watchdog: ends a run that makes no progress, with the stacks of its threads."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fastaug.runtime.folder_files import create_file

EXIT_CODE = 75
"""EX_TEMPFAIL in sysexits.h: trying again may help."""

_LAST_RESORT = 60.0
"""Time limit in seconds for the last save of a process that hangs."""

_SIGNAL_SECONDS = 15.0
"""Time in seconds for a step to end after a signal. torchrun kills its ranks after 30."""

_STDERR = 2
"""Not sys.stderr, which may have been replaced by an object without a descriptor."""


class Watchdog:
    """Within the context, `seconds` without a beat end the process; 0: never.

    So does a signal that the training does not answer, because a step does not end: it waits for a
    rank that cannot be reached, or for data.

    A thread counts only the time in which it runs, so a process that was stopped (SIGSTOP, a laptop
    that sleeps) and continues does not count as hanging. If Python itself is stuck, in code that
    holds the GIL, faulthandler's timer ends the process after twice the time plus a minute. That
    timer follows the clock, and also ends a process that was stopped for that long.
    """

    def __init__(
        self,
        seconds: float,
        *,
        name: str,
        file: Path | None,
        save: Callable[[], None],
        signal_received: Callable[[], int] = lambda: 0,
    ) -> None:
        """name: of this process, for messages; file: gets the stacks, besides stderr; save: called
        before the process ends, in its own thread; signal_received: the number of the signal that
        asks the process to stop, or 0."""
        self._seconds, self._name, self._file, self._save = seconds, name, file, save
        self._signal_received = signal_received
        self._is_stopping = False
        self._beats = 0
        self._doing = "starting"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fastaug-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        if self._seconds:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def beat(self, doing: str) -> None:
        """Report progress, and what comes next."""
        self._doing = doing
        self._beats += 1

    def stopping(self) -> None:
        """Report that the training has answered a signal or an error, and saves."""
        self._is_stopping = True
        self.beat("saving a checkpoint")

    def _watch(self) -> None:
        period = min(1.0, self._seconds / 5)
        before, silent, last_beat, signaled = time.monotonic(), 0.0, -1, 0.0
        while not self._stop.wait(period):
            now = time.monotonic()
            elapsed, before = min(now - before, 2 * period), now
            silent += elapsed
            if last_beat != self._beats:
                last_beat, silent = self._beats, 0.0
                _end_later(2 * self._seconds + _LAST_RESORT)
            if silent >= self._seconds:
                self._end_stalled()
            if not self._is_stopping and (signum := self._signal_received()):
                signaled += elapsed
                if min(signaled, silent) >= _SIGNAL_SECONDS:
                    self._end_unanswered(signal.Signals(signum))

    def _end_unanswered(self, signum: signal.Signals) -> None:
        # The main thread may be in a slow save, which this one has to wait for.
        _end_later(2 * self._seconds + _LAST_RESORT)
        line = (
            f"error: {self._name} could not end its step within {_SIGNAL_SECONDS:g} s of "
            f"{signum.name} while {self._doing}; saving the steps before it\n"
        )
        with suppress(OSError):
            os.write(_STDERR, line.encode())
        self._save_and_exit(128 + signum, limit=self._seconds)

    def _end_stalled(self) -> None:
        _end_later(2 * _LAST_RESORT)
        line = (
            f"error: {self._name} has made no progress for {self._seconds:g} s (--stall-timeout) "
            f"while {self._doing}; the stacks of its threads:\n"
        )
        with suppress(OSError):
            self._write_stacks(line, _STDERR)
        if self._file is not None:
            with suppress(OSError), open(create_file(self._file), "wb") as file:
                self._write_stacks(line, file.fileno())
        for child in multiprocessing.active_children():  # workers write their stacks to stderr
            if hasattr(signal, "SIGUSR1") and child.pid:
                with suppress(OSError):
                    os.kill(child.pid, signal.SIGUSR1)
        self._save_and_exit(EXIT_CODE, limit=_LAST_RESORT)

    def _save_and_exit(self, code: int, *, limit: float) -> None:
        # In a thread: a GPU or the disk may be what hangs, and the process must end with its exit
        # code. The copy of the weights waits for all work that the GPU was given before.
        saving = threading.Thread(target=self._save, name="fastaug-last-save", daemon=True)
        saving.start()
        saving.join(limit)
        if saving.is_alive():
            line = (
                f"error: {self._name} could not save its last steps within {limit:g} s, "
                "because a GPU or the disk does not respond; --resume continues from the last "
                "checkpoint\n"
            )
            with suppress(OSError):
                os.write(_STDERR, line.encode())
        for child in multiprocessing.active_children():  # those that hang would outlive this one
            with suppress(OSError):
                child.kill()
        os._exit(code)

    @staticmethod
    def _write_stacks(line: str, descriptor: int) -> None:
        os.write(descriptor, line.encode())
        faulthandler.dump_traceback(descriptor, all_threads=True)


def _end_later(seconds: float) -> None:
    """End the process later, in faulthandler's thread, which works even if Python is stuck.
    Replaces the previous timer."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
