"""The paper's toy example: why averaged losses ask for invariance and averaged logits do not.

x ~ N([1, 1], [[2, 1.5], [1.5, 2]]), p(y=1 | x) = sigmoid(0.4 |x|^2 - 1.5), and the model's logit is
f(x) = w1 x1^2 + w2 x2^2 - 1.5. The augmentation is a rotation by a uniform angle, so a view of x
has its radius and any angle: all losses here are integrals over radii and angles, not samples.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

MEAN = np.array([1.0, 1.0])
COVARIANCE = np.array([[2.0, 1.5], [1.5, 2.0]])
SLOPE, BIAS = 0.4, -1.5
"""Of the true logit, SLOPE |x|^2 + BIAS; the model knows the BIAS."""
OPTIMUM = (SLOPE, SLOPE)
"""(w1, w2) of the true model, which is invariant."""

_RADII = 100
_LARGEST_RADIUS = 16.0
"""Eight standard deviations of the wider axis away from the mean: nothing is beyond it."""
_ANGLES = 32
"""In half a turn, which is enough by symmetry. Equally spaced ones integrate a smooth periodic
function to rounding error."""


def average_losses(w1: ArrayLike, w2: ArrayLike) -> Floats:
    """The expected loss if the losses of all rotations are averaged; for arrays of weights, too."""
    mean, spread = _halves(w1, w2)
    squares, weights = _squared_radii()
    angles = np.pi * (np.arange(_ANGLES) + 0.5) / _ANGLES
    # w1 cos^2 + w2 sin^2 of an angle, by the cosine of twice the angle
    logits = squares[:, None] * (mean + spread * np.cos(angles)) + BIAS
    partition = np.logaddexp(0.0, logits).mean(-1)
    return (partition - _likely(squares) * (squares * mean[..., 0] + BIAS)) @ weights


def average_logits(w1: ArrayLike, w2: ArrayLike) -> Floats:
    """The same if the logits are averaged: it knows the weights by their sum alone."""
    mean, _ = _halves(w1, w2)
    squares, weights = _squared_radii()
    logits = squares * mean[..., 0] + BIAS
    return (np.logaddexp(0.0, logits) - _likely(squares) * logits) @ weights


def sample(count: int, seed: int = 0) -> tuple[Floats, NDArray[np.bool_]]:
    """Points [count, 2] and their classes."""
    rng = np.random.default_rng(seed)
    points = rng.multivariate_normal(MEAN, COVARIANCE, count)
    return points, rng.random(count) < _likely((points**2).sum(1))


def boundary_radius() -> float:
    """Where both classes are equally likely."""
    return float(np.sqrt(-BIAS / SLOPE))


def _halves(w1: ArrayLike, w2: ArrayLike) -> tuple[Floats, Floats]:
    """Half the sum and half the difference, with two axes to put radii and angles on."""
    first, second = np.broadcast_arrays(np.asarray(w1, float), np.asarray(w2, float))
    return (first + second)[..., None, None] / 2, (first - second)[..., None, None] / 2


def _likely(squares: Floats) -> Floats:
    """p(y=1) at a squared radius."""
    return 1 / (1 + np.exp(-(SLOPE * squares + BIAS)))


@lru_cache(maxsize=1)
def _squared_radii() -> tuple[Floats, Floats]:
    """Nodes and weights that integrate over the squared radius of x: Gauss and Legendre's."""
    nodes, weights = np.polynomial.legendre.leggauss(_RADII)
    radii = (nodes + 1) / 2 * _LARGEST_RADIUS
    angles = 2 * np.pi * np.arange(720) / 720
    circle = np.stack([np.cos(angles), np.sin(angles)], -1)
    away = radii[:, None, None] * circle - MEAN
    exponent = -0.5 * np.einsum("rai,ij,raj->ra", away, np.linalg.inv(COVARIANCE), away)
    density = radii * np.exp(exponent).mean(1) / np.sqrt(np.linalg.det(COVARIANCE))
    return radii**2, density * weights * _LARGEST_RADIUS / 2
