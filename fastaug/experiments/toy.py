"""The paper's toy example: averaging losses encourages invariance, averaging logits does not.

x ~ N([1, 1], [[2, 1.5], [1.5, 2]]), p(y=1 | x) = sigmoid(0.4 |x|^2 - 1.5), and the model's logit is
f(x) = w1 x1^2 + w2 x2^2 - 1.5. The augmentation is a rotation by a uniform angle, so a view of x
has the radius of x and any angle. All losses are integrals over radii and angles, not samples.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastaug.experiments.plotting import (
    BLACK,
    GREY,
    ORANGE,
    PAGE,
    STYLES,
    Drawn,
    finish,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

MEAN = np.array([1.0, 1.0])
COVARIANCE = np.array([[2.0, 1.5], [1.5, 2.0]])
SLOPE, BIAS = 0.4, -1.5
"""The true logit is SLOPE |x|^2 + BIAS; the model's BIAS is fixed to the true one."""
OPTIMUM = (SLOPE, SLOPE)
"""(w1, w2) of the true model, which is invariant."""

POINTS = 50
NOT_INVARIANT = (0.7, 0.1)
"""A model with the same averaged-logits loss as the invariant one."""
_LOW, _HIGH, _STEPS = -0.1, 0.9, 51
_LEVELS = 14
_RADII = 100
_LARGEST_RADIUS = 16.0
"""Eight standard deviations of the wider axis from the mean; the density beyond is negligible."""
_ANGLES = 32
"""Angles in half a turn, which is enough by symmetry. Equally spaced angles integrate a smooth
periodic function to rounding error."""


def average_losses(w1: ArrayLike, w2: ArrayLike) -> Floats:
    """Expected loss when the losses of all rotations are averaged; the weights may be arrays."""
    mean, spread = _halves(w1, w2)
    squares, weights = _squared_radii()
    angles = np.pi * (np.arange(_ANGLES) + 0.5) / _ANGLES
    # w1 cos^2 + w2 sin^2 of an angle, by the cosine of twice the angle
    logits = squares[:, None] * (mean + spread * np.cos(angles)) + BIAS
    partition = np.logaddexp(0.0, logits).mean(-1)
    return (partition - _likely(squares) * (squares * mean[..., 0] + BIAS)) @ weights


def average_logits(w1: ArrayLike, w2: ArrayLike) -> Floats:
    """Expected loss when the logits are averaged; it depends only on the sum of the weights."""
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
    """Radius at which both classes are equally likely."""
    return float(np.sqrt(-BIAS / SLOPE))


def _halves(w1: ArrayLike, w2: ArrayLike) -> tuple[Floats, Floats]:
    """Half the sum and half the difference, with two axes added for radii and angles."""
    first, second = np.broadcast_arrays(np.asarray(w1, float), np.asarray(w2, float))
    return (first + second)[..., None, None] / 2, (first - second)[..., None, None] / 2


def _likely(squares: Floats) -> Floats:
    """p(y=1) at a squared radius."""
    return 1 / (1 + np.exp(-(SLOPE * squares + BIAS)))


@lru_cache(maxsize=1)
def _squared_radii() -> tuple[Floats, Floats]:
    """Gauss-Legendre nodes and weights that integrate over the squared radius of x."""
    nodes, weights = np.polynomial.legendre.leggauss(_RADII)
    radii = (nodes + 1) / 2 * _LARGEST_RADIUS
    angles = 2 * np.pi * np.arange(720) / 720
    circle = np.stack([np.cos(angles), np.sin(angles)], -1)
    away = radii[:, None, None] * circle - MEAN
    exponent = -0.5 * np.einsum("rai,ij,raj->ra", away, np.linalg.inv(COVARIANCE), away)
    density = radii * np.exp(exponent).mean(1) / np.sqrt(np.linalg.det(COVARIANCE))
    return radii**2, density * weights * _LARGEST_RADIUS / 2


def toy_figure() -> Drawn:
    figure = new_figure(PAGE, 2.6)
    data, losses, logits = figure.subplots(1, 3)
    _draw_data(data)
    weights = np.linspace(_LOW, _HIGH, _STEPS)
    grid = np.meshgrid(weights, weights)
    surfaces = average_losses(*grid), average_logits(*grid)
    least = float(average_losses(*OPTIMUM))
    # Both surfaces share the contour levels, which are denser near the minimum.
    levels = least + (np.nanmax(surfaces) - least) * np.linspace(0.0, 1.0, _LEVELS) ** 2
    for ax, surface, name in zip((losses, logits), surfaces, ("losses", "logits"), strict=True):
        ax.contourf(weights, weights, surface, levels=levels, cmap="Blues", extend="max")
        ax.contour(weights, weights, surface, levels=levels[1:], colors=GREY, linewidths=0.4)
        _draw_marks(ax, with_line=name == "logits")
        ax.set_title(STYLES[name].label)
    handles, _ = logits.get_legend_handles_labels()
    finish(figure, "Toy example", [handles])
    caption = (
        "Averaging losses encourages invariance, averaging logits does not. Left: "
        f"{POINTS} points of a binary problem with rotational symmetry; on the circle both classes "
        "are equally likely. Middle and right: expected loss of the model w1 x1² + w2 x2² - 1.5 "
        "under uniform rotations, lighter is smaller. Averaged losses have one minimum, at the "
        "invariant model w1 = w2 = 0.4; averaged logits have the same loss anywhere on the line "
        "w1 + w2 = 0.8."
    )
    return Drawn("toy", "Toy example", caption, figure)


def _draw_data(ax: Axes) -> None:
    points, positive = sample(POINTS)
    for label, color, marker in ((True, STYLES["probs"].color, "o"), (False, BLACK, "x")):
        x, y = points[positive == label].T
        ax.plot(x, y, marker, color=color, ms=3.5, label=f"y = {int(label)}", gid=f"y={int(label)}")
    angles = np.linspace(0.0, 2 * np.pi, 200)
    radius = boundary_radius()
    ax.plot(radius * np.cos(angles), radius * np.sin(angles), color=BLACK, lw=1, gid="boundary")
    low, high = points.min() - 0.5, points.max() + 0.5
    ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    ax.set_xlabel("$x_1$")
    ax.set_ylabel("$x_2$")
    ax.set_title(f"{POINTS} data points")
    ax.legend(loc="upper left", handlelength=1, borderaxespad=0)


def _draw_marks(ax: Axes, *, with_line: bool) -> None:
    """Mark the models in the caption."""
    ends = [_LOW, _HIGH]
    ax.plot(ends, ends, "--", color=STYLES["losses"].color, label="$w_1 = w_2$", gid="invariant")
    if with_line:
        total = sum(OPTIMUM)
        first = [total - _HIGH, _HIGH]
        second = [total - w for w in first]
        ax.plot(first, second, color=ORANGE, lw=2, label="minima, $w_1 + w_2 = 0.8$", gid="minima")
    label = "minimum, invariant"
    ax.plot(*OPTIMUM, "o", color=STYLES["probs"].color, ms=6, label=label, gid="minimum")
    label = "not invariant"
    ax.plot(*NOT_INVARIANT, "+", color=BLACK, ms=9, mew=1.8, label=label, gid="not invariant")
    ax.set(xlim=(_LOW, _HIGH), ylim=(_LOW, _HIGH), aspect="equal")
    ax.grid(visible=False)
    ax.set_xlabel("$w_1$")
    ax.set_ylabel("$w_2$")
