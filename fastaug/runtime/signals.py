"""Ctrl-C, SIGTERM and SIGUSR1 as requests to stop, which training checks when it can save."""

from __future__ import annotations

import os
import signal
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

    def __enter__(self) -> StopSignals:
        for signum in STOP_SIGNALS:
            self._previous[signum] = signal.signal(signum, self._record)
        return self

    def __exit__(self, *_error: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

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
