"""One turn of a loader or of a training: a pass that has settled, timed for some batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import torch
from timing import free_memory, synchronize
from usage import cpu_seconds, device_memory, give_back_memory, host_memory

FEWEST = 4
"""Batches in a turn: workers hand them out in bursts."""


class Turn(NamedTuple):
    """Of one batch, in seconds; the mean of the counted ones."""

    seconds: float
    cpu: float
    """CPU time of all threads and workers."""
    wait: float
    """Waiting for the loader."""


class Memory(NamedTuple):
    """The most at a batch's arrival, beyond what there was before, in bytes."""

    host: int
    device: int


class Stream(NamedTuple):
    """Endless batches, and what is done with each."""

    batches: Callable[[], Iterator[Any]]
    """A new pass. Closing it ends all of its work."""
    ahead: int
    """Batches that it works on ahead of the one that was asked for, at most."""
    work: Callable[[Any], object] = lambda batch: None


def turn(stream: Stream, count: int, device: torch.device, settle: float) -> Turn:
    """A pass of its own, without its first batches.

    A pass that has just begun has nothing ahead, one that was left alone has too much: either would
    be counted as speed. So the batches are counted from when it has made up for its start.
    """
    with _Pass(stream) as batches:
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


def first_batches(stream: Stream, count: int) -> Iterator[Any]:
    """Of a pass of its own."""
    with _Pass(stream) as batches:
        for _ in range(count):
            yield next(batches)


def first_turn(stream: Stream, device: torch.device, seconds: float) -> tuple[int, Memory]:
    """How many batches a turn of so many seconds has, and the memory that they take.

    From a quarter of a turn: of batches that take 0.2 ms, single ones may take a tenth or ten times
    as long, as plans are drawn for several at once. Memory is read afterwards: that takes
    milliseconds, in which the loader goes on.
    """
    give_back_memory()
    held = [_memory_held(device)]
    with _Pass(stream) as batches:
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
    count = max(FEWEST if taken < seconds else 2, math.ceil(seconds / taken))
    return count, Memory(*(max(values) - values[0] for values in zip(*held, strict=True)))


def _memory_held(device: torch.device) -> Memory:
    return Memory(host_memory(), device_memory(device))


def repeat(call: Callable[[], object], count: int, device: torch.device) -> Turn:
    """A turn of what needs no loader, without its first call, for which no memory is warm."""
    call()
    synchronize(device)
    used, started = cpu_seconds(), time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    taken = time.perf_counter() - started
    return Turn(taken / count, (cpu_seconds() - used) / count, 0.0)


def check_memory(needed: float, device: torch.device, what: str) -> None:
    """Said before it happens: Linux would end the whole benchmark instead of one of its parts."""
    if needed > (free := free_memory(device)):
        raise MemoryError(f"{what} about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} are free")


def _settle(stream: Stream, batches: Iterator[Any], seconds: float) -> None:
    """As many batches as are ahead and one more, for so many seconds at least.

    New worker processes are slow at first: they touch all that they share with their parent. One
    batch is enough where the work on it is long: the loader has caught up meanwhile.
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


class _Pass:
    def __init__(self, stream: Stream) -> None:
        self._batches = stream.batches()

    def __enter__(self) -> Iterator[Any]:
        return self._batches

    def __exit__(self, *error: object) -> None:
        if isinstance(self._batches, Generator):
            self._batches.close()
