"""Memory of batches in host memory, used again when the last tensor on it is gone.

The system hands out new memory page by page, zeroed, at the first touch. For a batch of 256 views
of 224 px, 154 MB, that takes longer than making the views.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import prod
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from torch import Tensor


class BufferPool:
    """Private memory of this process. Threads may share a pool.

    keep: the number of unused buffers that are kept. Others, of a caller who held many batches at
    once, are released; with the pool all of them are.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        # No lock: a tensor may die in any thread, even inside a call of this pool (in a garbage
        # collection). A deque's append and pop are atomic.
        self._unused: deque[np.ndarray] = deque()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As torch.empty."""
        needed = prod(shape) * dtype.itemsize
        memory = self._take(needed)
        return tensor_on(memory, shape, dtype, partial(_give_back, weakref.ref(self), memory))

    def _take(self, needed: int) -> np.ndarray:
        while True:
            try:
                memory = self._unused.pop()  # the last one used, which may still be in the cache
            except IndexError:
                return _private_memory(needed)
            if len(memory) >= needed:
                return memory


def _give_back(pool_reference: weakref.ref[BufferPool], memory: np.ndarray) -> None:
    pool = pool_reference()
    if pool is not None and len(pool._unused) < pool._keep:
        pool._unused.append(memory)


def _private_memory(size: int) -> np.ndarray:
    """[size] uint8, in whole pages, which a forked process does not share.

    Not from malloc, which may keep what is released: it adapts its thresholds to blocks that come
    and go.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, which does not fork
        return np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: pages of 2 MB, as numpy asks for
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


CAN_SEND_BUFFERS = hasattr(os, "memfd_create")
"""Whether SharedBuffers can be sent to a process that is not a fork: on Linux."""
MAX_SENT = 200
"""Buffers that can be sent: a fork server passes on at most 256 file descriptors."""


class SharedBuffers:
    """Memory that is shared with the processes that this one starts from now on.

    This process assigns a buffer to each batch, a worker process fills it. The memory is not
    limited by the size of /dev/shm, which is 64 MB in a Docker container.
    """

    def __init__(self, count: int, size: int, *, forked: bool = True) -> None:
        """forked: whether all other processes are forks, which need no file descriptors; if not,
        see CAN_SEND_BUFFERS."""
        self._size, self._forked = size, forked
        self._files: list[int] = [-1] * count
        self._memory = [self._new(number) for number in range(count)]
        self._unused = deque(range(count))

    def __del__(self) -> None:
        for file in self._files:
            if file >= 0:
                os.close(file)

    def __getstate__(self) -> dict[str, Any]:
        """What a process gets that is being started."""
        assert not self._forked
        return {"_size": self._size, "_files": [DupFd(file) for file in self._files]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._size, self._forked, self._unused = state["_size"], False, deque()
        self._files = [file.detach() for file in state["_files"]]
        self._memory = [self._map(file) for file in self._files]

    def take(self) -> int | None:
        """The number of an unused buffer, if there is one."""
        try:
            return self._unused.pop()
        except IndexError:
            return None

    def filled(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The contents of a buffer, which becomes unused when the last tensor on them is gone."""
        returned = partial(self._unused.append, number)
        return tensor_on(self._memory[number], shape, dtype, returned)

    def to_fill(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer in the process that fills it."""
        return tensor_on(self._memory[number], shape, dtype, lambda: None)

    def replace(self, number: int) -> None:
        """Give up a buffer that a process may still write to. Later processes have another one."""
        self._memory[number] = self._new(number)
        self._unused.append(number)

    def _new(self, number: int) -> np.ndarray:
        if self._forked:
            return np.frombuffer(mmap.mmap(-1, self._size), np.uint8)
        if self._files[number] >= 0:
            os.close(self._files[number])
        self._files[number] = file = os.memfd_create("fastaug-batch")
        os.truncate(file, self._size)
        return self._map(file)

    def _map(self, file: int) -> np.ndarray:
        return np.frombuffer(mmap.mmap(file, self._size), np.uint8)


def tensor_on(
    memory: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype, unused: Callable[[], object]
) -> Tensor:
    """The start of the memory as a tensor. unused: called when no tensor shares it any more."""
    # A new array object, which the tensor's storage keeps alive.
    own = memory[: prod(shape) * dtype.itemsize]
    weakref.finalize(own, unused).atexit = False
    return torch.from_numpy(own).view(dtype).view(shape)
