"""Runs of a config, and what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from fastaug.config import TrainConfig
from fastaug.engine.trainer import Trainer
from fastaug.runs.checkpoint import load_checkpoint


def tiny_config(data: Path, out: Path, /, **changes: object) -> TrainConfig:
    """8 steps in 2 epochs on the 36 images of the color folders."""
    settings: dict = {
        "data": str(data),
        "model": "wrn-10-1",
        "size": 16,
        "views": 2,
        "batch_size": 16,
        "epochs": 2,
        "lr": 0.05,
        "workers": 0,
        "tta": 2,
        "log_every": 2,
        "out": str(out),
    }
    return TrainConfig.from_flat(**(settings | changes))


def run(config: TrainConfig, name: str = "", checkpoint: Path | None = None) -> Path:
    """Train in this process; name is added to the name of the run folder, which is returned."""
    config = config.replace(out=f"{config.run.out}{name}")
    Trainer(config, checkpoint).fit()
    return Path(config.run.out)


def weights(folder: Path, name: str = "last.pt") -> dict[str, Tensor]:
    return load_checkpoint(folder / name)["model"]


def assert_same_weights(ours: Path, theirs: Path) -> None:
    first, second = weights(ours), weights(theirs)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def metrics(folder: Path, kind: str = "") -> list[dict]:
    """The records of one kind or of all, without what the machine's speed put there."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in record.items() if k != "timing"}
        for record in records
        if kind in ("", record["kind"])
    ]
