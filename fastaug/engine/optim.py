"""SGD with the right decay groups, and the learning-rate schedules by update count."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fastaug.engine.config import OptimConfig
from fastaug.errors import ConfigError


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Weights with decay, and gains, biases, SkipInit scalars and norms without.

    By name as well as by shape: timm's gains are [O, 1, 1, 1], so a rule by dimension decays them.
    """
    by_model: set[str] = getattr(model, "no_weight_decay", set)()
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        is_free = parameter.ndim <= 1 or last == "bias" or "gain" in last or name in by_model
        (free if is_free else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """SGD whose decay is added to the gradient before the momentum, as in the paper."""
    groups = decay_groups(model, config.weight_decay)
    settings: dict[str, Any] = {
        "lr": config.lr,
        "momentum": config.momentum,
        "nesterov": config.nesterov,
    }
    if config.optimizer == "apex":
        try:
            from apex.optimizers import FusedSGD
        except ImportError as error:
            raise ConfigError(
                "--optimizer apex: NVIDIA's apex is not installed (the apex of PyPI is another "
                "package); build it from github.com/NVIDIA/apex, or use --optimizer sgd"
            ) from error
        return FusedSGD(groups, **settings)
    optimizer = torch.optim.SGD(groups, **settings, fused=True)
    if config.momentum:
        # torch would make them when the first step is taken, and leave them as they come from the
        # allocator if that one is skipped.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state_dict. Its momentum may have the strides of an earlier version's weights; torch's
    fused SGD reads weights and momentum in the order of their memory."""
    optimizer.load_state_dict(state)
    for parameter, own in optimizer.state.items():
        momentum = own.get("momentum_buffer")
        if momentum is not None and momentum.stride() != parameter.stride():
            own["momentum_buffer"] = torch.empty_like(parameter).copy_(momentum)


def learning_rate(
    update: int, steps_per_epoch: int, config: OptimConfig, images_per_step: int
) -> float:
    """The rate of update number `update` (from 0) of epochs * steps_per_epoch."""
    peak = config.lr
    if config.lr_scaling == "unique-images":
        peak *= images_per_step
    total = config.epochs * steps_per_epoch
    if config.schedule == "halving":
        # Strict reading of the paper: the first halving at half of the updates, ten in all.
        past_half = 20 * update - 10 * total
        return peak if past_half < 0 else peak * 0.5 ** (1 + past_half // total)
    if config.schedule == "cosine":
        return peak * _cosine(update / total)
    warmup = config.warmup_epochs * steps_per_epoch
    if update < warmup:
        return peak * update / warmup
    return peak * _cosine((update - warmup) / (total - warmup))


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))
