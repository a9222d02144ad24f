"""Ctrl-C, SIGTERM and SIGUSR1 as requests to stop, which training checks when it can save."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from types import FrameType
from typing import Any

# Clusters send SIGUSR1 before a time limit; Windows does not have it.
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)


class TrainingInterruptedError(Exception):
    """A signal asked the run to stop; exit_code follows the shell's convention."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


class StopSignals:
    """Within the context, the first signal is recorded and the second ends the process."""

    def __init__(self) -> None:
        self._signum = 0
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._previous: dict[int, Any] = {}
        self._arrived = 0

    def __enter__(self) -> StopSignals:
        for signum in STOP_SIGNALS:
            self._previous[signum] = signal.signal(signum, self._record)
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._previous_fd = _report_to(self._writer.fileno())
        return self

    def __exit__(self, *_error: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        _report_to(self._previous_fd)
        self._reader.close()
        self._writer.close()

    def arrived(self) -> int:
        """The signal that was received, or 0; for other threads than the main one.

        Python runs signal handlers in the main thread, which may wait in C++, for example for
        another rank. The number of a signal reaches a socket in any case.
        """
        with suppress(OSError):  # nothing to read, or closed
            for signum in self._reader.recv(64):
                if signum in STOP_SIGNALS:
                    self._arrived = self._arrived or signum
        return self._arrived

    @property
    def signum(self) -> int:
        """The signal that was received, or 0.

        If torchrun has died, this is SIGTERM: its processes would keep training next to their
        successors.
        """
        if self._signum == 0 and self._launcher not in (0, os.getppid()):
            self._record(signal.SIGTERM, None)
        return self._signum

    def check(self) -> None:
        """Raise TrainingInterruptedError if a signal was received."""
        if self._signum:
            raise TrainingInterruptedError(self._signum)

    def _record(self, signum: int, _frame: FrameType | None) -> None:
        if self._signum:
            os._exit(128 + signum)
        self._signum = signum
        name = signal.Signals(signum).name
        # Not print(): the signal may have interrupted one, and the terminal may be gone.
        with suppress(OSError):
            message = "saving a checkpoint; a second Ctrl-C or signal quits immediately"
            os.write(2, f"\n{name}: {message}\n".encode())


_reports_here = False
"""True while the numbers of signals go to a socket of this process."""


def _report_to(descriptor: int) -> int:
    """Let Python write the number of each signal to a socket, -1 for none; returns the previous."""
    global _reports_here
    _reports_here = descriptor != -1
    return signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)


def _report_no_more() -> None:
    """In a forked process: a signal to a loader's worker is none to the training."""
    if _reports_here:
        _report_to(-1)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_report_no_more)
