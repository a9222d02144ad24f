"""Runs that start from weights: timm's own network, several ranks, and files that are gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from color_folders import write_folder
from expect import missing
from ranks import run_ranks
from safetensors import safe_open
from timm_files import NAME, REPOSITORY, fill_hub_cache, save_weights, trained_network
from torch import nn
from training import assert_same_weights, run, weights

from fastaug import evaluate, export, preview, sweep, train
from fastaug.config import TrainConfig
from fastaug.engine.trainer import Trainer
from fastaug.errors import FastaugError
from fastaug.runs.checkpoint import evaluated_weights, load_checkpoint
from fastaug.settings import flag, typed

MODEL = f"timm/{NAME}"
Tiny = Callable[..., TrainConfig]


@pytest.fixture
def theirs() -> nn.Module:
    """timm's network for the three classes of the color folders."""
    return trained_network(3)


@pytest.fixture
def file(theirs: nn.Module, tmp_path: Path) -> Path:
    return save_weights(theirs, tmp_path / "weights.safetensors")


def flags(config: TrainConfig, *names: str) -> list[str]:
    """The flags of these settings."""
    return [word for n in names for word in (flag(n), *typed(config.get(n)).split())]


def in_command(config: TrainConfig) -> list[str]:
    """The flags of fastaug.train that make it as small as the config."""
    names = ("data", "size", "views", "batch_size", "epochs", "lr", "workers", "tta", "out")
    return [*flags(config, *names), "--eval-views", "0"]


def same(own: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of equal tensors."""
    return [name for name in own if name in other and torch.equal(own[name], other[name])]


def test_the_first_logits_are_those_of_timm(tiny: Tiny, file: Path, theirs: nn.Module) -> None:
    trainer = Trainer(tiny(model=MODEL, weights=str(file), ema=0.9))
    batch = next(iter(trainer.loader))
    with torch.no_grad():
        expected = theirs(batch.flat)
        for model in (trainer.learner.model, trainer.learner.evaluated_model):
            torch.testing.assert_close(model.eval()(batch.flat), expected, rtol=1e-4, atol=1e-4)
    assert trainer.learner.evaluated_model is not trainer.learner.model


def initial_state(group: Any, config: TrainConfig) -> dict[str, Any]:
    state = Trainer(config, None, group).learner.model.state_dict()
    return {name: value.numpy() for name, value in state.items()}


def test_all_ranks_start_from_the_weights(tiny: Tiny, file: Path, theirs: nn.Module) -> None:
    """Statistics of batch norm as well, which DDP does not broadcast here."""
    for state in run_ranks(2, initial_state, tiny(model=MODEL, weights=str(file))):
        tensors = {name: torch.from_numpy(value) for name, value in state.items()}
        assert len(same(tensors, theirs.state_dict())) == len(state)


def load_error(group: Any, config: TrainConfig) -> str:
    try:
        Trainer(config, None, group)
    except FastaugError as error:
        return f"{error} {error.reported}"
    return ""


def test_all_ranks_end_if_the_file_is_missing(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(model=MODEL, weights=str(tmp_path / "missing.pt"))
    first, second = run_ranks(2, load_error, config)
    assert missing(first, f"--weights {tmp_path / 'missing.pt'} False") == []
    assert missing(second, "True") == []  # rank 0 prints it


def test_resume_does_not_need_the_file(tiny: Tiny, file: Path) -> None:
    config = tiny(model=MODEL, weights=str(file), ema=0.9)
    uninterrupted = run(config, "-all")
    stopped = run(config.replace(max_steps=5), "-stopped")
    assert same(weights(stopped), weights(uninterrupted)) == []
    file.unlink()
    assert train.main(["--resume", str(stopped)]) == 0
    assert_same_weights(stopped, uninterrupted)
    assert json.loads((stopped / "config.json").read_text())["weights"] == str(file)


def test_the_command_reports_and_the_run_is_usable_without_the_file(
    tiny: Tiny,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_weights(trained_network(5), tmp_path / "five.pt")
    config = tiny(epochs=1)
    monkeypatch.chdir(tmp_path)
    args = [*in_command(config), "--model", MODEL, "--weights", "five.pt", "--lr", "0"]
    assert train.main(args) == 0
    assert "fc.weight [5, 96] -> [3, 96]" in capsys.readouterr().out
    folder = Path(config.run.out)
    trained = weights(folder)
    # With a learning rate of 0, only the head and batch norm's statistics differ.
    changed = set(trained) - set(same(trained, trained_network(5).state_dict()))
    parameters = {name for name, _ in trained_network(3).named_parameters()}
    assert changed & parameters == {"fc.weight", "fc.bias"}
    (tmp_path / "five.pt").unlink()
    assert evaluate.main([str(folder)]) == 0
    assert export.main([str(folder), "--to", "safetensors", "--out", "x.safetensors"]) == 0
    saved = json.loads((folder / "config.json").read_text())
    assert saved["weights"] == str(tmp_path / "five.pt")
    assert saved["interpolation"] == "bilinear"
    assert saved["normalize"] == [[0.5] * 3, [0.5] * 3]


# --- a fastaug run's own weights ---


@pytest.fixture
def finished(tiny: Tiny, tmp_path: Path) -> Path:
    """A run with a moving average, whose evaluated weights differ from the last ones."""
    view = {"normalize": "cifar", "interpolation": "bilinear"}
    return run(tiny(model="resnet18", epochs=1, ema=0.9, **view), "-first")


@pytest.mark.parametrize("kind", ["folder", "best.pt", "best.safetensors"])
def test_a_run_with_the_same_classes_keeps_the_head(
    kind: str, tiny: Tiny, finished: Path, capsys: pytest.CaptureFixture
) -> None:
    named = finished if kind == "folder" else finished / kind
    config, _ = train.configure([*in_command(tiny()), "--weights", str(named)])
    assert config.model.model == "resnet18"
    state = Trainer(config).learner.model.state_dict()
    best = evaluated_weights(load_checkpoint(finished / "best.pt"))
    assert len(same(state, best)) == len(state)


def test_other_classes_get_a_new_head(tiny: Tiny, finished: Path, tmp_path: Path) -> None:
    """As many classes, under other names."""
    folder = write_folder(tmp_path / "others", {"train": 12, "test": 5})
    for split in ("train", "test"):
        first = sorted((folder / split).iterdir())[0]
        first.rename(first.with_name("another"))
    config = tiny(data=str(folder), model="resnet18", weights=str(finished))
    trainer = Trainer(config)
    state = trainer.learner.model.state_dict()
    best = evaluated_weights(load_checkpoint(finished / "best.pt"))
    assert set(state) - set(same(state, best)) == {"head.weight", "head.bias"}
    (line,) = (text for text in trainer._weights_report if text.startswith("replaced"))
    size = list(state["head.weight"].shape)
    assert f"head.weight {size} -> {size}" in line


# --- settings of the weights are defaults of the flags ---


def settings(config: TrainConfig) -> dict[str, Any]:
    return {n: config.get(n) for n in ("model", "normalize", "interpolation", "antialias")}


def test_settings_of_a_run_are_followed(
    tiny: Tiny, finished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = [*in_command(tiny()), "--weights", str(finished)]
    expected = {"model": "resnet18", "normalize": "cifar", "interpolation": "bilinear"}
    with caplog.at_level("INFO"):
        config, _ = train.configure(args)
    assert settings(config) == expected | {"antialias": False}
    assert missing(caplog.text, "--normalize cifar --interpolation bilinear --no-antialias") == []
    caplog.clear()
    with caplog.at_level("INFO"):
        config, _ = train.configure([*args, "--normalize", "imagenet", "--antialias"])
    assert settings(config) == expected | {"normalize": "imagenet", "antialias": True}
    assert "--normalize" not in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        train.configure([*args, "--model=resnet18", "--interpolation", "bilinear"])
    assert missing(caplog.text, "--model --interpolation") == ["--model", "--interpolation"]
    assert missing(caplog.text, "--normalize cifar --no-antialias") == []


def test_settings_of_timm_are_followed(tiny: Tiny, file: Path) -> None:
    args = [*in_command(tiny()), "--model", MODEL]
    assert settings(train.configure(args)[0]) == settings(TrainConfig().replace(model=MODEL))
    half = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    expected = {"model": MODEL, "normalize": half, "interpolation": "bilinear", "antialias": True}
    for start in (["--weights", str(file)], ["--pretrained"]):
        assert settings(train.configure([*args, *start])[0]) == expected
        config, _ = train.configure([*args, *start, "--interpolation", "bicubic", "--no-antialias"])
        assert settings(config) == expected | {"interpolation": "bicubic", "antialias": False}


def test_weights_take_the_place_of_the_recipe_s(
    tiny: Tiny, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["--data", tiny().data.data, "--model", MODEL, "--weights", file.name]
    config, _ = train.configure(["--recipe", "finetune", *args])
    assert (config.model.pretrained, config.model.weights) == (False, str(file))
    assert preview.configure(["--recipe", "finetune", *args]).view.interpolation == "bilinear"
    plan = sweep.configure(["finetune", *args, "--out", str(tmp_path / "sweep")])
    for config in plan.tuning.values():
        assert (config.model.pretrained, config.model.weights) == (False, str(file))


# --- timm's own download ---


def train_offline(config: TrainConfig, home: Path, *more: str) -> subprocess.CompletedProcess:
    """In a process of its own: huggingface_hub reads its settings when it is imported."""
    command = [sys.executable, "-m", "fastaug.train", *in_command(config), "--model", MODEL]
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    return subprocess.run(
        [*command, "--pretrained", *more],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_pretrained_from_the_cache(tiny: Tiny, tmp_path: Path) -> None:
    published = trained_network(1000)
    fill_hub_cache(tmp_path / "home", published)
    ended = train_offline(tiny(epochs=1, lr=0), tmp_path / "home")
    assert ended.returncode == 0, ended.stderr
    assert "fc.weight [1000, 96] -> [3, 96]" in ended.stdout
    with safe_open(tmp_path / "run/best.safetensors", framework="pt") as best:
        trained = {name: best.get_tensor(name) for name in best.keys()}  # noqa: SIM118
    for name, value in published.named_parameters():
        if not name.startswith("fc."):
            assert torch.equal(trained[name], value), name


def test_pretrained_without_a_network(tiny: Tiny, tmp_path: Path) -> None:
    ended = train_offline(tiny(), tmp_path / "home")
    assert ended.returncode == 2
    (line,) = (text for text in ended.stderr.splitlines() if text.startswith("error"))
    cache = tmp_path / "home/hub"
    assert missing(line, f"--pretrained {REPOSITORY} {cache} HF_HUB_OFFLINE=1 --weights") == []
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_damaged_cache(tiny: Tiny, tmp_path: Path) -> None:
    fill_hub_cache(tmp_path / "home", trained_network(1000, "test_vit"))
    ended = train_offline(tiny(), tmp_path / "home")
    assert ended.returncode == 2
    (line,) = (text for text in ended.stderr.splitlines() if text.startswith("error"))
    assert missing(line, f"--pretrained {REPOSITORY} {tmp_path / 'home/hub'}") == []
