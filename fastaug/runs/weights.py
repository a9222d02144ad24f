"""Weights as a safetensors file, with all that is needed to use them beside them.

Other programs read the format, and nothing in such a file can be executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

import fastaug
from fastaug.config import TrainConfig
from fastaug.errors import CheckpointError
from fastaug.models.build import build_configured_model
from fastaug.runs.checkpoint import evaluated_weights
from fastaug.views.reference import NORMALIZATION


def safetensors_metadata(state: dict[str, Any]) -> dict[str, str]:
    """What a checkpoint says of its network. The format knows strings alone: lists are JSON."""
    config = TrainConfig.from_saved(state["config"])
    mean, deviation = NORMALIZATION[config.view.normalize]
    return {
        "format": "pt",  # what libraries that read weights by this format look for
        "model": config.model.model,
        "classes": json.dumps(list(state["classes"])),
        "size": str(config.view.size),
        "input": "RGB, (level - mean) / std of levels 0 to 255, [N, 3, size, size]",
        "mean": json.dumps(mean),
        "std": json.dumps(deviation),
        "config": json.dumps(state["config"]),
        "fastaug": fastaug.__version__,
        "step": str(state["step"]),
    }


def write_safetensors(path: Path, weights: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """To the very path: whoever wants the file whole or not at all gives a temporary one."""
    path.write_bytes(_as_bytes(weights, metadata))


def weights_as_safetensors(state: dict[str, Any]) -> bytes:
    """A checkpoint's state -> the file of its evaluated weights."""
    return _as_bytes(evaluated_weights(state), safetensors_metadata(state))


def _as_bytes(weights: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    # The format takes neither channels-last tensors nor two names for one piece of memory.
    copies = {
        name: weight.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, weight in weights.items()
    }
    return save(copies, metadata)


def model_from_safetensors(path: str | Path) -> nn.Module:
    """The network of a file, from the file alone, ready to be evaluated on the CPU."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from error
    if missing := sorted({"config", "classes"} - set(metadata)):
        raise CheckpointError(
            f"{path}: has no {' and '.join(missing)} in its metadata; "
            "files of fastaug.export have, and those of other programs need their own reader"
        )
    config = TrainConfig.from_saved(json.loads(metadata["config"]))
    model = build_configured_model(
        config.model, len(json.loads(metadata["classes"])), config.view.size
    )
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # names or shapes, a line for each
        raise CheckpointError(f"{path}: not the weights of a {config.model.model}") from error
    return model.eval()
