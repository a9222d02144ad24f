"""Ctrl-C and SIGTERM as a request that the training loop answers when it can save."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any


class TrainingInterruptedError(Exception):
    """A signal asked the run to end; exit_code is the shell's convention for it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


class StopSignals:
    """Within the context the first signal is noted and the second one ends the process at once."""

    def __init__(self) -> None:
        self._signum = 0
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_error: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    @property
    def signum(self) -> int:
        """The signal that has come, or 0. A torchrun that is gone is one: what it has started would
        train on beside what is started next."""
        if self._signum == 0 and self._launcher not in (0, os.getppid()):
            self._note(signal.SIGTERM, None)
        return self._signum

    def check(self) -> None:
        """Raise TrainingInterruptedError if a signal has come."""
        if self._signum:
            raise TrainingInterruptedError(self._signum)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if self._signum:
            os._exit(128 + signum)
        self._signum = signum
        name = signal.Signals(signum).name
        # Not print: the signal may have come in the middle of one, and the terminal may be gone.
        with suppress(OSError):
            os.write(2, f"\n{name}: saving, then ending; once more to end at once\n".encode())
