"""A logger in a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from PIL.Image import Image

from fastaug.errors import describe_error
from fastaug.runs.loggers.base import Logger


class BackgroundLogger:
    """Calls a logger from a thread, so that a slow or lost network neither delays nor ends the
    training. After an error it pauses; what is logged meanwhile waits."""

    _PAUSE = 60.0
    """Seconds until the next attempt after an error."""
    _CLOSING = 30.0
    """Seconds that the end of a run waits for what is left to log."""
    _MOST_WAITING = 10_000
    """Records that wait at most; further ones are dropped."""

    def __init__(self, name: str, logger: Logger, say: Callable[[str], None]) -> None:
        self._name, self._logger, self._say = name, logger, say
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_closing = self._is_started = self._has_failed = False
        self._summary: dict[str, Any] | None = None
        self._lost = 0
        self._thread = threading.Thread(target=self._work, name=f"log {name}", daemon=True)

    def start(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> None:
        self._start = partial(self._logger.start, folder, config, resume_step)
        self._thread.start()

    def log(self, step: int, values: dict[str, float]) -> None:
        self._add(partial(self._logger.log, step, values))

    def picture(self, name: str, picture: Image) -> None:
        self._add(partial(self._logger.picture, name, picture))

    def close(self, summary: dict[str, Any] | None) -> None:
        """Log what is left, for a limited time."""
        with self._changed:
            self._summary, self._is_closing = summary, True
            self._changed.notify()
        self._thread.join(self._CLOSING)
        self._has_failed = True  # nothing is printed after the end
        if left := self._lost + len(self._calls):
            self._say(
                f"warning: --log {self._name}: {left:,} records were not logged; metrics.jsonl has "
                "them"
            )
        elif self._thread.is_alive():
            self._say(
                f"warning: --log {self._name}: not finished after {self._CLOSING:g} s; not waiting"
            )

    def _add(self, call: Callable[[], None]) -> None:
        with self._changed:
            if len(self._calls) < self._MOST_WAITING:
                self._calls.append(call)
                self._changed.notify()
            else:
                self._lost += 1

    def _work(self) -> None:
        while not self._is_started:
            is_last = self._is_closing
            self._is_started = self._try(self._begin)
            if is_last and not self._is_started:
                return
        while (call := self._next()) is not None:
            self._lost += not self._try(call)
        self._try(partial(self._logger.close, self._summary))

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next call; None at the end of the run."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._is_closing)
            return self._calls.popleft() if self._calls else None

    def _begin(self) -> None:
        if where := self._start():
            self._say(f"logging to {self._name}: {where}")

    def _try(self, call: Callable[[], None]) -> bool:
        """True if the call succeeded; otherwise pauses, unless the run ends."""
        try:
            call()
            return True
        except Exception as error:  # a service's or one's own code may raise anything
            if not self._has_failed:
                self._has_failed = True
                self._say(
                    f"warning: --log {self._name} failed ({describe_error(error)}); the training "
                    f"continues, and it is tried again every {self._PAUSE:g} s"
                )
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, self._PAUSE)
            return False
