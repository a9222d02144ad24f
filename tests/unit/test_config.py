from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import get_type_hints

import pytest
from expect import raises

from fastaug.config import TrainConfig, setting_owners
from fastaug.errors import ConfigError
from fastaug.evaluate import EvaluateConfig
from fastaug.recipes import RECIPES, get_recipe


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"views": 0}, ("--views", "at least 1", "got 0")),
        ({"epochs": 0}, ("--epochs", "at least 1", "got 0")),
        ({"lr": float("nan")}, ("--lr", "finite", "at least 0", "got nan")),
        ({"lr": "fast"}, ("--lr", "a number", "'fast'")),
        ({"kl_weight": -1.0}, ("--kl-weight", "at least 0", "got -1.0")),
        ({"label_smoothing": 1.0}, ("--label-smoothing", "at least 0", "below 1", "got 1.0")),
        ({"ema": 1.0}, ("--ema", "below 1", "got 1.0")),
        ({"seed": 2**32}, ("--seed", "below 4294967296")),
        ({"max_bad": 5.0}, ("--max-bad", "at most 1", "got 5.0")),
        ({"prefetch": 0}, ("--prefetch", "at least 1", "got 0")),
        ({"views_dtype": "fp16"}, ("--views-dtype fp16", "--precision fp16 or bf16")),
        ({"views_dtype": "bf16"}, ("--views-dtype bf16", "--precision fp16 or bf16")),
        ({"interpolation": "cubic"}, ("--interpolation", "'cubic'", "bicubic")),
        ({"views_engine": "fused"}, ("--views-engine fused", "--loader dali", "--dali")),
        ({"views_engine": "dali"}, ("--views-engine dali", "--loader dali", "--dali")),
        (
            {
                "loader": "dali",
                "views_engine": "fused",
                "augment": "randaugment",
                "randaugment_policy": "dali",
            },
            ("--views-engine fused", "--randaugment-policy dali"),
        ),
        (
            {"augment": "randaugment", "randaugment_policy": "dali"},
            ("--randaugment-policy dali", "--loader dali"),
        ),
        (
            {"loader": "dali", "randaugment_policy": "dali", "randaugment_magnitude": 31},
            ("--randaugment-magnitude", "0 to 30", "got 31"),
        ),
        ({"randaugment_layers": 17}, ("--randaugment-layers", "at most 16", "got 17")),
        ({"crop_area": (0.5, 0.2)}, ("--crop-area", "0 < LOW <= HIGH <= 1", "got 0.5 0.2")),
        ({"randaugment_magnitude": 11.0}, ("--randaugment-magnitude", "at most 10", "got 11.0")),
        ({"average": "means"}, ("--average", "'means'", "logits, losses, probs")),
        ({"precision": "fp61"}, ("--precision", "'fp61'", "fp16")),
        ({"precision": "tf32", "views_dtype": "bf16"}, ("--views-dtype bf16", "got tf32")),
        ({"compile": True}, ("--compile", "True", "max-autotune")),
        (
            {"compile": "reduce-overhead", "accumulate": 2},
            ("--compile reduce-overhead", "--accumulate 2"),
        ),
        ({"compile": "default", "cuda_graph": True}, ("--cuda-graph", "--compile", "got default")),
        ({"cuda_graph": True, "optimizer": "apex"}, ("--cuda-graph", "--optimizer sgd", "apex")),
        ({"nesterov": True, "momentum": 0.0}, ("--nesterov", "--momentum")),
        (
            {"schedule": "halving", "warmup_epochs": 10.0, "epochs": 10},
            ("--warmup-epochs", "--epochs (10)", "got 10.0"),
        ),
        ({"schedule": "warmup-cosine"}, ("--schedule", "'warmup-cosine'", "cosine")),
        ({"optimizer": "adamm"}, ("--optimizer", "'adamm'", "adam")),
        ({"optimizer": "kron"}, ("--optimizer", "'kron'")),
        ({"optimizer": "adamw", "betas": (0.9,)}, ("--betas", "two", "0.9")),
        ({"optimizer": "adamw", "betas": (0.9, 1.0)}, ("--betas", "below 1", "0.9 1.0")),
        ({"betas": (0.9, 0.99)}, ("--betas 0.9 0.99", "--optimizer sgd")),
        ({"optimizer": "lion", "eps": 1e-6}, ("--eps 1e-06", "--optimizer lion")),
        ({"lr": 0.0, "head_lr": 0.1}, ("--head-lr 0.1", "--lr", "--freeze backbone")),
        ({"layer_decay": 1.5}, ("--layer-decay", "at most 1", "got 1.5")),
        ({"clip_norm": 1.0, "agc": 0.01}, ("--clip-norm 1.0", "--agc 0.01")),
        ({"clip_value": 1.0, "agc": 0.01}, ("--clip-value 1.0", "--agc 0.01")),
        ({"cuda_graph": True, "optimizer": "lamb"}, ("--cuda-graph", "adamw", "lamb")),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(changes: dict, named: tuple) -> None:
    with pytest.raises(ConfigError) as error:
        TrainConfig.from_flat(**changes)
    message = str(error.value)
    assert "\n" not in message
    assert [part for part in named if part not in message] == []


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
    assert (
        TrainConfig.from_flat(loader="dali", **changes).view.views_engine == changes["views_engine"]
    )


@pytest.mark.parametrize(
    ("batch_size", "views", "accumulate", "nearest"),
    [(66, 4, 1, "64 or 68"), (3, 4, 1, "4"), (64, 4, 3, "60 or 72"), (65, 1, 2, "64 or 66")],
)
def test_an_indivisible_batch_names_the_nearest_sizes(
    batch_size: int, views: int, accumulate: int, nearest: str
) -> None:
    with raises(ConfigError, f"{batch_size} {nearest}"):
        TrainConfig.from_flat(batch_size=batch_size, views=views, accumulate=accumulate)


@pytest.mark.parametrize(
    ("precision", "given", "expected"),
    [
        ("fp32", "auto", "fp32"),
        ("bf16", "auto", "bf16"),
        ("fp16", "auto", "fp16"),
        ("bf16", "fp32", "fp32"),
    ],
)
def test_views_have_the_dtype_of_the_precision(precision: str, given: str, expected: str) -> None:
    config = TrainConfig.from_flat(precision=precision, views_dtype=given)
    assert config.resolved_view.views_dtype == expected
    assert config.view.views_dtype == given


def test_images_per_step_and_part() -> None:
    config = TrainConfig.from_flat(batch_size=96, views=4, accumulate=3)
    assert config.images_per_step == 24
    assert config.images_per_part() == 8
    assert config.images_per_part(ranks=2) == 4
    with raises(ConfigError, "ranks 5"):
        config.images_per_part(ranks=5)


@pytest.mark.parametrize("name", RECIPES)
def test_a_config_survives_json(name: str) -> None:
    config = get_recipe(name)
    assert config.run.recipe == name
    assert TrainConfig.from_saved(json.loads(json.dumps(config.to_flat()))) == config


@pytest.mark.parametrize(("saved", "mode"), [(False, "off"), (True, "default")])
def test_compile_of_earlier_versions_was_a_switch(saved: bool, mode: str) -> None:
    assert TrainConfig.from_saved({"compile": saved, "views": 4}).run.compile == mode


OPTIM_SETTINGS = {"head_lr", "layer_decay", "betas", "eps", "freeze", "clip_value", "agc"}
"""Those that earlier versions did not have."""
WARM_UPS = {"shapes": 0.5, "imagenet-nfnet-f0": 5.0}
"""The recipes with the schedule "warmup-cosine" of earlier versions."""


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "finetune"])
def test_the_warm_up_of_earlier_versions(name: str) -> None:
    """The recipe finetune is younger."""
    config = get_recipe(name)
    saved = {k: v for k, v in config.to_flat().items() if k not in OPTIM_SETTINGS}
    saved["warmup_epochs"] = WARM_UPS.get(name, 5.0)  # the other schedules ignored it
    if name in WARM_UPS:
        saved["schedule"] = "warmup-cosine"
    assert TrainConfig.from_saved(saved) == config
    again = config.replace(schedule="constant", warmup_epochs=0.25)
    assert TrainConfig.from_saved(again.to_flat()) == again


def test_an_unknown_setting_is_refused() -> None:
    for make in (TrainConfig.from_flat, TrainConfig().replace):
        with raises(ConfigError, "vews views"):
            make(vews=3)


def test_settings_by_flag_name_reach_their_components() -> None:
    config = TrainConfig.from_flat(views=8, lr=0.1, data="x", model="resnet18", crop_area=[0.5, 1])
    assert (config.view.views, config.optim.lr) == (8, 0.1)
    assert (config.data.data, config.model.model) == ("x", "resnet18")
    assert config.view.crop_area == (0.5, 1)
    assert config.replace(views=2).view == replace(config.view, views=2)
    assert config.get("kl_weight") == config.loss.kl_weight


def test_no_two_components_share_a_setting() -> None:
    hints = get_type_hints(TrainConfig)
    names = [field.name for part in fields(TrainConfig) for field in fields(hints[part.name])]
    assert sorted(names) == sorted(setting_owners())


def test_an_unknown_recipe_suggests_names() -> None:
    with raises(ConfigError, "imagenet-nf-resnet50"):
        get_recipe("imagenet-nf-resnet5")


def test_differences_are_those_that_change_the_training() -> None:
    config = TrainConfig()
    assert config.differences(config.replace(workers=3, out="x", max_steps=5, device="cpu")) == []
    dali = config.replace(loader="dali", views_engine="fused")
    assert config.differences(dali) == []
    resized = config.replace(interpolation="bilinear", antialias=True)
    assert config.differences(resized) == [
        "--interpolation bicubic (here: bilinear)",
        "--antialias False (here: True)",
    ]
    differing = config.differences(config.replace(views=2, lr=1.0))
    assert differing == ["--views 4 (here: 2)", f"--lr {config.optim.lr} (here: 1.0)"]


def test_evaluate_config_is_checked_too() -> None:
    with raises(ConfigError, "--tta -1 -2"):
        EvaluateConfig(checkpoint="x", tta=-2)
