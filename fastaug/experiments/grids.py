"""The paper's experiments as grids of runs for fastaug.sweep.

One for each row of the paper's table of experiments. Where the paper leaves a value open, a comment
gives our choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, suggest
from fastaug.experiments.run import AVERAGES, setting_of
from fastaug.kernels.config import Average
from fastaug.recipes import RECIPES, first_line, get_recipe

CIFAR_IMAGES, IMAGENET_IMAGES = 50_000, 1_281_167


@dataclass(frozen=True)
class Grid:
    """A recipe with a product of values of some settings; () is the recipe's value."""

    recipe: str
    views: tuple[int, ...] = ()
    average: tuple[Average, ...] = ()
    kl_weight: tuple[float, ...] = ()
    lr: tuple[float, ...] = ()
    epochs: tuple[int, ...] = ()
    most_seeds: int = 0
    """Seeds of these settings, if fewer than those of the sweep; 0: as many."""

    def configs(self, seeds: Iterable[int], changes: Mapping[str, Any]) -> Iterator[TrainConfig]:
        """changes: settings that replace the recipe's in all runs."""
        recipe = get_recipe(self.recipe)
        if self.most_seeds:
            seeds = [seed for seed in seeds if seed < self.most_seeds]
        # Any batch size is a multiple of one view: only the final config is checked.
        base = recipe.replace(views=1, **changes)
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
    """Seeds for choosing learning rate and epochs; the others run only with the chosen ones. 0: all
    seeds at every point."""
    compares_epochs: bool = False
    """True if the epochs are what is compared: the learning rate is chosen for each number of
    epochs, and none of them is chosen."""
    images: int = 0
    """Number of training images in the paper, for a plan without the data; 0: unknown."""

    @property
    def recipes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(grid.recipe for grid in self.grids))


def with_plain_objective(config: TrainConfig) -> TrainConfig:
    """With one view or without augmentation the objectives coincide and the regularizer is 0: one
    run instead of six."""
    setting = setting_of(config)
    return config.replace(
        views=setting.views,
        average=setting.average,
        kl_weight=setting.kl_weight,
    )


def run_name(config: TrainConfig) -> str:
    """Folder name of a run, with all settings that a sweep varies."""
    views, loss = config.view.views, config.loss
    objective = "" if views == 1 else f"-{loss.average}-kl{loss.kl_weight:g}"
    point = f"lr{config.optim.lr:g}-e{config.optim.epochs}-s{config.run.seed}"
    return f"{config.run.recipe}-k{views}{objective}-{point}"


def expand(
    grids: Iterable[Grid], seeds: Iterable[int], changes: Mapping[str, Any]
) -> dict[str, TrainConfig]:
    """The runs of some grids by name, without duplicates, with `changes` applied to all."""
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
_RESNET18: dict[str, Any] = {
    "lr": _powers(-9, -9.5, -10, -10.5, -11),
    "epochs": (272, 288, 304, 320, 336, 352),
}
_ALL: dict[str, Any] = {"average": AVERAGES, "kl_weight": (0.0, 1.0)}
_LOSSES: dict[str, Any] = {"average": ("losses",), "kl_weight": (0.0, 1.0)}


def _cifar(name: str, about: str, *grids: Grid) -> Experiment:
    return Experiment(name, about, grids, seeds=5, images=CIFAR_IMAGES)


def _imagenet(name: str, about: str, *grids: Grid) -> Experiment:
    return Experiment(name, about, grids, images=IMAGENET_IMAGES)


def _small(
    name: str,
    about: str,
    *grids: Grid,
    seeds: int = 5,
    compares_epochs: bool = False,
    images: int = 1024,
) -> Experiment:
    """A question of docs/paper.md in small. Every setting is tuned over the same rates, with two
    seeds."""
    return Experiment(name, about, grids, seeds, 2, compares_epochs, images)


def _mini(recipe: str, about: str) -> Experiment:
    """Five settings with two seeds at the recipe's rate: ten minutes on two cores. It shows how the
    claims are checked; it has too few runs to decide any."""
    grids = (
        Grid(recipe, (1,), ("losses",), (0.0,)),
        Grid(recipe, (4,), ("losses", "logits"), (0.0, 1.0)),
    )
    return Experiment(recipe, about, grids, seeds=2)


_RATES, _RATES_OF_ONE = _powers(-8, -9, -10), _powers(-9, -10, -11)
"""Rates of small-cifar for several views and for one, as many for each. With 2**-7 and eight views
a run of 512 images learned nothing for 30 epochs; with 2**-8 and one view a run of 960 epochs
diverged, and runs of 80 were worse than with 2**-9 and 2**-10."""
_TWO_RATES, _TWO_OF_ONE = _powers(-8, -9), _powers(-9, -10)
"""Of those, for settings beside the main ones and for the longest runs."""
_LOWER, _LOWER_OF_ONE = _powers(-11), _powers(-12)
"""Added for settings that were best with the lowest of three."""
_HIGHER = _powers(-7)
"""Added with RandAugment, where four views were best with the highest of three."""

_EXPERIMENTS = (
    _cifar(
        "cifar100-wrn-16-4",
        "accuracy and invariance versus K, with and without the regularizer; Tab. 1",
        Grid("cifar100-wrn-16-4", (1, 2, 4, 8, 16), **_ALL, **_WRN),
        Grid("cifar100-wrn-16-4-no-da", **_WRN),
    ),
    _cifar(
        "cifar100-capacity",
        "wider and deeper networks at K=16",
        *(
            Grid(f"cifar100-wrn-{shape}", (16,), **_ALL, **_WRN)
            for shape in ("16-8", "16-16", "22-4", "28-4")
        ),
    ),
    # The paper gives neither points nor objective nor what is tuned. We run only losses, as all
    # three are equal with the regularizer, tune the rate for each weight and keep the epochs.
    _cifar(
        "cifar100-lambda",
        "the regularizer's weight from 0 to 2 at K=16",
        Grid("cifar100-wrn-16-4", (16,), ("losses",), (0.0, 0.25, 0.5, 1.0, 1.5, 2.0), _WRN["lr"]),
    ),
    _imagenet(
        "imagenet-nf-resnet101",
        "accuracy and invariance versus K, with and without the regularizer; Tab. 1",
        Grid("imagenet-nf-resnet101", (1, 2, 4, 8), **_ALL, **_NF),
        Grid("imagenet-nf-resnet101-no-da", **_NF),
    ),
    _imagenet(
        "imagenet-nf-resnet50",
        "the same with a smaller network; the appendix's table",
        Grid("imagenet-nf-resnet50", (1, 2, 4, 8), **_ALL, **_NF),
    ),
    _imagenet(
        "imagenet-nf-resnet101-randaugment",
        "stronger augmentation, average losses",
        Grid("imagenet-nf-resnet101-randaugment", (1, 2, 4, 8), **_LOSSES, **_NF),
    ),
    # The paper's text has only losses, its Tab. 1 all three at K=8: we run both.
    _imagenet(
        "imagenet-nfnet-f0",
        "stronger augmentation and a stronger network; Tab. 1",
        Grid("imagenet-nfnet-f0", (1, 2, 4, 8), **_LOSSES, **_F0),
        Grid("imagenet-nfnet-f0", (8,), **_ALL, **_F0),
    ),
    # As cifar100-lambda.
    _imagenet(
        "imagenet-lambda",
        "the regularizer's weight from 0 to 5 at K=8",
        Grid("imagenet-nf-resnet101", (8,), ("losses",), (0.0, 0.5, 1.0, 2.0, 3.0, 5.0), _NF["lr"]),
    ),
    _imagenet(
        "imagenet-k-test",
        "accuracy versus the number of test-time views: part of imagenet-nf-resnet101, measured in "
        "the final evaluation of each run",
        Grid("imagenet-nf-resnet101", (8,), **_ALL, **_NF),
    ),
    # The paper gives no number of seeds here; its other CIFAR-100 runs have five.
    _cifar(
        "cifar100-resnet18",
        "a network with batch norm",
        Grid("cifar100-resnet18", (1, 2, 4, 8, 16), **_ALL, **_RESNET18),
    ),
    _mini("mini-cifar", "the paper's claims in ten minutes, on a CIFAR-like folder (--data)"),
    _mini("mini-shapes", "the paper's claims in ten minutes, on the built-in data"),
    _small(
        "small-views",
        "in small: accuracy and invariance versus K, with and without the regularizer",
        Grid("small-cifar", (1,), ("losses",), (0.0,), _RATES_OF_ONE),
        Grid("small-cifar", (4,), ("losses",), (0.0, 1.0), _RATES),
        Grid("small-cifar", (4,), ("logits",), (0.0, 1.0), _RATES, most_seeds=5),
        Grid("small-cifar", (4,), ("probs",), (0.0, 1.0), _TWO_RATES, most_seeds=3),
        Grid("small-cifar", (2,), ("losses",), (0.0, 1.0), _TWO_RATES),
        Grid("small-cifar", (8,), ("losses",), (0.0, 1.0), _TWO_RATES, most_seeds=3),
        Grid("small-cifar", (2, 8), ("logits",), (0.0, 1.0), _TWO_RATES, most_seeds=3),
        Grid("small-cifar", (4,), ("losses",), (0.0,), _LOWER),
        Grid("small-cifar", (4,), ("logits",), (0.0,), _LOWER, most_seeds=5),
        Grid("small-cifar", (2, 8), ("logits",), (0.0,), _powers(-10, -11), most_seeds=3),
        seeds=8,
    ),
    # K views for E epochs cost as much as one view for K times E epochs.
    _small(
        "small-compute",
        "in small: accuracy at equal compute, K views against more epochs",
        Grid("small-cifar", (1,), ("losses",), (0.0,), _RATES_OF_ONE, (80, 160, 320)),
        Grid("small-cifar", (2,), ("losses",), (0.0, 1.0), _TWO_RATES, (80,)),
        Grid("small-cifar", (4,), ("losses",), (0.0, 1.0), _RATES, (80,)),
        Grid("small-cifar", (4,), ("losses",), (0.0,), _LOWER, (80,)),
        Grid("small-cifar", (8,), ("losses",), (0.0, 1.0), _TWO_RATES, (80,), most_seeds=3),
        Grid("small-cifar", (1,), ("losses",), (0.0,), _TWO_OF_ONE, (640, 1280), most_seeds=3),
        Grid("small-cifar", (4,), ("losses",), (0.0, 1.0), _TWO_RATES, (320,), most_seeds=3),
        seeds=8,
        compares_epochs=True,
    ),
    _small(
        "small-finetune",
        "in small: fine-tuning on other classes, at equal epochs and at equal compute",
        Grid(
            "small-cifar-finetune",
            (1,),
            ("losses",),
            (0.0,),
            _RATES_OF_ONE + _LOWER_OF_ONE,
            (80, 320, 640),
        ),
        Grid("small-cifar-finetune", (4, 8), ("losses",), (0.0, 1.0), _RATES + _LOWER, (80,)),
        compares_epochs=True,
    ),
    _small(
        "small-lambda",
        "in small: the regularizer's weight from 0 to 5 at K=4",
        Grid("small-cifar", (4,), ("losses",), (0.0, 1.0), _RATES),
        Grid("small-cifar", (4,), ("losses",), (0.0,), _LOWER),
        Grid("small-cifar", (4,), ("losses",), (0.5, 2.0, 5.0), _TWO_RATES, most_seeds=3),
    ),
    _small(
        "small-randaugment",
        "in small: stronger augmentation",
        Grid("small-cifar-randaugment", (1,), ("losses",), (0.0,), _RATES_OF_ONE),
        Grid("small-cifar-randaugment", (4,), ("losses",), (0.0, 1.0), _HIGHER + _RATES),
        seeds=3,
    ),
    # At 80 epochs RandAugment leaves a training loss far above 0, most of all with the regularizer.
    # Longer runs of four views have the rate that was best without RandAugment.
    _small(
        "small-randaugment-longer",
        "in small: stronger augmentation, at equal epochs and at equal compute",
        Grid("small-cifar-randaugment", (1,), ("losses",), (0.0,), _TWO_OF_ONE, (80,)),
        Grid("small-cifar-randaugment", (4,), ("losses",), (0.0, 1.0), _HIGHER + _TWO_RATES, (80,)),
        Grid("small-cifar-randaugment", (1,), ("losses",), (0.0,), _TWO_RATES, (320,)),
        Grid("small-cifar-randaugment", (4,), ("losses",), (0.0, 1.0), _powers(-8), (320,)),
        seeds=3,
        compares_epochs=True,
    ),
    _small(
        "small-batchnorm",
        "in small: a network with batch norm",
        Grid("small-cifar-resnet18-16", (1,), ("losses",), (0.0,), _RATES_OF_ONE),
        Grid("small-cifar-resnet18-16", (4,), ("losses",), (0.0, 1.0), _RATES),
        Grid("small-cifar-resnet18-16", (4,), ("logits",), (0.0,), _RATES),
        seeds=3,
    ),
    # Four views for 80 epochs are far ahead of one with batch norm: also at equal compute?
    _small(
        "small-batchnorm-longer",
        "in small: a network with batch norm, at equal compute",
        Grid("small-cifar-resnet18-16", (1,), ("losses",), (0.0,), _TWO_OF_ONE, (80,)),
        Grid("small-cifar-resnet18-16", (1,), ("losses",), (0.0,), _RATES, (320,)),
        Grid("small-cifar-resnet18-16", (4,), ("losses",), (0.0, 1.0), _TWO_RATES, (80,)),
        seeds=3,
        compares_epochs=True,
    ),
    _small(
        "small-capacity",
        "in small: wider and deeper networks at K=4",
        Grid("small-cifar", (4,), ("losses",), (0.0, 1.0), _RATES),
        Grid("small-cifar", (4,), ("losses",), (0.0,), _LOWER),
        *(
            Grid(f"small-cifar-wrn-{shape}", (4,), ("losses",), (0.0, 1.0), _TWO_RATES)
            for shape in ("10-1", "16-2")
        ),
        seeds=3,
    ),
    # 80 epochs are as many updates as 320 epochs of small-compute, where the regularizer has no
    # visible effect and all images are fitted. The rates are those that were best there, at as many
    # updates.
    _small(
        "small-data",
        "in small: four times the images, at equal epochs and at equal compute",
        Grid("small-cifar-4096", (4,), ("losses",), (0.0, 1.0), _powers(-8), (80,)),
        Grid("small-cifar-4096", (1,), ("losses",), (0.0,), _powers(-9), (80, 320)),
        seeds=3,
        compares_epochs=True,
        images=4096,
    ),
)
EXPERIMENTS = {experiment.name: experiment for experiment in _EXPERIMENTS}


def get_experiment(name: str) -> Experiment:
    """An experiment, or a recipe as an experiment with a grid from the flags."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    if name in RECIPES:
        return Experiment(name, first_line(name), (Grid(name),))
    raise ConfigError(
        f"no experiment or recipe {name!r}; {suggest(name, {*EXPERIMENTS, *RECIPES})}"
    )
