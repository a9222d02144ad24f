from __future__ import annotations

import json
from dataclasses import replace

import pytest
from expect import raises

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError
from fastaug.evaluate import EvaluateConfig
from fastaug.recipes import RECIPES, get_recipe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"views": 0}, "--views 1 0"),
        ({"epochs": 0}, "--epochs 1 0"),
        ({"lr": float("nan")}, "--lr 0 nan"),
        ({"kl_weight": -1.0}, "--kl-weight 0 -1.0"),
        ({"label_smoothing": 1.0}, "--label-smoothing 0 1 1.0"),
        ({"ema": 1.0}, "--ema 0 1 1.0"),
        ({"seed": 2**32}, "--seed"),
        ({"max_bad": 5.0}, "--max-bad 0 1 5.0"),
        ({"prefetch": 0}, "--prefetch 1 0"),
        ({"views_dtype": "fp16"}, "--views-dtype fp16 --precision bf16"),
        ({"views_dtype": "bf16"}, "--views-dtype bf16 --precision fp16"),
        ({"interpolation": "cubic"}, "cubic --interpolation bicubic"),
        ({"views_engine": "fused"}, "--views-engine dali --dali fused"),
        ({"views_engine": "dali"}, "--views-engine dali --dali"),
        (
            {
                "loader": "dali",
                "views_engine": "fused",
                "augment": "randaugment",
                "randaugment_policy": "dali",
            },
            "--views-engine fused --randaugment-policy dali",
        ),
        (
            {"augment": "randaugment", "randaugment_policy": "dali"},
            "--randaugment-policy dali --loader",
        ),
        (
            {"loader": "dali", "randaugment_policy": "dali", "randaugment_magnitude": 31},
            "--randaugment-magnitude 0 30",
        ),
        ({"randaugment_layers": 17}, "--randaugment-layers 1 16 17"),
        ({"crop_area": (0.5, 0.2)}, "--crop-area 0 LOW HIGH 1 0.5 0.2"),
        ({"randaugment_magnitude": 11.0}, "0 10 11.0"),
        ({"average": "means"}, "means --average logits losses probs"),
        ({"precision": "fp61"}, "fp61 --precision fp16"),
        ({"nesterov": True, "momentum": 0.0}, "--nesterov --momentum 0"),
        (
            {"schedule": "warmup-cosine", "warmup_epochs": 10.0, "epochs": 10},
            "--warmup-epochs --epochs 10 10.0",
        ),
    ],
)
def test_a_wrong_value_says_what_is_allowed(changes: dict, message: str) -> None:
    with raises(ConfigError, message):
        TrainConfig(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"views_engine": "fused", "augment": "randaugment"},
        {"views_engine": "fused", "randaugment_policy": "dali"},  # which no view is made with
        {"views_engine": "dali", "augment": "randaugment", "randaugment_policy": "dali"},
        {"views_engine": "auto", "augment": "randaugment", "randaugment_policy": "dali"},
    ],
)
def test_engines_that_can_make_the_views(changes: dict) -> None:
    assert TrainConfig(loader="dali", **changes).views_engine == changes["views_engine"]


@pytest.mark.parametrize(
    ("batch_size", "views", "accumulate", "nearest"),
    [(66, 4, 1, "64 or 68"), (3, 4, 1, "4"), (64, 4, 3, "60 or 72"), (65, 1, 2, "64 or 66")],
)
def test_an_indivisible_batch_names_the_nearest_sizes(
    batch_size: int, views: int, accumulate: int, nearest: str
) -> None:
    with raises(ConfigError, f"{batch_size} {nearest}"):
        TrainConfig(batch_size=batch_size, views=views, accumulate=accumulate)


def test_images_per_step_and_part() -> None:
    config = TrainConfig(batch_size=96, views=4, accumulate=3)
    assert config.images_per_step == 24
    assert config.images_per_part() == 8
    assert config.images_per_part(ranks=2) == 4
    with raises(ConfigError, "ranks 5"):
        config.images_per_part(ranks=5)


@pytest.mark.parametrize("name", RECIPES)
def test_a_config_survives_json(name: str) -> None:
    config = get_recipe(name)
    assert config.recipe == name
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_unknown_setting_is_refused() -> None:
    with raises(ConfigError, "vews"):
        TrainConfig.from_dict({"vews": 3})


def test_an_unknown_recipe_suggests_names() -> None:
    with raises(ConfigError, "imagenet-nf-resnet50"):
        get_recipe("imagenet-nf-resnet5")


def test_differences_are_those_that_change_the_training() -> None:
    config = TrainConfig()
    assert config.differences(replace(config, workers=3, out="x", max_steps=5, device="cpu")) == []
    dali = replace(config, loader="dali", views_engine="fused")
    assert config.differences(dali) == []
    resized = replace(config, interpolation="bilinear", antialias=True)
    assert config.differences(resized) == [
        "--interpolation bicubic (here: bilinear)",
        "--antialias False (here: True)",
    ]
    differing = config.differences(replace(config, views=2, lr=1.0))
    assert differing == ["--views 4 (here: 2)", f"--lr {config.lr} (here: 1.0)"]


def test_evaluate_config_is_checked_too() -> None:
    with raises(ConfigError, "--tta -1 -2"):
        EvaluateConfig(checkpoint="x", tta=-2)
