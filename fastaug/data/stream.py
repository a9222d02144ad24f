"""Random numbers by address: a stream depends on where it is used, not on what was drawn before."""

from __future__ import annotations

import numpy as np

# What a stream is for; the last word of its counter.
ORDER, TRAIN_VIEWS, TEST_VIEWS = range(3)


class Stream:
    """Numbers of (seed, epoch, purpose, index, view), from Philox: a counter-based generator.

    The address is the key and the upper words of the counter, so no two streams overlap. Only the
    raw words of numpy's generator are used: those are fixed for all its versions.
    """

    def __init__(self, seed: int, epoch: int, purpose: int, index: int = 0, view: int = 0) -> None:
        self._bits = np.random.Philox(key=[seed, epoch], counter=[0, view, index, purpose])

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * (int(self._bits.random_raw()) >> 11) * 2.0**-53

    def below(self, n: int) -> int:
        """A whole number from 0 to n - 1."""
        return int(self.uniform() * n)

    def permutation(self, n: int) -> np.ndarray:
        return np.argsort(self._bits.random_raw(n), kind="stable")
