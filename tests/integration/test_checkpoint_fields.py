"""Fields of checkpoints with a right checksum: kinds, shapes and sizes, before a network exists."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from expect import raises
from states import state_of

from fastaug import cli, train
from fastaug.config import TrainConfig
from fastaug.engine.loaders import build_loader
from fastaug.errors import CheckpointError, ConfigError
from fastaug.models.build import check_configured_model
from fastaug.models.config import ModelConfig
from fastaug.runs.checkpoint import load_checkpoint, write_checkpoint
from fastaug.runs.checkpoint_fields import FIELDS, check_resumable
from fastaug.runs.weights import check_network, model_from_checkpoint


def saved(folder: Path, **changes: Any) -> Path:
    write_checkpoint(folder / "last.pt", state_of(7) | changes)
    return folder / "last.pt"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", -1),
        ("step", True),
        ("step", 2**70),
        ("classes", ["cat"]),
        ("classes", ["cat", 1]),
        ("classes", "catdog"),
        ("model", {"w": 1.0}),
        ("model", [torch.zeros(2)]),
        ("ema", {"module.w": torch.zeros(2)}),
        ("optimizer", {"state": {}, "param_groups": [{"params": ["x"]}]}),
        ("optimizer", {"state": {0: 1}, "param_groups": []}),
        ("best_top1", math.nan),
        ("best_top1", 2.0),
        ("meter", {"sums": torch.zeros(3)}),
        ("speed", {"steps": 1, "seconds": math.inf, "waited": 0.0}),
        ("loader", {"epoch": 0}),
        ("loader", {"epoch": 0, "position": 0.5}),
        ("launch", None),
        ("scaler", {"scale": torch.zeros(2)}),
        ("skipped_steps", 8),
    ],
)
def test_wrong_kinds(tmp_path: Path, name: str, value: Any) -> None:
    path = saved(tmp_path, **{name: value})
    with raises(CheckpointError, f"{path} {name}"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["config", "classes", "model", "ema", "step"])
def test_missing_fields(tmp_path: Path, name: str) -> None:
    state = state_of(7)
    del state[name]
    write_checkpoint(tmp_path / "last.pt", state)
    with raises(CheckpointError, "last.pt"):
        load_checkpoint(tmp_path / "last.pt")


def test_every_field_is_needed_to_resume(tmp_path: Path) -> None:
    state = load_checkpoint(saved(tmp_path))
    missing = FIELDS.keys() - state.keys() - {"speed"}
    assert missing
    with raises(CheckpointError, " ".join(missing)):
        check_resumable(state, "last.pt")


@pytest.mark.parametrize(
    "model", ["wrn-1000000-1", "wrn-9994-1", "wrn-10-9999", "wrn-16-1", "nf_resnet26", "timm/x", ""]
)
def test_a_network_that_the_file_does_not_have(tmp_path: Path, model: str) -> None:
    """In no time, and without memory for it."""
    config = TrainConfig().to_flat() | {"model": model}
    state = load_checkpoint(saved(tmp_path, config=config))
    started = time.process_time()
    for use in (model_from_checkpoint, lambda state: check_network(state, "last.pt")):
        with raises(CheckpointError):
            use(state)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.double(),
        lambda weight: weight[:1],
        lambda weight: weight[None],
    ],
)
def test_weights_of_another_shape_or_dtype(tmp_path: Path, change: Any) -> None:
    state = state_of(7)
    state["model"]["head.bias"] = change(state["model"]["head.bias"])
    write_checkpoint(tmp_path / "last.pt", state)
    with raises(CheckpointError, "wrn-10-1"):
        model_from_checkpoint(load_checkpoint(tmp_path / "last.pt"))


@pytest.mark.parametrize("many", [False, True])
def test_tensors_larger_than_the_file(tmp_path: Path, many: bool) -> None:
    """One element that repeats, or many tensors that share their memory."""
    tensor = torch.zeros(2**20) if many else torch.zeros(1).expand(2**40)
    model = {f"w{i}": tensor for i in range(100 if many else 1)}
    with raises(CheckpointError, "last.pt"):
        load_checkpoint(saved(tmp_path, model=model))


def test_values_nested_without_end(tmp_path: Path) -> None:
    value: list = []
    for _ in range(400):
        value = [value]
    for name in ("step", "config", "loader", "classes", "unknown"):
        path = saved(tmp_path, **{name: value if name != "config" else {"views": value}})
        if name == "unknown":
            load_checkpoint(path)
            continue
        with raises(CheckpointError, name):
            load_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("views", 10**9),
        ("size", 10**9),
        ("tta", 10**9),
        ("batch_size", 2**40),
        ("workers", 10**6),
        ("epochs", 10**12),
        ("stall_timeout", 1e300),
        ("lr", 10**400),
        ("views", 4.0),
        ("views", True),
        ("nesterov", 1),
        ("data", 5),
        ("data", "a\0b"),
        ("betas", [0.9, "x"]),
        ("normalize", [10**400, 0.5]),
        ("log", ["none"] * 5000),
        ("loader", ["torch"]),
    ],
)
def test_settings_that_take_too_much(name: str, value: Any) -> None:
    """Or that are of another kind."""
    settings = TrainConfig().to_flat() | {name: value}
    with raises(ConfigError, "--" + name.replace("_", "-")):
        TrainConfig.from_saved(settings)


def test_a_network_larger_than_the_memory(capsys: pytest.CaptureFixture) -> None:
    with raises(ConfigError, "wrn-10-9999 GB"):
        check_configured_model(ModelConfig(model="wrn-10-9999"), [32])
    assert cli.run(train.main, ["--model", "wrn-10-9999", "--data", "shapes"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "wrn-10-9999" in line


def test_a_batch_larger_than_the_memory() -> None:
    config = TrainConfig.from_flat(size=8192, views=4096, batch_size=4096 * 64)
    with raises(ConfigError, "--batch-size --views --size"):
        build_loader(config)
