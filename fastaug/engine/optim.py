"""Optimizers by name, and the learning-rate schedules by update count."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn

from fastaug.engine.config import FUSED, OptimConfig
from fastaug.engine.optim_state import SWITCHES, check_optimizer_state
from fastaug.engine.parameter_groups import parameter_groups
from fastaug.errors import ConfigError


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of the parameters that are trained."""
    groups = parameter_groups(model, config)
    if config.optimizer == "sgd":
        return _fused_sgd(groups, config)
    if config.optimizer == "apex":
        return _apex_sgd(groups, config)
    return _timm_optimizer(groups, config)


def _fused_sgd(groups: list[dict], config: OptimConfig) -> torch.optim.Optimizer:
    """SGD whose decay is added to the gradient before the momentum, as in the paper."""
    settings: dict[str, Any] = {"lr": config.lr, "nesterov": config.nesterov}
    optimizer = torch.optim.SGD(groups, momentum=config.momentum, **settings, fused=True)
    if config.momentum:
        # torch would make them when the first step is taken, and leave them as they come from the
        # allocator if that one is skipped.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _apex_sgd(groups: list[dict], config: OptimConfig) -> torch.optim.Optimizer:
    try:
        from apex.optimizers import FusedSGD
    except ImportError as error:
        raise ConfigError(
            "--optimizer apex: NVIDIA's apex is not installed (the apex of PyPI is another "
            "package); build it from github.com/NVIDIA/apex, or use --optimizer sgd"
        ) from error
    return FusedSGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)


def _timm_optimizer(groups: list[dict], config: OptimConfig) -> torch.optim.Optimizer:
    name = config.optimizer
    try:
        from timm.optim import create_optimizer_v2, get_optimizer_class
    except ImportError as error:
        raise ConfigError(f"--optimizer {name} needs timm: pip install timm ({error})") from error
    try:
        known = inspect.signature(get_optimizer_class(name, bind_defaults=False)).parameters
    except ValueError as error:
        raise ConfigError(
            f"--optimizer {name}: this version of timm has none; pip install -U timm, or use sgd"
        ) from error
    given: dict[str, Any] = {"momentum": config.momentum, "nesterov": config.nesterov}
    if config.betas:
        given["betas"] = config.betas
    if config.eps:
        given["eps"] = config.eps
    settings = {setting: value for setting, value in given.items() if setting in known}
    if name in FUSED:
        settings["fused"] = True
    # Every step sets its own rate. Adafactor takes 0 to mean that it shall choose one.
    return create_optimizer_v2(groups, name, lr=config.lr or 1.0, **settings)


def load_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], steps: float = math.inf
) -> None:
    """Load a state_dict, or raise CheckpointError if it is not of this optimizer.

    Its tensors may have the strides of an earlier version's weights; torch's fused optimizers read
    weights and state in the order of their memory. steps: the most that it can have taken.
    """
    check_optimizer_state(optimizer, state, steps)
    own_groups = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, own_groups, strict=True):
        switches = {name: own[name] for name in SWITCHES if name in own}
        group |= {**own, **group, **switches}  # a setting may be newer than the state
    for parameter, own in optimizer.state.items():
        for name, value in own.items():
            is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if is_like and value.stride() != parameter.stride():
                own[name] = torch.empty_like(parameter).copy_(value)


def learning_rate(
    update: int, steps_per_epoch: int, config: OptimConfig, images_per_step: int
) -> float:
    """The rate of update number `update` (from 0) of epochs * steps_per_epoch."""
    peak = peak_rate(config, images_per_step)
    total = config.epochs * steps_per_epoch
    warmup = config.warmup_epochs * steps_per_epoch
    if update < warmup:
        return peak * update / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule == "halving":
        # Strict reading of the paper: the first halving at half of the updates, ten in all.
        past_half = 20 * update - 10 * total
        return peak if past_half < 0 else peak * 0.5 ** (1 + past_half // total)
    return peak * _cosine((update - warmup) / (total - warmup))


def peak_rate(config: OptimConfig, images_per_step: int) -> float:
    """--lr after --lr-scaling."""
    return config.lr * (images_per_step if config.lr_scaling == "unique-images" else 1)


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))
