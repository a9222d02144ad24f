"""Memory of a launch, and pointers into it."""

from __future__ import annotations

import numpy as np

from .errors import PTXError
from .types import UDT, u8, u64


class Ptr:
    """Device pointer into an array at a byte offset: Ptr(arr, 2)."""

    def __init__(self, arr, offset=0):
        self.arr, self.offset = arr, offset


class Buffer:
    def __init__(self, arr, base, name):
        self.arr, self.base, self.name, self.n = arr, base, name, arr.size
        self.v = {1: arr}
        for w in (2, 4, 8):
            self.v[w] = arr[: arr.size // w * w].view(UDT[w])
        self.rd = self.wr = None

    def mark(self, which, off, w):
        b = getattr(self, which)
        if b is None:
            b = {1: np.zeros((self.n + 15) // 16 * 16, u8)}
            for k in (2, 4, 8):
                b[k] = b[1].view(UDT[k])
            setattr(self, which, b)
        if w == 16:
            o = off >> u64(3)
            b[8][o] = 0x0101010101010101
            b[8][o + u64(1)] = 0x0101010101010101
        elif w == 32:
            o = off >> u64(3)
            for k in range(4):
                b[8][o + u64(k)] = 0x0101010101010101
        else:
            b[w][off // u64(w)] = {1: 1, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}[w]

    def unique(self, which):
        b = getattr(self, which)
        return 0 if b is None else int(np.count_nonzero(b[1]))


def _as_bytes(a):
    """Numpy array or torch CPU tensor -> flat uint8 view sharing memory."""
    if not isinstance(a, np.ndarray):
        import torch

        t = a.detach()
        if t.device.type != "cpu":
            raise PTXError("tensor arguments must be on the CPU")
        if not t.is_contiguous():
            raise PTXError("tensor argument is not contiguous")
        if t.numel() == 0:
            return np.zeros(0, u8)
        return t.reshape(-1).view(torch.uint8).numpy()
    if not a.flags.c_contiguous:
        raise PTXError("array argument is not C-contiguous")
    return a.reshape(-1).view(u8)


def _is_array(a):
    return (isinstance(a, np.ndarray) and a.ndim > 0) or (
        hasattr(a, "data_ptr") and hasattr(a, "is_contiguous")
    )
