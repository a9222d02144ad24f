"""Named ranges in a profile. While no profiler runs, a range costs 0.2 microseconds.

In the trainer's process they are ranges of torch's profiler (and of NVTX on a GPU). torch's
profiler does not see the loader's worker processes: these write each range as a line to a file,
with times of a clock that all processes share.
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

_OFF = nullcontext()
_make_range: Callable[[str], AbstractContextManager[object]] | None = None
_worker_trace_file: str | None = None


def trace_range(name: str) -> AbstractContextManager[object]:
    """A context whose code appears under this name in a profile."""
    return _OFF if _make_range is None else _make_range(name)


def start_tracing(*, cuda: bool) -> None:
    """Record ranges from now on: with torch's profiler, if it runs, and with NVTX if cuda."""
    global _make_range
    _make_range = _with_nvtx if cuda else record_function


def trace_with(make_range: Callable[[str], AbstractContextManager[object]]) -> None:
    """Use these contexts for ranges from now on, instead of the profiler's."""
    global _make_range
    _make_range = make_range


def stop_tracing() -> None:
    global _make_range
    _make_range = None


@contextmanager
def _with_nvtx(name: str) -> Iterator[None]:
    with torch.cuda.nvtx.range(name), record_function(name):
        yield


# --- worker processes ---


class WorkerRange(NamedTuple):
    """A range in a worker process; times in nanoseconds of time.perf_counter_ns."""

    process: int
    name: str
    start: int
    end: int


def set_worker_trace_file(path: str | None) -> None:
    """Set the file that workers started from now on write their ranges to; None: no file."""
    global _worker_trace_file
    _worker_trace_file = path


def worker_trace_file() -> str | None:
    return _worker_trace_file


def start_worker_tracing(path: str | None) -> None:
    """Write the ranges of this worker process to the file, not where its parent does; None: off."""
    global _make_range
    _make_range = None
    if path is None:
        return
    with suppress(OSError):  # the profiler has ended and removed the file
        # A line is one write in append mode, so that lines of several workers do not mix.
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        _make_range = partial(_written, file)


@contextmanager
def _written(file: int, name: str) -> Iterator[None]:
    start = time.perf_counter_ns()
    try:
        yield
    finally:
        fields = WorkerRange(os.getpid(), name, start, time.perf_counter_ns())
        with suppress(OSError):  # a full disk must not end the training
            os.write(file, ("\t".join(map(str, fields)) + "\n").encode())


def read_worker_ranges(path: str) -> list[WorkerRange]:
    with open(path, encoding="utf-8") as file:
        lines = [line.rstrip("\n").split("\t") for line in file if line.endswith("\n")]
    return [WorkerRange(int(process), name, int(a), int(b)) for process, name, a, b in lines]
