"""Errors that a user can mend. Entry points print them as one line and exit with code 2."""

from collections.abc import Iterable
from difflib import get_close_matches


class FastaugError(Exception):
    """What was given, what is allowed, what to do: one line."""

    exit_code = 2
    told = False
    """Whether another rank says it."""


class ConfigError(FastaugError):
    """A setting has a value that it cannot have."""


class DataError(FastaugError):
    """A data source is missing, empty, of the wrong layout, or has a file that cannot be read."""


class CheckpointError(FastaugError):
    """A checkpoint is missing, damaged, or belongs to another configuration."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not what was written: torn, altered, or never one."""


class NonFiniteError(FastaugError):
    """Too many steps in a row had a loss or gradient that is no number."""


class RankLostError(FastaugError):
    """Another rank of the run has ended, or cannot be reached. To try again makes sense."""

    exit_code = 75


class KernelUnavailableError(FastaugError):
    """A loss kernel was asked for by name and cannot run here."""


class ExportError(FastaugError):
    """A network cannot be written in a format, or what was written is not the network."""


def suggest(name: str, options: Iterable[str]) -> str:
    """'did you mean ...?' for a name that is not one of the options, else the options."""
    options = sorted(options)
    near = get_close_matches(name.lower(), options, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(options)}"


def first_line(error: BaseException) -> str:
    """What an error of a library says, in one line; its kind if it says nothing."""
    said = (line.strip() for line in str(error).splitlines())
    return next(filter(None, said), type(error).__name__)


def printable(text: str) -> str:
    """One line that a terminal shows and does not obey: what is no letter is written as \\x1b.

    Names of files, classes and members come from whoever made the data, as do parts of messages.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
