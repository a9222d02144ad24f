"""The weights that a run starts from: --weights and --pretrained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fastaug.config import TrainConfig
from fastaug.errors import CheckpointError, ConfigError, first_line
from fastaug.models.build import build_configured_model
from fastaug.models.pretrained import load_weights, match_weights
from fastaug.models.timm_weights import data_settings, pretrained_weights
from fastaug.runs.checkpoint import (
    checkpoint_file,
    evaluated_weights,
    is_checkpoint,
    load_checkpoint,
)
from fastaug.runs.torch_archive import BadArchiveError, load_foreign
from fastaug.runs.weights import check_network, check_weights, read_metadata
from fastaug.runtime.device import memory_bound

_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model")
"""Keys under which training programs save a state dict; a moving average comes first."""
_ENDINGS = ".pt, .pth, .bin, .ckpt"
FOLLOWED = ("model", "normalize", "interpolation", "antialias")
"""Settings of a fastaug run that are the defaults of one that starts from its weights."""


@dataclass(frozen=True)
class InitialWeights:
    """Weights to start from, and what is known about them."""

    tensors: Mapping[str, Tensor]
    name: str
    """The flag and its value, for messages."""
    classes: tuple[str, ...] | None = None
    """The classes of the head, if the file has their names."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings with which the weights were trained, if the file has them."""

    def load_into(self, model: nn.Module, name: str, classes: Sequence[str]) -> list[str]:
        """Load what matches; the head only if it is for these classes, as far as is known.

        Returns what to report, a line each. name: of the model, as --model has it.
        """
        is_same_task = self.classes is None or self.classes == tuple(classes)
        match = match_weights(model, self.tensors, name, keep_head=is_same_task)
        match.check(self.name, name)
        load_weights(model, match)
        share = f"{match.matched:,} of {match.total:,} weights without the head"
        head = "the head is new" if match.replaced else "the head is kept"
        if not is_same_task:
            head += ": other classes"
        elif not match.replaced and self.classes is None:
            head += f": as many classes ({len(classes)}), whose order is not in the file"
        return [f"started from {self.name}: {share}; {head}", *match.report()]


def read_initial_weights(config: TrainConfig) -> InitialWeights | None:
    """The weights that a config names, found to be those of its model; None if it names none."""
    if config.model.pretrained:
        tensors = pretrained_weights(config.model.model, config.view.size)
        weights = InitialWeights(tensors, f"--pretrained {config.model.model}")
    elif config.model.weights:
        weights = _read(config.model.weights)
    else:
        return None
    with torch.device("meta"):
        model = build_configured_model(config.model, 2, config.view.size)
    match_weights(model, weights.tensors, config.model.model).check(
        weights.name, config.model.model
    )
    return weights


def settings_of_weights(config: TrainConfig) -> dict[str, Any]:
    """Settings by flag name that belong to the weights that a config names: those of the fastaug
    run that trained them, or those that timm publishes with the model."""
    own = dict(_read(config.model.weights).settings) if config.model.weights else {}
    if own or not (config.model.weights or config.model.pretrained):
        return own
    return data_settings(config.model.model)


def _read(named: str) -> InitialWeights:
    path = _existing_file(named)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    content = path.read_bytes()
    if is_checkpoint(content):
        state = load_checkpoint(path)
        check_network(state, f"--weights {path}")
        settings = _followed(TrainConfig.from_saved(state["config"]))
        return InitialWeights(
            evaluated_weights(state), f"--weights {path}", tuple(state["classes"]), settings
        )
    try:
        state = load_foreign(content)
    except BadArchiveError as error:
        raise CheckpointError(
            f"--weights {path}: damaged, or neither a fastaug checkpoint nor a state dict "
            f"({error}); save one with torch.save(model.state_dict(), FILE)"
        ) from error
    return InitialWeights(_unwrapped(path, state, len(content)), f"--weights {path}")


def _existing_file(named: str) -> Path:
    try:
        path = checkpoint_file(named)
    except CheckpointError as error:
        raise CheckpointError(
            f"--weights {error}; or give a .safetensors file or a state dict ({_ENDINGS})"
        ) from error
    if not path.is_file():  # reading a pipe may block, and a device may have no end
        raise ConfigError(
            f"--weights {named}: no such file; give a .safetensors file, a state dict "
            f"({_ENDINGS}), or a fastaug checkpoint or run folder"
        )
    try:
        size = path.stat().st_size
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"--weights {path}: cannot be read ({error.strerror})") from error
    if size > memory_bound():
        raise ConfigError(
            f"--weights {path}: {size:,} bytes, over a third of the memory; use a larger machine"
        )
    return path


def _read_safetensors(path: Path) -> InitialWeights:
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"--weights {path}: cannot be read as safetensors ({first_line(error)}); download or "
            "export it again"
        ) from error
    if not {"config", "classes", "fastaug"} <= about.keys():
        return InitialWeights(tensors, f"--weights {path}")
    config, classes = read_metadata(about, f"--weights {path}")
    check_weights(config, len(classes), tensors, f"--weights {path}")
    return InitialWeights(tensors, f"--weights {path}", classes, _followed(config))


def _followed(config: TrainConfig) -> dict[str, Any]:
    return {name: config.get(name) for name in FOLLOWED}


def _unwrapped(path: Path, state: Any, size: int) -> dict[str, Tensor]:
    """The state dict in what another program has saved. size: of the file in bytes."""
    if isinstance(state, dict):
        wrapped = (state[key] for key in _WRAPPERS if isinstance(state.get(key), dict))
        state = next(wrapped, state)
        found = {
            name: value.detach()
            for name, value in state.items()
            if isinstance(name, str) and isinstance(value, Tensor) and not value.is_quantized
        }
        # A small file may claim large tensors, by strides of 0.
        if found and all(value.nbytes <= size for value in found.values()):
            return found
    raise CheckpointError(
        f"--weights {path}: has no state dict, neither by itself nor under one of "
        f"{', '.join(_WRAPPERS)}; save one with torch.save(model.state_dict(), FILE)"
    )
