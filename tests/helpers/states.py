"""States of a training that tell their step, for tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fastaug.config import TrainConfig
from fastaug.runs.checkpoint import load_checkpoint

SIZE = 10_000


def state_of(step: int) -> dict[str, Any]:
    """A state in which every number is the step."""
    return {
        "config": TrainConfig().to_flat(),
        "classes": ["cat", "dog"],
        "model": {"w": torch.full((SIZE,), float(step))},
        "ema": None,
        "step": step,
    }


def step_in(path: Path) -> int:
    state = load_checkpoint(path)
    assert (state["model"]["w"] == state["step"]).all()
    return state["step"]
