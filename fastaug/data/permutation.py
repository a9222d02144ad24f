"""The random order of an epoch, computed at single positions instead of sorted.

A Feistel network permutes all numbers of a few bits: each round changes one half of the bits by a
hash of the other half, which can be undone. A result that is not below n is permuted again until it
is (cycle walking), which makes a permutation of range(n). So any part of the order of 14 million
images takes microseconds per thousand, and no memory.
"""

from __future__ import annotations

import numpy as np

from fastaug.views.philox import ORDER, philox

VERSION = 2
"""Part of a loader's identity; increase it when the order changes."""

_ROUNDS = 12
_MIN_BITS = 6
"""Rounds on fewer bits mix too little. So 3 images are walked to in a cycle of up to 64 numbers."""
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def permuted(seed: int, epoch: int, n: int, positions: np.ndarray) -> np.ndarray:
    """positions: [P], 0 to n - 1 -> [P] int64: the images at these positions of an epoch's order.

    All positions together have each number below n once.
    """
    bits = max(_MIN_BITS, (n - 1).bit_length())
    keys = _round_keys(seed, epoch)
    found = _feistel(np.asarray(positions).astype(np.uint64), bits, keys)
    (outside,) = np.nonzero(found >= n)
    while len(outside):
        found[outside] = _feistel(found[outside], bits, keys)
        outside = outside[found[outside] >= n]
    return found.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> np.ndarray:
    """[_ROUNDS] uint64."""
    rounds = np.arange(_ROUNDS, dtype=np.uint64)
    zeros = np.zeros_like(rounds)
    words = philox([rounds, zeros, zeros, zeros + np.uint64(ORDER)], (seed, epoch))
    return words[:, 0] | words[:, 1].astype(np.uint64) << np.uint64(32)


def _feistel(numbers: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of the numbers of so many bits. numbers: [P] uint64."""
    low_bits, high_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    low, high = numbers & ((np.uint64(1) << low_bits) - np.uint64(1)), numbers >> low_bits
    for turn in range(0, _ROUNDS, 2):
        low = low ^ _hash(high, keys[turn], low_bits)
        high = high ^ _hash(low, keys[turn + 1], high_bits)
    return high << low_bits | low


def _hash(half: np.ndarray, key: np.uint64, bits: np.uint64) -> np.ndarray:
    """The highest bits of a 64-bit mix of a number and a key: SplitMix64's, by Steele et al."""
    mixed = half ^ key
    mixed = (mixed ^ mixed >> _SHIFTS[0]) * _MULTIPLIERS[0]
    mixed = (mixed ^ mixed >> _SHIFTS[1]) * _MULTIPLIERS[1]
    return (mixed ^ mixed >> _SHIFTS[2]) >> (np.uint64(64) - bits)
