"""Counter-based random numbers: they depend on where they are used, not on earlier draws.

Philox4x32-10 is a counter-based generator: (seed, epoch) is its key, (block, view, image, purpose)
its counter. So no two uses share a number, and there is no state to save for a resume. Its
arithmetic is 32 bits wide, so that a GPU can draw the same numbers.
"""

from __future__ import annotations

import numpy as np

# Purposes of the numbers: the last word of the counter.
ORDER, TRAIN_VIEWS, TEST_VIEWS, SUBSTITUTES = range(4)

_LOW = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def uniforms(
    seed: int, epoch: int, purpose: int, indices: np.ndarray, views: int, count: int
) -> np.ndarray:
    """indices: [B] -> [B, views, count] float64 in [0, 1): the first numbers of each view."""
    (numbers,) = uniforms_at(seed, epoch, purpose, indices, views, range(count))
    return numbers


def uniforms_at(
    seed: int, epoch: int, purpose: int, indices: np.ndarray, views: int, *places: range
) -> list[np.ndarray]:
    """indices: [B] -> the numbers of each view at ranges of positions: [B, views, len(range)] each.

    All in one pass: for a small batch, the calls to numpy take longer than the arithmetic.
    """
    blocks = [np.arange(wanted.start // 4, -(-wanted.stop // 4)) for wanted in places]
    block = np.concatenate(blocks).astype(np.uint64)
    shape = (len(indices), views, len(block))
    counter = [
        block,
        np.arange(views, dtype=np.uint64)[:, None],
        np.asarray(indices, np.uint64)[:, None, None],
        np.array(purpose, np.uint64),
    ]
    words = philox([np.broadcast_to(word, shape) for word in counter], (seed, epoch))
    numbers = words.reshape(*shape[:2], 4 * len(block)) * 2.0**-32
    found, start = [], 0
    for wanted, own in zip(places, blocks, strict=True):
        first = start + wanted.start % 4
        found.append(numbers[..., first : first + len(wanted)])
        start += 4 * len(own)
    return found


def philox(counter: list[np.ndarray], key: tuple[int, int]) -> np.ndarray:
    """Four counter words, each [...] uint64 below 2**32 -> [..., 4] uint32."""
    a, b, c, d = counter
    for turn in range(_ROUNDS):
        first, second = (
            np.uint64((word + turn * step) & 0xFFFFFFFF)
            for word, step in zip(key, _KEY_STEPS, strict=True)
        )
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = (right >> np.uint64(32)) ^ b ^ first, right & _LOW
        c, d = (left >> np.uint64(32)) ^ d ^ second, left & _LOW
    return np.stack([a, b, c, d], axis=-1).astype(np.uint32)
