"""Recipes and experiments against the paper's table of experiments, typed here by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from expect import raises

from fastaug.config import TrainConfig
from fastaug.engine.optim import learning_rate
from fastaug.engine.trainer import Trainer
from fastaug.errors import ConfigError
from fastaug.experiments.grids import (
    EXPERIMENTS,
    Grid,
    expand,
    get_experiment,
    run_name,
)
from fastaug.recipes import RECIPES, get_recipe
from fastaug.train import main

# What all of the paper's runs share.
SHARED = {"momentum": 0.9, "nesterov": False, "optimizer": "sgd", "ema": 0.0, "average": "losses"}
WRN = SHARED | {
    "batch_size": 64,
    "views": 16,
    "weight_decay": 5e-4,
    "label_smoothing": 0.0,
    "dropout": 0.0,
    "stochastic_depth": 0.0,
    "schedule": "halving",
    "lr_scaling": "unique-images",
    "size": 32,
    "crop": "pad",
    "augment": "crop-flip",
    "kl_weight": 1.0,
    "tta": 16,
    "precision": "fp32",
}
NF = SHARED | {
    "batch_size": 1024,
    "views": 8,
    "weight_decay": 5e-4,
    "label_smoothing": 0.1,
    "dropout": 0.25,
    "stochastic_depth": 0.1,
    "schedule": "cosine",
    "lr_scaling": "none",
    "size": 224,
    "crop": "resized",
    "crop_area": (0.08, 1.0),
    "crop_sampling": "tf",
    "interpolation": "bicubic",
    "antialias": False,
    "augment": "crop-flip",
    "kl_weight": 1.0,
    "tta": 8,
}
RANDAUGMENT = {
    "augment": "randaugment",
    "randaugment_policy": "nfnet",
    "randaugment_layers": 4,
    "randaugment_magnitude": 5.0,
}
NO_DA = {"augment": "none", "views": 1}
TABLE: dict[str, dict] = {
    "cifar100-wrn-16-4": WRN | {"model": "wrn-16-4"},
    "cifar100-wrn-16-4-no-da": WRN | {"model": "wrn-16-4", "kl_weight": 0.0} | NO_DA,
    "cifar100-wrn-16-8": WRN | {"model": "wrn-16-8"},
    "cifar100-wrn-16-16": WRN | {"model": "wrn-16-16"},
    "cifar100-wrn-22-4": WRN | {"model": "wrn-22-4"},
    "cifar100-wrn-28-4": WRN | {"model": "wrn-28-4"},
    "cifar100-resnet18": WRN
    | {"model": "resnet18", "batch_size": 528, "schedule": "cosine", "batch_norm": "local"},
    "imagenet-nf-resnet50": NF | {"model": "nf_resnet50"},
    "imagenet-nf-resnet101": NF | {"model": "nf_resnet101"},
    "imagenet-nf-resnet101-no-da": NF | {"model": "nf_resnet101", "kl_weight": 0.0} | NO_DA,
    "imagenet-nf-resnet101-randaugment": NF | {"model": "nf_resnet101"} | RANDAUGMENT,
    "imagenet-nfnet-f0": NF
    | {
        "model": "nfnet_f0",
        "weight_decay": 2e-5,
        "dropout": 0.2,
        "stochastic_depth": 0.25,
        "schedule": "cosine",
        "warmup_epochs": 5.0,
    }
    | RANDAUGMENT,
}

ALL_THREE = {(a, w) for a in ("losses", "probs", "logits") for w in (0.0, 1.0)}
LOSSES = {("losses", 0.0), ("losses", 1.0)}
WRN_GRID = ({2.0**-a for a in range(8, 14)}, {64, 96, 128, 192, 256})
NF_GRID = ({0.5, 0.25, 0.125, 0.0625}, {64, 128, 256, 512, 1024})
# Experiment -> recipe -> (K -> objectives, rates, epochs); seeds.
GRIDS: dict[str, tuple[dict, int]] = {
    "cifar100-wrn-16-4": (
        {
            "cifar100-wrn-16-4": (dict.fromkeys((2, 4, 8, 16), ALL_THREE), *WRN_GRID),
            "cifar100-wrn-16-4-no-da": ({}, *WRN_GRID),
        },
        5,
    ),
    "cifar100-capacity": (
        {
            f"cifar100-wrn-{shape}": ({16: ALL_THREE}, *WRN_GRID)
            for shape in ("16-8", "16-16", "22-4", "28-4")
        },
        5,
    ),
    "imagenet-nf-resnet101": (
        {
            "imagenet-nf-resnet101": (dict.fromkeys((2, 4, 8), ALL_THREE), *NF_GRID),
            "imagenet-nf-resnet101-no-da": ({}, *NF_GRID),
        },
        1,
    ),
    "imagenet-nf-resnet50": (
        {"imagenet-nf-resnet50": (dict.fromkeys((2, 4, 8), ALL_THREE), *NF_GRID)},
        1,
    ),
    "imagenet-nf-resnet101-randaugment": (
        {"imagenet-nf-resnet101-randaugment": (dict.fromkeys((2, 4, 8), LOSSES), *NF_GRID)},
        1,
    ),
    "imagenet-nfnet-f0": (
        {
            "imagenet-nfnet-f0": (
                {2: LOSSES, 4: LOSSES, 8: ALL_THREE},
                {0.2, 0.4, 0.8},
                {45, 90, 180, 360},
            )
        },
        1,
    ),
    "imagenet-k-test": ({"imagenet-nf-resnet101": ({8: ALL_THREE}, *NF_GRID)}, 1),
    "cifar100-resnet18": (
        {
            "cifar100-resnet18": (
                dict.fromkeys((2, 4, 8, 16), ALL_THREE),
                {2.0**a for a in (-9, -9.5, -10, -10.5, -11)},
                {272, 288, 304, 320, 336, 352},
            )
        },
        5,
    ),
}
# These go to K=1, where there is one objective and no regularizer.
HAS_ONE_VIEW = set(GRIDS) - {"cifar100-capacity", "imagenet-k-test"}


def configs_of(name: str) -> list[TrainConfig]:
    experiment = EXPERIMENTS[name]
    return list(expand(experiment.grids, range(experiment.seeds), {}).values())


@pytest.mark.parametrize("name", TABLE)
def test_a_recipe_is_that_of_the_paper(name: str) -> None:
    config = get_recipe(name)
    assert {key: config.get(key) for key in TABLE[name]} == TABLE[name]


def test_every_recipe_of_the_paper_is_compared() -> None:
    own = tuple(
        name for name in RECIPES if name.startswith(("shapes", "finetune", "mini", "small"))
    )
    assert set(RECIPES) - {*own} == set(TABLE)


@pytest.mark.parametrize("name", GRIDS)
def test_an_experiment_is_that_of_the_paper(name: str) -> None:
    recipes, seeds = GRIDS[name]
    configs = configs_of(name)
    assert {c.run.seed for c in configs} == set(range(seeds))
    assert {c.run.recipe for c in configs} == set(recipes)
    runs = 0
    for recipe, (objectives, rates, epochs) in recipes.items():
        own = [c for c in configs if c.run.recipe == recipe]
        assert {c.optim.lr for c in own} == rates
        assert {c.optim.epochs for c in own} == epochs
        for views, expected in objectives.items():
            assert {
                (c.loss.average, c.loss.kl_weight) for c in own if c.view.views == views
            } == expected
            runs += len(expected) * len(rates) * len(epochs) * seeds
        has_one_view = name in HAS_ONE_VIEW
        assert {c.view.views for c in own} == set(objectives) | ({1} if has_one_view else set())
        assert {(c.loss.average, c.loss.kl_weight) for c in own if c.view.views == 1} <= {
            ("losses", 0.0)
        }
        runs += has_one_view * len(rates) * len(epochs) * seeds
    assert len(configs) == runs


@pytest.mark.parametrize(
    ("name", "recipe", "views", "highest"),
    [
        ("cifar100-lambda", "cifar100-wrn-16-4", 16, 2.0),
        ("imagenet-lambda", "imagenet-nf-resnet101", 8, 5.0),
    ],
)
def test_a_sweep_of_the_weight(name: str, recipe: str, views: int, highest: float) -> None:
    configs = configs_of(name)
    assert {(c.run.recipe, c.view.views) for c in configs} == {(recipe, views)}
    weights = {c.loss.kl_weight for c in configs}
    assert {0.0, 1.0, highest} <= weights
    assert max(weights) == highest


def test_the_wrn_experiment_counts_as_many_runs_as_the_paper_s_grid() -> None:
    # K=1: one setting, K=2..16: six each, no augmentation: one; 30 points, 5 seeds.
    assert len(configs_of("cifar100-wrn-16-4")) == (1 + 4 * 6 + 1) * 30 * 5


def test_names_tell_runs_apart() -> None:
    for experiment in EXPERIMENTS.values():
        configs = [config for grid in experiment.grids for config in grid.configs(range(2), {})]
        assert len({run_name(config) for config in configs}) == len(set(configs))


def test_changes_are_made_to_every_run_before_the_batch_is_checked() -> None:
    runs = expand([Grid("shapes", views=(1, 48))], [0], {"batch_size": 96})
    assert [(c.view.views, c.images_per_step) for c in runs.values()] == [(1, 96), (48, 2)]
    with raises(ConfigError, "96 90 105"):
        expand([Grid("shapes", views=(15,))], [0], {"batch_size": 96})


def test_a_recipe_is_an_experiment_of_one_point() -> None:
    (config,) = expand(get_experiment("shapes").grids, [0], {}).values()
    assert config == get_recipe("shapes")
    with raises(ConfigError, "cifar100-lambda"):
        get_experiment("cifar100-lamda")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_starts(name: str, tmp_path: Path) -> None:
    """One step of the recipe's network on data of its form; nothing is written."""
    rng = np.random.default_rng(0)
    config = get_recipe(name)
    side = 32 if config.view.size == 32 else 64
    images = {
        "train_images": rng.integers(0, 256, (4, side, side, 3), np.uint8),
        "train_labels": np.arange(4) % 2,
        "test_images": rng.integers(0, 256, (2, side, side, 3), np.uint8),
        "test_labels": np.arange(2),
    }
    np.savez(tmp_path / "data.npz", **images)
    config = config.replace(
        data=str(tmp_path / "data.npz"),
        train_images=0,
        validation=0.0,
        pretrained=False,  # would need a download
        size=side,
        views=min(config.view.views, 2),
        batch_size=2,  # the least that batch norm takes
        workers=0,
    )
    trainer = Trainer(config)
    learner = trainer.learner
    learner.start_step(0)
    terms = learner.backward(next(iter(trainer.loader)), 1.0, last=True)
    rate = learning_rate(0, trainer.steps_per_epoch, config.optim, config.images_per_step)
    assert not learner.update(rate)  # no bad gradient
    assert all(term.isfinite().all() for term in terms)


def test_recipes_are_listed(capsys: pytest.CaptureFixture) -> None:
    assert main(["--list-recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in RECIPES)
    assert "2^-10 x unique images" in listed


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_is(name: str) -> None:
    text = RECIPES[name].__doc__ or ""
    assert text.partition("\n")[0].endswith(".")
    if name in TABLE:  # what the paper leaves open is stated, here or where it refers to
        assert "Open" in text


def _flat(names: Iterable[Iterable[str]]) -> list[str]:
    return [name for some in names for name in some]


def test_experiments_cover_every_recipe_of_the_paper() -> None:
    assert set(_flat(e.recipes for e in EXPERIMENTS.values())) >= set(TABLE)
