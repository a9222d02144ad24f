"""Errors that a user can mend. Entry points print them as one line and exit with code 2."""

from collections.abc import Iterable
from difflib import get_close_matches


class FastaugError(Exception):
    """What was given, what is allowed, what to do: one line."""


class ConfigError(FastaugError):
    """A setting has a value that it cannot have."""


class DataError(FastaugError):
    """A data source is missing, empty, of the wrong layout, or has a file that cannot be read."""


class CheckpointError(FastaugError):
    """A checkpoint is missing, damaged, or belongs to another configuration."""


class KernelUnavailable(FastaugError):
    """A loss kernel was asked for by name and cannot run here."""


def suggest(name: str, options: Iterable[str]) -> str:
    """'did you mean ...?' for a name that is not one of the options, else the options."""
    options = sorted(options)
    near = get_close_matches(name.lower(), options, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(options)}"
