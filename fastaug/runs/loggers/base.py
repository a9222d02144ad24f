"""The interface of a logger, and what the loggers of services share."""

from __future__ import annotations

import json
import re
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from PIL.Image import Image

from fastaug.runtime.folder_files import create_file, read_json_object

PROJECT = "fastaug"
"""Project or experiment of a service, unless its own environment variable names another."""


class Logger(Protocol):
    """Receives the values of a run on rank 0.

    Any object with these methods is a logger. start() is called before all others, close() after
    them, each from the same thread. An error is reported once and does not end the run: what could
    not be logged is lost, and metrics.jsonl has it.
    """

    def start(self, folder: Path, config: dict[str, Any], resume_step: int | None) -> str | None:
        """Begin a run, or continue it; called again after an error.

        config: all settings by flag name, with lists for tuples. resume_step: the step from which
        the run continues, None for a new run. Returns where the run can be seen, or None.
        """

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log one record after a step. values: {"train/loss": 1.5}; they may be NaN or infinite."""

    def picture(self, name: str, picture: Image) -> None:
        """Log a picture."""

    def close(self, summary: dict[str, Any] | None) -> None:
        """End the run. summary: as in summary.json; None if the run was interrupted."""


METHODS: dict[str, tuple[str, ...]] = {
    "start": ("folder", "config", "resume_step"),
    "log": ("step", "values"),
    "picture": ("name", "picture"),
    "close": ("summary",),
}
"""Method of a logger -> its arguments, all positional."""


class ServiceRun:
    """A run of a service that belongs to a run folder: its id, and the last step of each kind of
    record. Kept in a file of the folder, so that a resumed run continues the same run of the
    service, and does not log a step twice."""

    def __init__(self, file: Path, *, resumed: bool) -> None:
        self._file = file
        self.id, self._steps = "", dict[str, int]()
        if resumed:
            self._read()

    @staticmethod
    def new_id() -> str:
        return uuid.uuid4().hex[:12]

    def _read(self) -> None:
        """A file that is missing or damaged means a new run of the service."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            state = read_json_object(self._file)
            steps = {str(kind): int(step) for kind, step in state["steps"].items()}
            if re.fullmatch(r"[\w-]{1,64}", state["id"]):
                self.id, self._steps = state["id"], steps

    def keep(self, service_id: str) -> None:
        """Keep the id of the service's run."""
        self.id = service_id
        self._write()

    def is_new(self, step: int, values: dict[str, float]) -> bool:
        """True if this record has not been logged yet; it counts as logged from now on."""
        kind = next(iter(values), "").partition("/")[0]
        if step <= self._steps.get(kind, -1):
            return False
        self._steps[kind] = step
        self._write()
        return True

    def _write(self) -> None:
        # Renamed, but not flushed to the disk as atomic_write does: it is written often, and after
        # a power failure a few steps may be logged twice.
        temporary = self._file.with_name(f".{self._file.name}.new")
        with open(create_file(temporary), "w", encoding="utf-8") as file:
            json.dump({"id": self.id, "steps": self._steps}, file)
        temporary.replace(self._file)
