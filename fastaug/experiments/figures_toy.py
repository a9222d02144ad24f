"""The figure of the toy example: data, and the loss surfaces of averaged losses and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastaug.experiments import toy
from fastaug.experiments.figure_style import BLACK, GREY, LOOKS, ORANGE, PAGE, finish, new_figure
from fastaug.experiments.figures_parts import Drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 50
NOT_INVARIANT = (0.7, 0.1)
"""A model that averaged logits like as much as the invariant one."""
_LOW, _HIGH, _STEPS = -0.1, 0.9, 51
_LEVELS = 14


def toy_example() -> Drawn:
    figure = new_figure(PAGE, 2.6)
    data, losses, logits = figure.subplots(1, 3)
    _draw_data(data)
    weights = np.linspace(_LOW, _HIGH, _STEPS)
    grid = np.meshgrid(weights, weights)
    surfaces = toy.average_losses(*grid), toy.average_logits(*grid)
    least = float(toy.average_losses(*toy.OPTIMUM))
    # Both share their levels, closer together near the minimum.
    levels = least + (np.nanmax(surfaces) - least) * np.linspace(0.0, 1.0, _LEVELS) ** 2
    for ax, surface, name in zip((losses, logits), surfaces, ("losses", "logits"), strict=True):
        ax.contourf(weights, weights, surface, levels=levels, cmap="Blues", extend="max")
        ax.contour(weights, weights, surface, levels=levels[1:], colors=GREY, linewidths=0.4)
        _draw_marks(ax, with_line=name == "logits")
        ax.set_title(LOOKS[name].label)
    handles, _ = logits.get_legend_handles_labels()
    finish(figure, "Toy example", [handles])
    caption = (
        "Why averaged losses encourage invariance and averaged logits do not. Left: "
        f"{POINTS} points of a binary problem with rotational symmetry; on the circle both classes "
        "are equally likely. Middle and right: the losses of the model w1 x1² + w2 x2² - 1.5 for "
        "infinitely many points and uniform rotations, pale where they are small. Averaged losses "
        "have one minimum, at the invariant model w1 = w2 = 0.4; averaged logits are as small "
        "anywhere on the line w1 + w2 = 0.8."
    )
    return Drawn("toy", "Toy example", caption, figure)


def _draw_data(ax: Axes) -> None:
    points, positive = toy.sample(POINTS)
    for label, color, marker in ((True, LOOKS["probs"].color, "o"), (False, BLACK, "x")):
        x, y = points[positive == label].T
        ax.plot(x, y, marker, color=color, ms=3.5, label=f"y = {int(label)}", gid=f"y={int(label)}")
    angles = np.linspace(0.0, 2 * np.pi, 200)
    radius = toy.boundary_radius()
    ax.plot(radius * np.cos(angles), radius * np.sin(angles), color=BLACK, lw=1, gid="boundary")
    low, high = points.min() - 0.5, points.max() + 0.5
    ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    ax.set_xlabel("$x_1$")
    ax.set_ylabel("$x_2$")
    ax.set_title(f"{POINTS} points of the data")
    ax.legend(loc="upper left", handlelength=1, borderaxespad=0)


def _draw_marks(ax: Axes, *, with_line: bool) -> None:
    """The models that the text speaks of."""
    ends = [_LOW, _HIGH]
    ax.plot(ends, ends, "--", color=LOOKS["losses"].color, label="$w_1 = w_2$", gid="invariant")
    if with_line:
        total = sum(toy.OPTIMUM)
        first = [total - _HIGH, _HIGH]
        second = [total - w for w in first]
        ax.plot(first, second, color=ORANGE, lw=2, label="minima, $w_1 + w_2 = 0.8$", gid="minima")
    label = "minimum, invariant"
    ax.plot(*toy.OPTIMUM, "o", color=LOOKS["probs"].color, ms=6, label=label, gid="minimum")
    label = "not invariant"
    ax.plot(*NOT_INVARIANT, "+", color=BLACK, ms=9, mew=1.8, label=label, gid="not invariant")
    ax.set(xlim=(_LOW, _HIGH), ylim=(_LOW, _HIGH), aspect="equal")
    ax.grid(visible=False)
    ax.set_xlabel("$w_1$")
    ax.set_ylabel("$w_2$")
