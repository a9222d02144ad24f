"""What a sweep shows while it runs: a bar for all runs, and one for each training here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fastaug.errors import printable
from fastaug.experiments.sweep_study import Standing


class SweepProgress:
    """The bars are drawn in a terminal alone; a line for each run goes anywhere. Thread-safe."""

    def __init__(self, title: str, runs: int) -> None:
        self._console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TextColumn("eta"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            disable=not self._console.is_terminal,
            speed_estimate_period=24 * 3600,
        )
        self._title, self._runs = title, runs
        self._all = self._progress.add_task(title, total=runs, unit="runs", status="")

    def __enter__(self) -> SweepProgress:
        self._progress.start()
        return self

    def __exit__(self, *_error: Any) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        now = time.strftime("%H:%M:%S")
        self._console.print(printable(f"{now} {text}"), markup=False, soft_wrap=True)
        sys.stdout.flush()  # into a file as well: a sweep takes long

    def stand(self, standing: Standing) -> None:
        status = f"{len(standing.running)} running"
        if standing.failed:
            status += f", {len(standing.failed)} failed"
        self._progress.update(self._all, completed=standing.settled, status=status)

    @contextmanager
    def run(self, name: str, steps: int) -> Iterator[Callable[[int], None]]:
        """One training; what is handed out is told its steps."""
        task = self._progress.add_task(f"  {printable(name)}", total=steps, unit="steps", status="")
        try:
            yield lambda step: self._progress.update(task, completed=step)
        finally:
            self._progress.remove_task(task)
