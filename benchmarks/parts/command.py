"""Command lines of the benchmarks: --quick, checks of numbers, the progress bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fastaug import cli
from fastaug.errors import ConfigError

Options = TypeVar("Options")


def parse(quick: Options, args: Sequence[str], script: str) -> Options:
    """The flags of a benchmark; with --quick the defaults are those of `quick`."""
    kind = type(quick)
    default = quick if "--quick" in args else kind()
    return cli.parse(kind, args, prog=f"python benchmarks/{script}", default=default)


def check_at_least(flags: Mapping[str, tuple[Sequence[float], float]]) -> None:
    """flags: name -> (values, least value)."""
    for flag, (values, least) in flags.items():
        if not values:
            raise ConfigError(f"{flag} needs at least one number")
        if wrong := [value for value in values if value < least]:
            raise ConfigError(f"{flag} must be at least {least}, got {wrong[0]}")


def progress_bar(title: str) -> Progress:
    """A progress bar on stderr, hidden unless stderr is a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn(title),
        BarColumn(bar_width=20),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )
