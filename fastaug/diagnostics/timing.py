"""Times of calls on a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

SAMPLE_SECONDS = 0.005
"""Minimum duration of a sample: a thousand times that of reading the clock."""

Call = Callable[[], object]


def calibrate(call: Call, device: torch.device, least: float = SAMPLE_SECONDS) -> int:
    """Number of calls that take at least this many seconds."""
    loops = 1
    while (taken := seconds_of(call, loops, device)) < least:
        loops = max(2 * loops, math.ceil(1.1 * loops * least / max(taken, 1e-9)))
    return loops


def seconds_of(call: Call, loops: int, device: torch.device) -> float:
    """Seconds for all loops, until the device has finished."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(loops):
        call()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
