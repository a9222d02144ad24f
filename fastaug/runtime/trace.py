"""Named ranges of a step, for a profiler; while none listens, a range costs 0.2 microseconds.

In the trainer's process they are torch's (and NVTX's on a GPU). torch's profiler does not see the
loader's worker processes: there, each range is a line in a file, in a clock that they all share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import NamedTuple

import torch
from torch.profiler import record_function

_UNHEARD = nullcontext()
_listener: Callable[[str], AbstractContextManager[object]] | None = None
_workers_file: str | None = None


def named(name: str) -> AbstractContextManager[object]:
    """The code within, by this name in a trace."""
    return _UNHEARD if _listener is None else _listener(name)


def listen(*, cuda: bool) -> None:
    """From now on ranges are recorded: by torch's profiler, if it runs, and as NVTX ranges."""
    global _listener
    _listener = _with_nvtx if cuda else record_function


def stop_listening() -> None:
    global _listener
    _listener = None


@contextmanager
def _with_nvtx(name: str) -> Iterator[None]:
    with torch.cuda.nvtx.range(name), record_function(name):
        yield


# --- worker processes ---


class Span(NamedTuple):
    """A range of a worker; times in nanoseconds of time.perf_counter_ns."""

    process: int
    name: str
    start: int
    end: int


def set_workers_file(path: str | None) -> None:
    """Where workers that are started from now on write their ranges; None: nowhere."""
    global _workers_file
    _workers_file = path


def workers_file() -> str | None:
    return _workers_file


def write_to(path: str | None) -> None:
    """In a worker: what the trainer's process had set when it was forked does not hold here."""
    global _listener
    _listener = None
    if path is None:
        return
    with suppress(OSError):  # the profiler has ended meanwhile, and the file is gone
        # A line is one write at the end of the file, so that workers do not mix theirs.
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        _listener = partial(_written, file)


@contextmanager
def _written(file: int, name: str) -> Iterator[None]:
    start = time.perf_counter_ns()
    try:
        yield
    finally:
        span = Span(os.getpid(), name, start, time.perf_counter_ns())
        with suppress(OSError):  # a full disk is no reason to end the training
            os.write(file, ("\t".join(map(str, span)) + "\n").encode())


def read_spans(path: str) -> list[Span]:
    with open(path, encoding="utf-8") as file:
        lines = [line.rstrip("\n").split("\t") for line in file if line.endswith("\n")]
    return [Span(int(process), name, int(a), int(b)) for process, name, a, b in lines]
