"""The state of an optimizer in a checkpoint, checked against the optimizer that is to take it.

torch's load_state_dict only counts groups and parameters; a wrong entry would end a later step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastaug.errors import CheckpointError, shown

SWITCHES = ("foreach", "fused", "capturable", "differentiable")
"""Settings of a group that decide how the optimizer computes, not what: the new one's are kept."""
_OF_A_STEP = ("lr", "initial_lr", "step")
"""Settings of a group that change from step to step."""
_PROBED = 32
"""Largest side of the parameters that are tried: adafactor factors those of at least 16."""

Shape = tuple[int, ...]


def check_optimizer_state(optimizer: Optimizer, saved: dict[str, Any], steps: float) -> None:
    """Raise CheckpointError unless a saved state_dict is that of this optimizer after some steps.

    steps: the most that it can have taken. The kinds of all fields are known to be right.
    """
    own = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in saved["param_groups"]] != [group["params"] for group in own]:
        raise CheckpointError("the optimizer's state belongs to other parameters")
    for number, (theirs, ours) in enumerate(zip(saved["param_groups"], own, strict=True)):
        for name, value in theirs.items():
            if not _fits(name, value, ours, steps):
                raise CheckpointError(
                    f"the optimizer's state has {name} {shown(value)} in group {number}; the "
                    f"settings give {shown(ours.get(name))}"
                )
    expected = _expected_entries(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not saved["state"].keys() <= set(range(len(parameters))):
        raise CheckpointError("the optimizer's state has entries of unknown parameters")
    for index, (parameter, entries) in enumerate(zip(parameters, expected, strict=True)):
        kept = saved["state"].get(index)
        if kept is None and not optimizer.state.get(parameter):
            continue  # it has never had a gradient
        for name, entry in entries.items():
            value = None if kept is None else kept.get(name)
            if not _is_entry(value, entry, parameter.shape, steps):
                raise CheckpointError(
                    f"the optimizer's state has a wrong {name} for parameter {index}, of shape "
                    f"{list(parameter.shape)}: {_described(value)}"
                )


def _fits(name: str, value: Any, ours: dict[str, Any], steps: float) -> bool:
    """True if a setting of a saved group is allowed."""
    if name in SWITCHES:
        return value is None or isinstance(value, bool)
    if name in _OF_A_STEP:
        return _is_count(value, steps if name == "step" else math.inf)
    if name == "params" or name not in ours:  # compared already, or of another version of torch
        return True
    here = ours[name]
    if isinstance(value, Tensor) or isinstance(here, Tensor):
        return isinstance(value, Tensor) and isinstance(here, Tensor) and value.item() == here
    return value == here or (isinstance(value, list) and tuple(value) == here)


def _is_count(value: Any, most: float) -> bool:
    """True for a finite number from 0 to `most`, on the host or in a tensor."""
    if isinstance(value, Tensor):
        value = value.item() if value.ndim == 0 and not value.is_complex() else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 <= value <= most and math.isfinite(value)


def _expected_entries(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """What the optimizer keeps for each of its parameters, by name.

    It takes a step on small parameters of as many dimensions; its own state does not change.
    """
    trial = object.__new__(type(optimizer))
    trial.__dict__ |= optimizer.__dict__
    trial.state, trial.param_groups = defaultdict(dict), []
    probes: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        by_shape: dict[Shape, nn.Parameter] = {}
        for parameter in group["params"]:
            shape = _capped(parameter.shape)
            if shape not in by_shape:
                by_shape[shape] = nn.Parameter(parameter.new_zeros(shape))
                by_shape[shape].grad = torch.ones_like(by_shape[shape])
            probes.append(by_shape[shape])
        trial.param_groups.append({**group, "params": list(by_shape.values())})
    trial.step()
    return (trial.state[probe] for probe in probes)


def _capped(shape: Shape) -> Shape:
    return tuple(min(side, _PROBED) for side in shape)


def _is_entry(value: Any, expected: Any, shape: Shape, steps: float) -> bool:
    """True if a saved value can take the place of an expected one, of a smaller parameter."""
    if expected is None or isinstance(expected, bool):
        return value is expected
    if not isinstance(expected, Tensor):
        return _is_count(value, max(1, steps))
    if not isinstance(value, Tensor) or value.is_floating_point() != expected.is_floating_point():
        return False
    if expected.shape == _capped(shape):
        return value.shape == shape
    if expected.ndim == 0:
        return _is_count(value, max(1, steps))
    return _capped(value.shape) == expected.shape and value.numel() <= math.prod(shape)


def _described(value: Any) -> str:
    return f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else shown(value)


def check_scaler_state(scaler: torch.amp.GradScaler, saved: dict[str, Any]) -> None:
    """Raise CheckpointError unless a saved state_dict is that of this loss scaler."""
    own = scaler.state_dict()
    is_same = saved.keys() == own.keys() and all(
        _is_count(value, math.inf)
        and (name in ("scale", "_growth_tracker") or value == own[name])
        and (name != "_growth_tracker" or isinstance(value, int))
        for name, value in saved.items()
    )
    if not is_same or saved.get("scale", 1) <= 0:
        raise CheckpointError(f"the state of the fp16 loss scale is wrong: {shown(saved)}")
