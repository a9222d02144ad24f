"""The paper's experiments: grids of runs, each a command of fastaug.sweep.

One for each row of the paper's experiments; where it leaves a grid open, the choice is said here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, suggest
from fastaug.experiments.results import setting_of
from fastaug.recipes import RECIPES, first_line, get_recipe

OBJECTIVES = ("losses", "probs", "logits")
CIFAR_IMAGES, IMAGENET_IMAGES = 50_000, 1_281_167


@dataclass(frozen=True)
class Grid:
    """The product of some values, around a recipe; () is the recipe's own."""

    recipe: str
    views: tuple[int, ...] = ()
    average: tuple[str, ...] = ()
    kl_weight: tuple[float, ...] = ()
    lr: tuple[float, ...] = ()
    epochs: tuple[int, ...] = ()

    def configs(self, seeds: Iterable[int], changes: Mapping[str, Any]) -> Iterator[TrainConfig]:
        """changes: settings that all of them have instead of the recipe's."""
        # One view goes with any batch size: only what is run in the end is checked.
        base = get_recipe(self.recipe).replace(views=1, **changes)
        recipe = get_recipe(self.recipe)
        for views, average, kl_weight, lr, epochs, seed in product(
            self.views or (recipe.view.views,),
            self.average or (recipe.loss.average,),
            self.kl_weight or (recipe.loss.kl_weight,),
            self.lr or (recipe.optim.lr,),
            self.epochs or (recipe.optim.epochs,),
            seeds,
        ):
            config = base.replace(
                views=views,
                average=average,
                kl_weight=kl_weight,
                lr=lr,
                epochs=epochs,
                seed=seed,
            )
            yield with_plain_objective(config)


@dataclass(frozen=True)
class Experiment:
    """Grids that answer one question of the paper."""

    name: str
    about: str
    grids: tuple[Grid, ...]
    seeds: int = 1
    tune_seeds: int = 0
    """Seeds that rate and epochs are chosen with; the others are run at the choice alone. 0: all
    seeds everywhere."""
    images: int = 0
    """Training images of the paper's data, to plan with where it is not at hand; 0: not known."""

    @property
    def recipes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(grid.recipe for grid in self.grids))


def with_plain_objective(config: TrainConfig) -> TrainConfig:
    """With one view the objectives coincide and the regularizer is 0: one run, not six. So they do
    without augmentation, where all views are the same."""
    setting = setting_of(config)
    return config.replace(
        views=setting.views,
        average=setting.average,
        kl_weight=setting.kl_weight,
    )


def run_name(config: TrainConfig) -> str:
    """What is varied in a sweep, as the name of a folder."""
    objective = (
        "" if config.view.views == 1 else f"-{config.loss.average}-kl{config.loss.kl_weight:g}"
    )
    schedule = f"lr{config.optim.lr:g}-e{config.optim.epochs}-s{config.run.seed}"
    return f"{config.run.recipe}-k{config.view.views}{objective}-{schedule}"


def expand(
    grids: Iterable[Grid], seeds: Iterable[int], changes: Mapping[str, Any]
) -> dict[str, TrainConfig]:
    """The runs of some grids by name, each once; changes are made to all of them."""
    seeds = tuple(seeds)
    configs = (config for grid in grids for config in grid.configs(seeds, changes))
    return {run_name(config): config for config in configs}


def _powers(*exponents: float) -> tuple[float, ...]:
    return tuple(2.0**exponent for exponent in exponents)


_WRN: dict[str, Any] = {
    "lr": _powers(-8, -9, -10, -11, -12, -13),
    "epochs": (64, 96, 128, 192, 256),
}
_NF: dict[str, Any] = {"lr": _powers(-1, -2, -3, -4), "epochs": (64, 128, 256, 512, 1024)}
_F0: dict[str, Any] = {"lr": (0.2, 0.4, 0.8), "epochs": (45, 90, 180, 360)}
_ALL: dict[str, Any] = {"average": OBJECTIVES, "kl_weight": (0.0, 1.0)}
_LOSSES: dict[str, Any] = {"average": ("losses",), "kl_weight": (0.0, 1.0)}


def _mini(recipe: str, about: str, rates: tuple[float, ...]) -> Experiment:
    """What the five claims need and no more: it is to take half an hour on two cores. The rate is
    tuned with one seed for each setting."""
    return Experiment(
        recipe,
        about,
        (
            Grid(recipe, (1, 2), ("losses", "logits"), (0.0,), rates),
            Grid(recipe, (4,), OBJECTIVES, (0.0, 1.0), rates),
            Grid(recipe, (4,), ("losses",), (0.5, 2.0), rates),
        ),
        seeds=3,
        tune_seeds=1,
    )


EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "cifar100-wrn-16-4",
            "accuracy and invariance versus K, with and without the regularizer; Tab. 1",
            (
                Grid("cifar100-wrn-16-4", (1, 2, 4, 8, 16), **_ALL, **_WRN),
                Grid("cifar100-wrn-16-4-no-da", **_WRN),
            ),
            seeds=5,
            images=CIFAR_IMAGES,
        ),
        Experiment(
            "cifar100-capacity",
            "wider and deeper networks at K=16",
            tuple(
                Grid(f"cifar100-wrn-{shape}", (16,), **_ALL, **_WRN)
                for shape in ("16-8", "16-16", "22-4", "28-4")
            ),
            seeds=5,
            images=CIFAR_IMAGES,
        ),
        # Open: points, objective, and what is tuned. Losses alone, as with the regularizer all
        # three are equal; the rate is tuned for each weight, the epochs are those of the recipe.
        Experiment(
            "cifar100-lambda",
            "the regularizer's weight from 0 to 2 at K=16",
            (
                Grid(
                    "cifar100-wrn-16-4",
                    (16,),
                    ("losses",),
                    (0.0, 0.25, 0.5, 1.0, 1.5, 2.0),
                    _WRN["lr"],
                ),
            ),
            seeds=5,
            images=CIFAR_IMAGES,
        ),
        Experiment(
            "imagenet-nf-resnet101",
            "accuracy and invariance versus K, with and without the regularizer; Tab. 1",
            (
                Grid("imagenet-nf-resnet101", (1, 2, 4, 8), **_ALL, **_NF),
                Grid("imagenet-nf-resnet101-no-da", **_NF),
            ),
            images=IMAGENET_IMAGES,
        ),
        Experiment(
            "imagenet-nf-resnet50",
            "the same with a smaller network; the appendix's table",
            (Grid("imagenet-nf-resnet50", (1, 2, 4, 8), **_ALL, **_NF),),
            images=IMAGENET_IMAGES,
        ),
        Experiment(
            "imagenet-nf-resnet101-randaugment",
            "stronger augmentation, average losses",
            (Grid("imagenet-nf-resnet101-randaugment", (1, 2, 4, 8), **_LOSSES, **_NF),),
            images=IMAGENET_IMAGES,
        ),
        # Its text says losses alone, its Tab. 1 has all three at K=8: both are run.
        Experiment(
            "imagenet-nfnet-f0",
            "stronger augmentation and a stronger network; Tab. 1",
            (
                Grid("imagenet-nfnet-f0", (1, 2, 4, 8), **_LOSSES, **_F0),
                Grid("imagenet-nfnet-f0", (8,), **_ALL, **_F0),
            ),
            images=IMAGENET_IMAGES,
        ),
        # Open as cifar100-lambda.
        Experiment(
            "imagenet-lambda",
            "the regularizer's weight from 0 to 5 at K=8",
            (
                Grid(
                    "imagenet-nf-resnet101",
                    (8,),
                    ("losses",),
                    (0.0, 0.5, 1.0, 2.0, 3.0, 5.0),
                    _NF["lr"],
                ),
            ),
            images=IMAGENET_IMAGES,
        ),
        Experiment(
            "imagenet-k-test",
            "accuracy versus the views at test time: part of imagenet-nf-resnet101, measured in "
            "the final evaluation of each run",
            (Grid("imagenet-nf-resnet101", (8,), **_ALL, **_NF),),
            images=IMAGENET_IMAGES,
        ),
        Experiment(
            "cifar100-resnet18",
            "a network with batch norm",
            (
                Grid(
                    "cifar100-resnet18",
                    (1, 2, 4, 8, 16),
                    **_ALL,
                    lr=_powers(-9, -9.5, -10, -10.5, -11),
                    epochs=(272, 288, 304, 320, 336, 352),
                ),
            ),
            seeds=5,  # open; five is what the paper says of its CIFAR-100 runs
            images=CIFAR_IMAGES,
        ),
        # From single runs: at 2**-6 the WRN did not train at this size, and at 2**-7 it was slow to
        # begin with the regularizer.
        _mini(
            "mini-cifar",
            "the paper's claims in small, on a CIFAR-like folder (--data)",
            _powers(-7.5, -8),
        ),
        _mini("mini-shapes", "the paper's claims in small, on the built-in data", _powers(-8, -9)),
    )
}


def get_experiment(name: str) -> Experiment:
    """An experiment, or a single recipe as one: the flags give its grid."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    if name in RECIPES:
        return Experiment(name, first_line(name), (Grid(name),))
    raise ConfigError(
        f"no experiment or recipe {name!r}: {suggest(name, {*EXPERIMENTS, *RECIPES})}"
    )
