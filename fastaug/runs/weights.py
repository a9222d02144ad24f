"""Trained networks: from a checkpoint, and to and from safetensors.

A safetensors file has everything that is needed to use its weights in its metadata. Other programs
read the format, and nothing in such a file can be executed.
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
from fastaug.normalization import pixel_statistics
from fastaug.runs.checkpoint import evaluated_weights


def safetensors_metadata(state: dict[str, Any]) -> dict[str, str]:
    """Metadata about the network of a checkpoint. The values must be strings: lists are JSON."""
    config = TrainConfig.from_saved(state["config"])
    mean, deviation = pixel_statistics(config.view.normalize)
    return {
        "format": "pt",  # other libraries look for this
        "model": config.model.model,
        "classes": json.dumps(list(state["classes"])),
        "size": str(config.view.size),
        "input": "RGB, (pixel - mean) / std of pixel values 0 to 255, [N, 3, size, size]",
        "mean": json.dumps(mean),
        "std": json.dumps(deviation),
        "config": json.dumps(state["config"]),
        "fastaug": fastaug.__version__,
        "step": str(state["step"]),
    }


def write_safetensors(path: Path, weights: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write the file in place; for an atomic write, give a temporary path."""
    path.write_bytes(_as_bytes(weights, metadata))


def weights_as_safetensors(state: dict[str, Any]) -> bytes:
    """Content of the safetensors file with the evaluated weights of a checkpoint."""
    return _as_bytes(evaluated_weights(state), safetensors_metadata(state))


def _as_bytes(weights: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    # The format takes neither channels-last tensors nor tensors that share memory.
    copies = {
        name: weight.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, weight in weights.items()
    }
    return save(copies, metadata)


def model_from_checkpoint(state: dict[str, Any]) -> nn.Module:
    """Network of a loaded checkpoint with its evaluated weights, on the CPU."""
    config = TrainConfig.from_saved(state["config"])
    model = build_configured_model(config.model, len(state["classes"]), config.view.size)
    model.load_state_dict(evaluated_weights(state))
    return model


def model_from_safetensors(path: str | Path) -> nn.Module:
    """Network of a file that fastaug wrote, on the CPU and in evaluation mode."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from error
    if missing := sorted({"config", "classes"} - set(metadata)):
        raise CheckpointError(
            f"{path}: has no {' and '.join(missing)} in its metadata; take a file that "
            "fastaug.export wrote, and read those of other programs with safetensors"
        )
    config = TrainConfig.from_saved(json.loads(metadata["config"]))
    model = build_configured_model(
        config.model, len(json.loads(metadata["classes"])), config.view.size
    )
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # its message has a line for each name and shape
        raise CheckpointError(f"{path}: not the weights of a {config.model.model}") from error
    return model.eval()
