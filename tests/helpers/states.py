"""States of a training in which every number is the step, for tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastaug.config import TrainConfig
from fastaug.models.build import build_configured_model
from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runs.checkpoint_writer import CheckpointWriter

CLASSES = ["cat", "dog"]
_NETWORK = build_configured_model(TrainConfig().model, len(CLASSES), TrainConfig().view.size)
SIZE = max(parameter.nbytes for parameter in _NETWORK.parameters())
"""Bytes of its largest tensor: a checkpoint is larger."""


def state_of(step: int) -> dict[str, Any]:
    """A state in which every number is the step."""
    weights = {n: torch.full_like(w, float(step)) for n, w in _NETWORK.state_dict().items()}
    return {
        "config": TrainConfig().to_flat(),
        "classes": CLASSES,
        "model": weights,
        "ema": None,
        "step": step,
    }


def step_in(path: Path) -> int:
    state = load_checkpoint(path)
    assert all((weight == state["step"]).all() for weight in state["model"].values())
    return state["step"]


def save(
    folder: Path,
    *steps: int,
    keep: int = 2,
    say: Callable[[str], object] = print,
    best: int | None = None,
) -> None:
    """Write checkpoints of these steps, each by a writer of its own as after a resume."""
    for step in steps:
        writer = CheckpointWriter(folder, keep=keep, say=say)
        writer.save(state_of(step), best=step == best)
        writer.close()
