from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError
from fastaug.evaluate import EvaluateConfig
from fastaug.recipes import RECIPES, get_recipe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"views": 0}, "--views must be at least 1, got 0"),
        ({"epochs": 0}, "--epochs must be at least 1, got 0"),
        ({"lr": float("nan")}, "--lr must be finite, and at least 0, got nan"),
        ({"kl_weight": -1.0}, "--kl-weight must be at least 0, got -1.0"),
        ({"label_smoothing": 1.0}, "--label-smoothing must be at least 0 and below 1, got 1.0"),
        ({"ema": 1.0}, "--ema must be at least 0 and below 1, got 1.0"),
        ({"seed": 2**32}, "--seed must be below"),
        ({"max_bad": 5.0}, "--max-bad is a share, between 0 and 1, got 5.0"),
        ({"prefetch": 0}, "--prefetch must be at least 1, got 0"),
        ({"views_dtype": "fp16"}, "--views-dtype fp16 needs --precision fp16 or bf16"),
        ({"views_dtype": "bf16"}, "--views-dtype bf16 needs --precision fp16 or bf16"),
        ({"interpolation": "cubic"}, "--interpolation cannot be 'cubic': did you mean bicubic"),
        ({"views_engine": "fused"}, "--views-engine is of the dali loader: add --dali; got fused"),
        ({"views_engine": "dali"}, "--views-engine is of the dali loader: add --dali; got dali"),
        (
            {
                "loader": "dali",
                "views_engine": "fused",
                "augment": "randaugment",
                "randaugment_policy": "dali",
            },
            "--views-engine fused has no operations of --randaugment-policy dali: use",
        ),
        (
            {"augment": "randaugment", "randaugment_policy": "dali"},
            "--randaugment-policy dali needs --loader dali",
        ),
        (
            {"loader": "dali", "randaugment_policy": "dali", "randaugment_magnitude": 31},
            "--randaugment-magnitude must be a whole number from 0 to 30",
        ),
        ({"randaugment_layers": 17}, "--randaugment-layers must be between 1 and 16, got 17"),
        ({"crop_area": (0.5, 0.2)}, "--crop-area takes 0 < LOW <= HIGH <= 1, got 0.5 0.2"),
        ({"randaugment_magnitude": 11.0}, "between 0 and 10, got 11.0"),
        ({"average": "means"}, "--average cannot be 'means': one of logits, losses, probs"),
        ({"precision": "fp61"}, "--precision cannot be 'fp61': did you mean fp16"),
        ({"nesterov": True, "momentum": 0.0}, "--nesterov needs a --momentum above 0"),
        (
            {"schedule": "warmup-cosine", "warmup_epochs": 10.0, "epochs": 10},
            r"--warmup-epochs must be below --epochs \(10\), got 10.0",
        ),
    ],
)
def test_a_wrong_value_says_what_is_allowed(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        TrainConfig(**changes)
    assert "\n" not in str(error.value)


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
    with pytest.raises(ConfigError, match=f"got {batch_size}, nearest: {nearest}$"):
        TrainConfig(batch_size=batch_size, views=views, accumulate=accumulate)


def test_images_per_step_and_part() -> None:
    config = TrainConfig(batch_size=96, views=4, accumulate=3)
    assert config.images_per_step == 24
    assert config.images_per_part() == 8
    assert config.images_per_part(ranks=2) == 4
    with pytest.raises(ConfigError, match=r"x ranks \(5\)"):
        config.images_per_part(ranks=5)


@pytest.mark.parametrize("name", RECIPES)
def test_a_config_survives_json(name: str) -> None:
    config = get_recipe(name)
    assert config.recipe == name
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="'vews': did you mean views"):
        TrainConfig.from_dict({"vews": 3})


def test_an_unknown_recipe_suggests_names() -> None:
    with pytest.raises(ConfigError, match="did you mean imagenet-nf-resnet50"):
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
    with pytest.raises(ConfigError, match="--tta must be at least -1, got -2"):
        EvaluateConfig(checkpoint="x", tta=-2)
