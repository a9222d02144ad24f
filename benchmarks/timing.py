"""Times and peak memory of calls that are compared with one another.

Contenders take turns in rounds, in a new order each round, so that noise hits all alike. A sample
is a loop of calls that is long enough to be timed; a result is the median of the samples, with
their 20th and 80th percentiles. Each call finds its inputs in the cache as far as they fit, as a
loss finds the logits that the last layer has just written.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from fastaug.errors import first_line

SAMPLE_SECONDS = 0.005
"""The least that a sample takes: a thousand times what reading the clock does."""

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)
Sample = TypeVar("Sample")


class Unfit(Exception):
    """Why a contender does not take part, as its row's status."""


class Quantiles(NamedTuple):
    median: float
    p20: float
    p80: float
    n: int


def quantiles(samples: Sequence[float]) -> Quantiles:
    """Of at least one sample; between two of them linear, as numpy's."""
    ordered = sorted(samples)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        below, rest = int(place), place % 1
        return ordered[below] + rest * (ordered[math.ceil(place)] - ordered[below])

    return Quantiles(at(0.5), at(0.2), at(0.8), len(ordered))


def median_ratio(samples: Sequence[float], baseline: Sequence[float]) -> float:
    """Median over the rounds of a sample over the baseline's of that round: drift cancels."""
    return statistics.median(a / b for a, b in zip(samples, baseline, strict=True))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Call, loops: int, device: torch.device) -> float:
    """What so many calls take together, until the device has done them."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(loops):
        call()
    synchronize(device)
    return time.perf_counter() - started


def calibrate(call: Call, device: torch.device, least: float = SAMPLE_SECONDS) -> int:
    """How many calls make a sample."""
    loops = 1
    while (taken := seconds_of(call, loops, device)) < least:
        loops = max(2 * loops, math.ceil(1.1 * loops * least / max(taken, 1e-9)))
    return loops


def take_turns(
    calls: Mapping[Key, Call],
    samples: dict[Key, list[float]],
    *,
    rounds: int,
    device: torch.device,
    on_round: Callable[[int], object] = lambda done: None,
) -> dict[Key, Exception]:
    """interleave, of calls that are too short to be timed alone: samples are seconds per call."""
    loops: dict[Key, int] = {}

    def sample(key: Key) -> float:
        return seconds_of(calls[key], loops[key], device) / loops[key]

    failed: dict[Key, Exception] = {}
    for key, call in calls.items():
        try:
            loops[key] = calibrate(call, device)
        except Exception as error:  # noqa: PERF203
            failed[key] = error
    measures = {key: partial(sample, key) for key in loops}
    try:
        return failed | interleave(measures, samples, rounds=rounds, on_round=on_round)
    finally:  # interrupted: whole rounds alone, so that ratios are of pairs
        whole = min(map(len, samples.values()), default=0)
        for taken in samples.values():
            del taken[whole:]


def interleave(
    measures: Mapping[Key, Callable[[], Sample]],
    samples: dict[Key, list[Sample]],
    *,
    rounds: int,
    on_round: Callable[[int], object] = lambda done: None,
    on_turn: Callable[[Key], object] = lambda key: None,
) -> dict[Key, Exception]:
    """Fill samples with what each measure gave in each round; give those that raised, and what.

    Sample number r of each is of round r: whoever interrupts may find some with one less.
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


def peak_memory(call: Call, device: torch.device) -> int:
    """The most bytes of tensors that are alive at once within the call, beyond those before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler says on stderr that it starts and stops, unless told before its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    changes = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(itertools.accumulate((e.nbytes() for e in changes), initial=0))


def peak_resident_memory(call: Call) -> list[int]:
    """[By how many bytes the call raises the process's resident memory, whoever allocates them].

    Whole pages; more than peak_memory where the C library keeps what was freed. Empty where the
    system cannot say: Linux alone lets a process reset its high-water mark.
    """
    try:
        # What is free goes back to the system first, else the call would live on it unseen.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _kilobytes("/proc/self/status", "VmRSS:")
    except (OSError, AttributeError):
        return []
    call()
    return [max(0, _kilobytes("/proc/self/status", "VmHWM:") - before) * 1024]


def free_memory(device: torch.device) -> float:
    """Bytes that can be allocated; infinite where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [math.inf]
    try:
        limits.append(_kilobytes("/proc/meminfo", "MemAvailable:") * 1024)
        group = Path("/sys/fs/cgroup")  # a container's own limit
        used = int((group / "memory.current").read_text())
        limits.append(int((group / "memory.max").read_text()) - used)
    except (OSError, ValueError):  # not Linux, no container, or "max"
        pass
    return min(limits)


def _kilobytes(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def why(error: Exception) -> str:
    """An exception as the status of a row: one line."""
    said = first_line(error)
    # torch's CPU allocator has no exception of its own
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate" in said:
        return f"out of memory: {said}"
    return f"failed: {said}"
