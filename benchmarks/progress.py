"""The progress bar of a benchmark, on stderr; none where that is no terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar(title: str) -> Progress:
    """What is done now stands in the task's description."""
    screen = Console(stderr=True)
    return Progress(
        TextColumn(title),
        BarColumn(bar_width=20),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )
