"""Which parameters are trained, at which rate and with which decay: --freeze, --layer-decay,
--head-lr, --weight-decay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from types import MethodType
from typing import Any, NamedTuple, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastaug.engine.config import OptimConfig
from fastaug.errors import ConfigError, few
from fastaug.models.head import head_parameters

BACKBONE = "backbone"
"""--freeze: everything but the classifier."""


class Frozen(NamedTuple):
    """What --freeze left to train."""

    trained: int
    """Parameters that are trained."""
    total: int
    names: tuple[str, ...]
    """As they were given."""
    modules: tuple[str, ...]
    """Modules and parameters that are frozen as a whole."""

    def __str__(self) -> str:
        what = " ".join(self.names)
        what = f"{what} stage{'s' * (what != '1')} from the input" if what.isdecimal() else what
        if self.modules != self.names:
            what += f" ({few(self.modules, most=8)})"
        return f"frozen: {what}; training {self.trained:,} of {self.total:,} parameters"


def freeze(model: nn.Module, names: tuple[str, ...]) -> Frozen | None:
    """Freeze the parameters that --freeze names, before the model is handed to DDP or compiled.

    A batch norm whose parameters are frozen keeps its statistics, also after model.train().
    """
    if not names:
        return None
    for name in names:
        for parameter in _named(model, name):
            parameter.requires_grad_(False)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, _BatchNorm) and own and not any(p.requires_grad for p in own):
            # A method, not a function: it follows the module into a deep copy.
            module.train = MethodType(_stay_in_eval, module)  # type: ignore[method-assign]
            module.train()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not trained:
        raise ConfigError(f"--freeze {' '.join(names)} leaves nothing to train; freeze less")
    total = sum(p.numel() for p in model.parameters())
    return Frozen(trained, total, names, tuple(_frozen_parts(model)))


def _frozen_parts(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """The outermost modules and parameters without anything to train."""
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.requires_grad:
            yield f"{prefix}{name}"
    for name, child in module.named_children():
        trained = {parameter.requires_grad for parameter in child.parameters()}
        if trained == {False}:
            yield f"{prefix}{name}"
        elif trained:
            yield from _frozen_parts(child, f"{prefix}{name}.")


def _stay_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(module, False)


def _named(model: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameters that a word after --freeze means."""
    parameters = dict(model.named_parameters())
    if name == BACKBONE:
        head = head_parameters(model)
        return [p for n, p in parameters.items() if n not in head]
    if name.isdecimal():
        stages = depths(model, coarse=True)
        most = max(stages.values())
        if not 1 <= int(name) <= most:
            raise ConfigError(f"--freeze {name}: a number of stages must be 1 to {most}")
        return [parameters[n] for n, stage in stages.items() if stage < int(name)]
    found = [p for n, p in parameters.items() if n == name or n.startswith(f"{name}.")]
    if not found:
        modules = {n for n, m in model.named_modules() if n and any(True for _ in m.parameters())}
        near = get_close_matches(name, sorted({BACKBONE, *modules, *parameters}), cutoff=0.5)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else (f"its parts: {', '.join(n for n, _ in model.named_children() if n in modules)}")
        )
        raise ConfigError(f"--freeze {name}: no such module or parameter in this model; {hint}")
    return found


def depths(model: nn.Module, *, coarse: bool = False) -> dict[str, int]:
    """Parameter -> its layer, counted from the input; the classifier has the highest number.

    coarse: by stages rather than by layers, where the network has stages.
    """
    if hasattr(model, "group_matcher"):
        from timm.models import group_parameters

        matcher = cast(Any, model).group_matcher(coarse=coarse)
        found = group_parameters(model, matcher, reverse=True)
    else:
        per_stage = cast(Any, model).blocks_per_stage if coarse else 1
        found = {}
        for name, _ in model.named_parameters():
            block = re.match(r"blocks\.(\d+)\.", name)
            found[name] = 1 + int(block[1]) // per_stage if block else 0
    # timm's matchers may have the last norm and the classifier in one group.
    head = head_parameters(model)
    last = max(depth for name, depth in found.items() if name not in head)
    return {name: last + 1 if name in head else depth for name, depth in found.items()}


def is_decayed(name: str, parameter: nn.Parameter, model: nn.Module) -> bool:
    """True for weights; False for gains, biases, SkipInit scalars and norms.

    By name as well as by shape: timm's gains are [O, 1, 1, 1], so a rule by dimension decays them.
    """
    last = name.rpartition(".")[2]
    by_model: set[str] = getattr(model, "no_weight_decay", set)()
    return not (parameter.ndim <= 1 or last == "bias" or "gain" in last or name in by_model)


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """The trained parameters by rate and decay. A group without "lr_scale" has the rate of the
    schedule."""
    scales = _rate_scales(model, config)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for scale in dict.fromkeys(scales.values()):
        groups |= {(scale, True): [], (scale, False): []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[scales[name], is_decayed(name, parameter, model)].append(parameter)
    found = []
    for (scale, decayed), parameters in groups.items():
        decay = config.weight_decay if decayed else 0.0
        group: dict[str, Any] = {"params": parameters, "weight_decay": decay}
        if scale != 1:
            group["lr_scale"] = scale
        if config.optimizer == "muon" and not decayed:
            group["use_fallback"] = True  # gains, embeddings and tokens are no matrices: by AdamW
        if parameters:
            found.append(group)
    return found


def _rate_scales(model: nn.Module, config: OptimConfig) -> dict[str, float]:
    """Parameter -> its rate as a multiple of the schedule's."""
    scales = dict.fromkeys((name for name, _ in model.named_parameters()), 1.0)
    if config.layer_decay != 1:
        layers = depths(model)
        last = max(layers.values())
        scales = {name: config.layer_decay ** (last - layers[name]) for name in scales}
    if config.head_lr:
        scales |= dict.fromkeys(head_parameters(model), config.head_lr / config.lr)
    return scales
