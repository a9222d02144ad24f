"""What this process and its worker processes use: CPU time and memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
from pathlib import Path

import torch


def cpu_seconds() -> float:
    """CPU time so far, of all threads and of the worker processes that are alive.

    Threads that wait by spinning (OpenMP's do, for a moment) are counted as busy.
    """
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime + sum(map(_cpu_seconds_of, _workers()))


def host_memory() -> int:
    """Bytes resident here and in the workers; a page that several of them share counts once."""
    return sum(_resident(pid) for pid in (os.getpid(), *_workers()))


def device_memory(device: torch.device) -> int:
    """Bytes in use on a GPU, whoever allocated them: DALI does so beside torch. 0 for a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def give_back_memory() -> None:
    """What is free goes back to the system, else the next one would live on it unseen."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _workers() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def _cpu_seconds_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended, or this is no Linux
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
