"""Timing of contenders that are compared with one another.

Contenders take turns in rounds, in a new order each round, so that noise affects all of them. A
result is the median over the rounds, with the 20th and 80th percentiles. Ratios are taken within a
round: drift cancels.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch

from fastaug.diagnostics.timing import Call, calibrate, seconds_of, synchronize
from fastaug.errors import first_line

MIN_BATCHES = 4
"""Minimum batches in a turn: worker processes deliver them in bursts."""

Key = TypeVar("Key", bound=Hashable)
Sample = TypeVar("Sample")


class UnfitError(Exception):
    """A contender cannot take part; the message becomes the status of its row."""


def status_of(error: Exception) -> str:
    """An exception as the status of a row: one line."""
    if isinstance(error, UnfitError):
        return str(error)
    text = first_line(error)
    # torch's CPU allocator raises a plain RuntimeError
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate" in text:
        return f"out of memory: {text}"
    return f"failed: {text}"


# --- rounds ---


def interleave(
    measures: Mapping[Key, Callable[[], Sample]],
    samples: dict[Key, list[Sample]],
    *,
    rounds: int,
    on_round: Callable[[int], object] = lambda done: None,
    on_turn: Callable[[Key], object] = lambda key: None,
) -> dict[Key, Exception]:
    """Fill `samples` with one sample of each measure per round; return the measures that raised.

    samples[key][r] is from round r. After an interrupt some lists may be one shorter.
    """
    failed: dict[Key, Exception] = {}
    samples.update({key: [] for key in measures})
    order, shuffle = list(measures), random.Random(0).shuffle
    gc.collect()
    gc.disable()  # as timeit does
    try:
        for done in range(rounds):
            on_round(done)
            shuffle(order)
            for key in [key for key in order if key not in failed]:
                on_turn(key)
                try:
                    samples[key].append(measures[key]())
                except Exception as error:
                    failed[key] = error
                    del samples[key]
    finally:
        gc.enable()
    return failed


def time_calls(
    calls: Mapping[Key, Call],
    samples: dict[Key, list[float]],
    *,
    rounds: int,
    device: torch.device,
    on_round: Callable[[int], object] = lambda done: None,
) -> dict[Key, Exception]:
    """interleave() for short calls: a sample is seconds per call, over a loop of calls."""
    loops: dict[Key, int] = {}

    def sample(key: Key) -> float:
        return seconds_of(calls[key], loops[key], device) / loops[key]

    failed: dict[Key, Exception] = {}
    for key, call in calls.items():
        try:
            loops[key] = calibrate(call, device)
        except Exception as error:
            failed[key] = error
    measures = {key: partial(sample, key) for key in loops}
    try:
        return failed | interleave(measures, samples, rounds=rounds, on_round=on_round)
    finally:  # after an interrupt keep whole rounds only: ratios need pairs
        whole = min(map(len, samples.values()), default=0)
        for taken in samples.values():
            del taken[whole:]


def median_ratio(samples: Sequence[float], baseline: Sequence[float]) -> float:
    """Median over the rounds of sample / baseline."""
    return statistics.median(a / b for a, b in zip(samples, baseline, strict=True))


# --- one turn of a loader or a training ---


class Turn(NamedTuple):
    """Means over the counted batches, in seconds per batch."""

    seconds: float
    cpu: float
    """CPU time of all threads and workers."""
    wait: float
    """Time spent waiting for the loader."""


class Memory(NamedTuple):
    """Peak bytes when a batch arrives, beyond those before the pass."""

    host: int
    device: int


class Stream(NamedTuple):
    """Endless batches, and the work done on each."""

    batches: Callable[[], Generator[Any]]
    """Starts a new pass. Closing it ends all of its work."""
    ahead: int
    """Maximum number of batches it prefetches beyond the requested one."""
    work: Callable[[Any], object] = lambda batch: None


def turn(stream: Stream, count: int, device: torch.device, settle: float) -> Turn:
    """A new pass, timed once it has settled.

    A pass that has just begun has nothing prefetched, and one that was left idle has too much:
    either would distort the speed.
    """
    with closing(stream.batches()) as batches:
        _settle(stream, batches, settle)
        synchronize(device)
        waited, used, started = 0.0, cpu_seconds(), time.perf_counter()
        for _ in range(count):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            stream.work(batch)
        synchronize(device)
        taken = time.perf_counter() - started
        return Turn(taken / count, (cpu_seconds() - used) / count, waited / count)


def first_turn(stream: Stream, device: torch.device, seconds: float) -> tuple[int, Memory]:
    """How many batches make a turn of this many seconds, and the memory that the pass takes.

    Timed over a quarter of a turn: single batches of 0.2 ms may take a tenth or ten times as long,
    as plans are drawn for several at once. Memory is read afterwards, because that takes
    milliseconds in which the loader continues.
    """
    release_memory()
    held = [_memory_held(device)]
    with closing(stream.batches()) as batches:
        _settle(stream, batches, seconds)
        synchronize(device)
        done, started = 0, time.perf_counter()
        while done < 2 or time.perf_counter() - started < seconds / 4:
            stream.work(next(batches))
            done += 1
        synchronize(device)
        taken = (time.perf_counter() - started) / done
        held.append(_memory_held(device))
        stream.work(next(batches))
        synchronize(device)
        held.append(_memory_held(device))
    count = max(MIN_BATCHES if taken < seconds else 2, math.ceil(seconds / taken))
    return count, Memory(*(max(values) - values[0] for values in zip(*held, strict=True)))


def repeat(call: Call, count: int, device: torch.device) -> Turn:
    """A turn of a call that needs no loader, after one call to warm up."""
    call()
    used = cpu_seconds()
    taken = seconds_of(call, count, device)
    return Turn(taken / count, (cpu_seconds() - used) / count, 0.0)


def _settle(stream: Stream, batches: Iterator[Any], seconds: float) -> None:
    """Consume one batch more than are prefetched, for at least this many seconds.

    New worker processes are slow at first: they touch all memory they share with their parent. One
    batch is enough where the work on it is long, because the loader catches up meanwhile.
    """
    begun, done = time.perf_counter(), 0
    while True:
        batch = next(batches)
        started = time.perf_counter()
        stream.work(batch)
        now, done = time.perf_counter(), done + 1
        settled = done > stream.ahead or now - started > seconds
        if settled and now - begun >= seconds:
            return


# --- CPU time and memory ---


def cpu_seconds() -> float:
    """CPU time so far of this process and its live workers. Threads that spin count as busy."""
    total = time.process_time()
    for worker in _workers():
        with suppress(psutil.Error):
            times = worker.cpu_times()
            total += times.user + times.system
    return total


def host_memory() -> int:
    """Resident bytes of this process and its workers; pages they share count once."""
    total = 0
    for process in (psutil.Process(), *_workers()):
        with suppress(psutil.Error):
            used = process.memory_full_info()
            total += getattr(used, "pss", used.uss)
    return total


def device_memory(device: torch.device) -> int:
    """Bytes in use on a GPU by any allocator (DALI has its own). 0 for a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def free_memory(device: torch.device) -> float:
    """Bytes that can still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no container, or no limit ("max")
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        free = min(free, int((group / "memory.max").read_text()) - used)
    return free


def check_memory(needed: float, device: torch.device, what: str) -> None:
    """Raise before Linux would kill the whole benchmark for one of its contenders."""
    if needed > (free := free_memory(device)):
        raise MemoryError(f"{what} about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")


def release_memory() -> None:
    """Return free memory to the system, so that the next contender's use of it is visible."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def peak_memory(call: Call, device: torch.device) -> int:
    """Peak bytes of live tensors during the call, beyond those before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Silences the profiler's messages on stderr; must be set before its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    changes = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(itertools.accumulate((e.nbytes() for e in changes), initial=0))


def _memory_held(device: torch.device) -> Memory:
    return Memory(host_memory(), device_memory(device))


def _workers() -> list[psutil.Process]:
    found = []
    for child in multiprocessing.active_children():
        with suppress(psutil.Error):
            found.append(psutil.Process(child.pid))
    return found
