"""Trained networks: from a checkpoint, and to and from safetensors.

A safetensors file has everything that is needed to use its weights in its metadata. Other programs
read the format, and nothing in such a file can be executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

import fastaug
from fastaug.config import TrainConfig
from fastaug.errors import CheckpointError, ConfigError, first_line, shown
from fastaug.models.build import build_configured_model, layers_in
from fastaug.runs.checkpoint import evaluated_weights
from fastaug.runs.checkpoint_fields import FIELDS
from fastaug.views.preprocessing import Preprocessing


@dataclass(frozen=True)
class TrainedModel:
    """A trained network and what is needed to use it."""

    model: nn.Module
    """On the CPU, in evaluation mode: [N, 3, size, size] -> logits [N, C]."""
    classes: tuple[str, ...]
    """Names in the order of the logits."""
    config: TrainConfig
    """All settings of its training."""

    @property
    def preprocessing(self) -> Preprocessing:
        """How an image becomes its input."""
        return Preprocessing.from_config(self.config.view)


def safetensors_metadata(state: dict[str, Any]) -> dict[str, str]:
    """Metadata about the network of a checkpoint. The values must be strings: lists are JSON."""
    config = TrainConfig.from_saved(state["config"])
    preprocessing = Preprocessing.from_config(config.view)
    about = preprocessing_json(preprocessing, state["classes"])
    return {
        "format": "pt",  # other libraries look for this
        "model": config.model.model,
        "classes": json.dumps(about["classes"]),
        "size": str(preprocessing.size),
        "input": "RGB, (pixel - mean) / std of pixel values 0 to 255, [N, 3, size, size]",
        "mean": json.dumps(preprocessing.mean),
        "std": json.dumps(preprocessing.std),
        "preprocessing": json.dumps(about),
        "config": json.dumps(state["config"]),
        "fastaug": fastaug.__version__,
        "step": str(state["step"]),
    }


def preprocessing_json(preprocessing: Preprocessing, classes: Sequence[str]) -> dict[str, Any]:
    """Content of preprocess.json, and of `preprocessing` in the metadata."""
    return preprocessing.to_json() | {"classes": list(classes)}


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
    return _with_weights(config, len(state["classes"]), evaluated_weights(state), "the checkpoint")


def model_from_safetensors(path: str | Path) -> TrainedModel:
    """Network of a file that fastaug wrote, with its classes and preprocessing."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from error
    config, classes = read_metadata(metadata, str(path))
    model = _with_weights(config, len(classes), weights, str(path))
    return TrainedModel(model.eval(), classes, config)


def _with_weights(
    config: TrainConfig, classes: int, weights: Mapping[str, Tensor], path: str
) -> nn.Module:
    """The network that the settings name with these weights."""
    check_weights(config, classes, weights, path)
    model = build_configured_model(config.model, classes, config.view.size)
    model.load_state_dict(weights)
    return model


def check_network(state: dict[str, Any], name: str) -> None:
    """Raise CheckpointError unless the weights of a loaded checkpoint, and their moving average,
    are those of the network that its settings name. name: of the checkpoint, for messages."""
    config = TrainConfig.from_saved(state["config"])
    check_weights(config, len(state["classes"]), state["model"], name)
    if (state["ema"] is not None) != bool(config.optim.ema):
        raise CheckpointError(f"{name}: its settings (--ema) and its moving average disagree")
    if config.optim.ema:
        check_weights(config, len(state["classes"]), evaluated_weights(state), name)


def check_weights(
    config: TrainConfig, classes: int, weights: Mapping[str, Tensor], path: str
) -> None:
    """Raise CheckpointError unless weights are those of the network that the settings name. It is
    built without memory, of which a file may claim any amount."""
    try:
        # Each layer has a tensor: a name can ask for more layers than could be built in minutes.
        if layers_in(config.model.model) <= len(weights):
            with torch.device("meta"):
                model = build_configured_model(config.model, classes, config.view.size)
            expected = {n: (w.shape, w.dtype) for n, w in model.state_dict().items()}
            if expected == {n: (w.shape, w.dtype) for n, w in weights.items()}:
                return
    except ConfigError as error:
        raise CheckpointError(f"{path}: its network cannot be built: {error!s:.200}") from error
    raise CheckpointError(
        f"{path}: not the weights of a {config.model.model:.60} with {classes:,} classes"
    )


def read_metadata(metadata: Mapping[str, str], path: str) -> tuple[TrainConfig, tuple[str, ...]]:
    """Settings and class names in the metadata of an exported file, which may come from anyone."""
    if missing := sorted({"config", "classes"} - set(metadata)):
        raise CheckpointError(
            f"{path}: has no {' and '.join(missing)} in its metadata; take a file that "
            "fastaug.export wrote, and read those of other programs with their own libraries"
        )
    try:
        settings, classes = (json.loads(metadata[name]) for name in ("config", "classes"))
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: its metadata cannot be read ({first_line(error)}); export it again"
        ) from error
    return check_description(settings, classes, path)


def check_description(
    settings: Any, classes: Any, path: str
) -> tuple[TrainConfig, tuple[str, ...]]:
    """Settings and class names of a trained network, from a file that may come from anyone."""
    try:
        config = TrainConfig.from_saved(settings)
    except ConfigError as error:
        raise CheckpointError(
            f"{path}: its settings cannot be used ({first_line(error)[:300]})"
        ) from error
    if rule := FIELDS["classes"](classes):
        raise CheckpointError(f"{path}: its classes must be {rule}, got {shown(classes)}")
    return config, tuple(classes)
