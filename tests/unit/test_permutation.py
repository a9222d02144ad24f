"""The order of an epoch: a permutation, random enough, and the one that its description names."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from fastaug.data.permutation import permuted
from fastaug.views.philox import ORDER, philox

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129, 1000, 65_537]


def whole(n: int, epoch: int = 0, seed: int = 0) -> np.ndarray:
    return permuted(seed, epoch, n, np.arange(n))


def scalar(seed: int, epoch: int, n: int, position: int) -> int:
    """One position of the order, in Python's integers."""
    bits = max(6, (n - 1).bit_length())
    low_bits, high_bits = bits // 2, bits - bits // 2
    while True:
        high, low = divmod(position, 2**low_bits)
        for turn in range(12):
            words = [np.array([word], np.uint64) for word in (turn, 0, 0, ORDER)]
            first, second, *_ = philox(words, (seed, epoch))[0].tolist()
            mixed = (low if turn % 2 else high) ^ (first + second * 2**32)
            mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
            mixed ^= mixed >> 31
            if turn % 2:
                high ^= mixed // 2 ** (64 - high_bits)
            else:
                low ^= mixed // 2 ** (64 - low_bits)
        position = high * 2**low_bits + low
        if position < n:
            return position


@pytest.mark.parametrize("n", [*SIZES, 1_000_000, 2**20 + 1])
def test_every_number_once(n: int) -> None:
    for epoch in range(2):
        order = whole(n, epoch)
        assert order.dtype == np.int64
        np.testing.assert_array_equal(np.sort(order), np.arange(n))


@pytest.mark.parametrize("n", [1, 3, 64, 97, 1000, 1_281_167, 14_197_122, 2**33])
def test_the_same_as_in_scalars(n: int) -> None:
    positions = np.random.default_rng(n).integers(0, n, 20)
    expected = [scalar(7, 3, n, position) for position in positions.tolist()]
    assert permuted(7, 3, n, positions).tolist() == expected
    assert permuted(7, 3, n, positions[5:6]).tolist() == expected[5:6]


def test_another_order_for_another_epoch_or_seed() -> None:
    orders = [whole(1000, *which) for which in ((0, 0), (1, 0), (0, 1), (2**31, 0), (0, 2**31))]
    for one, other in itertools.combinations(orders, 2):
        # As many elements in the same place as of two random orders: 1 on average.
        assert (one == other).sum() < 8
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.15


@pytest.mark.parametrize("n", [10, 64, 65])
def test_every_element_is_equally_often_in_every_place(n: int) -> None:
    orders = np.stack([whole(n, epoch) for epoch in range(800)])
    counts = np.stack([np.bincount(column, minlength=n) for column in orders.T])
    # Of the n * n counts, (n - 1)^2 are free: every row and every column has the same sum.
    chi2 = ((counts - 800 / n) ** 2 / (800 / n)).sum()
    assert 1e-4 < stats.chi2((n - 1) ** 2).cdf(chi2) < 1 - 1e-4


@pytest.mark.parametrize("n", [7, 20])
def test_every_pair_is_equally_often_adjacent(n: int) -> None:
    orders = np.stack([whole(n, epoch) for epoch in range(1500)])
    pairs = np.bincount((orders[:, :-1] * n + orders[:, 1:]).ravel(), minlength=n * n)
    pairs = pairs.reshape(n, n)[~np.eye(n, dtype=bool)]
    assert stats.chisquare(pairs).pvalue > 1e-4


@pytest.mark.parametrize("n", [3, 4])
def test_all_orders_of_a_small_set_are_equally_likely(n: int) -> None:
    place = {order: i for i, order in enumerate(itertools.permutations(range(n)))}
    found = [place[tuple(whole(n, epoch).tolist())] for epoch in range(1200)]
    assert stats.chisquare(np.bincount(found, minlength=len(place))).pvalue > 1e-4


def test_a_large_order_has_no_pattern() -> None:
    order = whole(1_000_000, 5).astype(np.float64)
    for lag in (1, 2, 3, 64, 1024):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 0.004  # 4 standard deviations
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.004
    differences = np.diff(order) % 1_000_000
    assert stats.kstest(differences / 1e6, "uniform").pvalue > 1e-4
    parts = order[:100_000].astype(np.int64) // 10_000
    assert stats.chisquare(np.bincount(parts, minlength=100)).pvalue > 1e-4
