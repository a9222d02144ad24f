"""The toy example's integrals, against sampling, another quadrature, and an optimizer."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import integrate, optimize

from fastaug.experiments import toy

LEAST = 0.478877  # of both losses; scipy's adaptive quadrature below gives the same digits


def test_the_least_loss_is_the_true_models_by_adaptive_quadrature() -> None:
    """The entropy of y given x, over the plane in Cartesian coordinates."""
    inverse = np.linalg.inv([[2.0, 1.5], [1.5, 2.0]])

    def integrand(y: float, x: float) -> float:
        away = np.array([x - 1, y - 1])
        density = np.exp(-0.5 * away @ inverse @ away) / (2 * np.pi * np.sqrt(4 - 1.5**2))
        logit = 0.4 * (x * x + y * y) - 1.5
        return density * (np.logaddexp(0, logit) - logit / (1 + np.exp(-logit)))

    found, _ = integrate.dblquad(integrand, -8, 10, -8, 10, epsabs=2e-6)
    assert found == pytest.approx(LEAST, abs=3e-6)
    assert toy.average_losses(0.4, 0.4) == pytest.approx(LEAST, abs=1e-6)
    assert toy.average_logits(0.4, 0.4) == pytest.approx(LEAST, abs=1e-6)


@pytest.mark.parametrize("weights", [(0.0, 0.8), (0.7, 0.1), (-0.1, 0.9), (0.5, 0.2)])
def test_losses_agree_with_sampling(weights: tuple[float, float]) -> None:
    """Points, labels and rotations drawn as the paper says."""
    rng = np.random.default_rng(7)
    x = rng.multivariate_normal([1, 1], [[2, 1.5], [1.5, 2]], 400_000)
    y = rng.random(len(x)) < 1 / (1 + np.exp(-0.4 * (x**2).sum(1) + 1.5))
    angle = rng.uniform(0, 2 * np.pi, len(x))
    turned = [
        np.cos(angle) * x[:, 0] - np.sin(angle) * x[:, 1],
        np.sin(angle) * x[:, 0] + np.cos(angle) * x[:, 1],
    ]
    w1, w2 = weights
    logits = w1 * turned[0] ** 2 + w2 * turned[1] ** 2 - 1.5
    losses = np.logaddexp(0, logits) - y * logits
    assert toy.average_losses(w1, w2) == pytest.approx(
        losses.mean(), abs=4 * losses.std() / np.sqrt(len(x))
    )
    # The mean of a rotated square is half of the squared radius.
    logits = (w1 + w2) / 2 * (x**2).sum(1) - 1.5
    losses = np.logaddexp(0, logits) - y * logits
    assert toy.average_logits(w1, w2) == pytest.approx(
        losses.mean(), abs=4 * losses.std() / np.sqrt(len(x))
    )


def test_a_model_that_is_not_invariant_pays_in_losses_alone() -> None:
    assert toy.average_losses(0.0, 0.8) == pytest.approx(0.6313, abs=1e-4)
    w1 = np.linspace(-0.5, 1.3, 9)
    np.testing.assert_allclose(toy.average_logits(w1, 0.8 - w1), LEAST, atol=1e-6)


@pytest.mark.parametrize("start", [(0.0, 0.0), (0.9, -0.05), (0.2, 0.8)])
def test_losses_have_one_minimum(start: tuple[float, float]) -> None:
    found = optimize.minimize(lambda w: float(toy.average_losses(*w)), start, tol=1e-10)
    np.testing.assert_allclose(found.x, [0.4, 0.4], atol=1e-4)


def test_losses_are_convex() -> None:
    """By differences: the Hessian is positive definite, and logits' has one flat direction."""
    step = 0.002
    for w1, w2 in [(0.4, 0.4), (0.1, 0.7), (0.8, 0.0)]:
        for function, flat in ((toy.average_losses, False), (toy.average_logits, True)):
            offsets = np.array([-step, 0, step])
            f = function(w1 + offsets[:, None], w2 + offsets)
            hessian = np.array(
                [
                    [f[2, 1] - 2 * f[1, 1] + f[0, 1], (f[2, 2] - f[2, 0] - f[0, 2] + f[0, 0]) / 4],
                    [(f[2, 2] - f[2, 0] - f[0, 2] + f[0, 0]) / 4, f[1, 2] - 2 * f[1, 1] + f[1, 0]],
                ]
            )
            low, high = np.linalg.eigvalsh(hessian / step**2)
            assert high > 0.1
            assert abs(low) < 1e-3 if flat else low > 0.05


def test_the_sample_has_the_problems_moments() -> None:
    points, positive = toy.sample(50)
    assert points.shape == (50, 2)
    assert positive.dtype == bool
    many, labels = toy.sample(100_000, seed=1)
    np.testing.assert_allclose(many.mean(0), [1, 1], atol=0.02)
    np.testing.assert_allclose(np.cov(many.T), [[2, 1.5], [1.5, 2]], atol=0.05)
    inside = (many**2).sum(1) < toy.boundary_radius() ** 2
    near = np.abs((many**2).sum(1) - 1.5 / 0.4) < 0.2
    assert labels[near].mean() == pytest.approx(0.5, abs=0.03)
    assert labels[inside].mean() < 0.4 < 0.6 < labels[~inside].mean()


def test_the_figure_marks_the_models() -> None:
    drawn = toy.toy_figure()
    assert drawn.figure is not None
    data, losses, logits = drawn.figure.axes
    classes = {line.get_gid(): line for line in data.get_lines()}
    _, positive = toy.sample(50)
    assert len(classes["y=1"].get_xdata()) == positive.sum()
    assert len(classes["y=0"].get_xdata()) == 50 - positive.sum()
    for x, y in zip(*classes["boundary"].get_data(), strict=True):
        assert 0.4 * (x * x + y * y) == pytest.approx(1.5)
    for ax in (losses, logits):
        marks = {line.get_gid(): np.array(line.get_data()) for line in ax.get_lines()}
        np.testing.assert_array_equal(marks["minimum"].ravel(), [0.4, 0.4])
        np.testing.assert_array_equal(marks["invariant"][0], marks["invariant"][1])
        np.testing.assert_array_equal(marks["not invariant"].ravel(), toy.NOT_INVARIANT)
    assert "minima" not in {line.get_gid() for line in losses.get_lines()}
    np.testing.assert_allclose(marks["minima"].sum(0), 0.8)
    # The mark lies on the line of minima, off the diagonal.
    assert sum(toy.NOT_INVARIANT) == pytest.approx(0.8)
    assert toy.NOT_INVARIANT[0] != toy.NOT_INVARIANT[1]
