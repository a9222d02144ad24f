"""Errors that a user can fix. Commands print them as one line and exit with code 2."""

import errno
import hashlib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from reprlib import Repr
from typing import Any, NamedTuple


class FastaugError(Exception):
    """The message is one line: what was given, what is allowed, what to do."""

    exit_code = 2
    reported = False
    """True if another rank prints it."""


class ConfigError(FastaugError):
    """A setting has a value that is not allowed."""


class DataError(FastaugError):
    """A data source is missing, empty, in the wrong layout, or has an unreadable file."""


class DecodeError(DataError):
    """An image was read, but cannot be decoded."""

    def __init__(self, message: str, content: bytes | memoryview) -> None:
        """content: what cannot be decoded."""
        super().__init__(message)
        self.digest = hashlib.blake2b(content, digest_size=16).digest()
        """Hash of the content. The content itself is not kept in memory."""


class CheckpointError(FastaugError):
    """A checkpoint is missing, damaged, or belongs to another configuration."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file is truncated or altered, or is not a checkpoint."""


class NonFiniteError(FastaugError):
    """Too many consecutive steps had a non-finite loss or gradient."""


class RankLostError(FastaugError):
    """Another rank of the run has ended or cannot be reached. Trying again may help."""

    exit_code = 75


class RankDriftError(FastaugError):
    """The ranks of a run have different weights. Continuing from the last checkpoint may help."""

    exit_code = 75


class KernelUnavailableError(FastaugError):
    """A kernel that was requested by name cannot run here."""


class ExportError(FastaugError):
    """A network cannot be written in a format, or the written file computes something else."""


def suggest(name: str, options: Iterable[str]) -> str:
    """'did you mean ...?' for a name that is not one of the options, else the options."""
    options = sorted(options)
    near = get_close_matches(name.lower(), options, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(options)}"


def few(items: Collection[Any], most: int = 3, show: Callable[[Any], str] = str) -> str:
    """'a, b, c and 4 more'."""
    shown = ", ".join(map(show, islice(items, most)))
    more = len(items) - most
    return f"{shown} and {more:,} more" if more > 0 else shown


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown(value: Any) -> str:
    """A value of unknown kind and size, such as one from a stranger's file, as a short line."""
    try:
        return printable(_SHORT.repr(value))
    except ValueError:  # a number of too many digits
        return f"a {type(value).__name__}"


def first_line(message: BaseException | str) -> str:
    """First non-empty line of a message; the class of an error that has none."""
    lines = (line.strip() for line in str(message).splitlines())
    default = "" if isinstance(message, str) else type(message).__name__
    return next(filter(None, lines), default)


@contextmanager
def parser_errors(message: str, advice: str = "") -> Iterator[None]:
    """Turn errors into a DataError: "message (reason)advice".

    Catches everything: parsers raise almost anything, also MemoryError, for damaged files.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{message} ({first_line(error)}){advice}") from error


def describe_error(error: BaseException) -> str:
    """'RuntimeError: first line of its message'."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def printable(text: str) -> str:
    """Text as one line without control characters, which are escaped as \\x1b.

    File and class names come from whoever made the data, and a terminal would obey their escape
    sequences.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class MachineError(NamedTuple):
    """An error that is not a bug: something that the machine lacks."""

    message: str
    exit_code: int


_DISTRIBUTIONS = {"PIL": "pillow", "nvidia": "nvidia-dali-cuda120", "yaml": "pyyaml"}
"""Packages whose distribution has another name."""
_NO_MEMORY = re.compile(
    r"bad_alloc|out of memory|can't allocate memory|not enough memory|Cannot allocate memory"
    r"|cannot allocate memory|failed to map segment|cudaErrorMemoryAllocation"
    r"|can't start new thread|^Resource temporarily unavailable$",
    re.MULTILINE,
)
"""What torch, DALI, OpenMP, the dynamic linker and Python write when memory cannot be allocated or
a thread cannot be started."""


def machine_error(error: BaseException) -> MachineError | None:
    """What to do about a missing package, or a lack of memory or disk space; None for others.

    The exit code is 1 where trying again may help.
    """
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        if name in ("", "fastaug", *sys.stdlib_module_names):
            return None
        name = _DISTRIBUTIONS.get(name, name)
        return MachineError(f"the package {name} is not installed: pip install {name}", 2)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = "" if error.filename is None else f" ({error.filename})"
        text = f"{error.strerror}{where}: free some space, or choose other folders"
        return MachineError(f"{text} with --out, FASTAUG_CACHE and TMPDIR", 1)
    if is_out_of_memory(error):
        lines = (line.strip() for line in str(error).splitlines() if _NO_MEMORY.search(line))
        given = next((f" ({line[:200]})" for line in lines), "")
        return MachineError(
            f"out of memory{given}: use a smaller --batch-size (--accumulate N keeps it for "
            "training), fewer --workers, or free some memory",
            1,
        )
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """True for an allocation that failed, on the host or on a GPU, in Python or below."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    known = isinstance(error, RuntimeError | ImportError | OSError)
    return known and _NO_MEMORY.search(str(error)) is not None
