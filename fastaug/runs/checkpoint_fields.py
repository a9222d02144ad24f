"""The fields of a checkpoint and their kinds, checked before anything is built from them.

The checksum of a checkpoint shows that it is intact, not who wrote it: a file may come from anyone.
Settings are checked by TrainConfig.from_saved, the shapes of weights against the network that they
name (runs/weights.py), and the optimizer's state against the optimizer (engine/optim_state.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastaug.data.labels import MAX_CLASSES
from fastaug.errors import CheckpointError, few, shown

LONGEST_NAME = 2**16
"""Characters in the name of a class."""
_DEEPEST = 8
"""Levels of dictionaries and lists; a real checkpoint has 5."""

Check = Callable[[Any], str]
"""The rule that a value breaks, such as "a whole number of at least 0"; empty if none."""


def check_fields(state: Mapping[str, Any], path: Path, size: int) -> None:
    """Raise CheckpointError unless all fields of a checkpoint that are there have their kinds, and
    its tensors fit the file. size: of the file in bytes."""
    for name in ("config", "classes", "model", "ema", "step"):
        if name not in state:
            raise CheckpointError(f"{path}: not a fastaug checkpoint (it has no {name})")
    for name, check in FIELDS.items():
        if name in state and (rule := check(state[name])):
            raise CheckpointError(
                f"{path}: not a fastaug checkpoint: its {name} must be {rule}, got "
                f"{shown(state[name])}"
            )
    # A small file may claim large tensors: of one element that repeats, or that share memory.
    if sum(tensor.nbytes for tensor in _tensors(state)) > size:
        raise CheckpointError(f"{path}: not a fastaug checkpoint: its tensors exceed the file")
    for name in ("skipped_steps", "evaluated_epochs"):
        if state.get(name, 0) > state["step"]:
            raise CheckpointError(
                f"{path}: not a fastaug checkpoint: its {name} is {state[name]}, above its step, "
                f"{state['step']}"
            )


def check_resumable(state: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError if fields are missing that a run needs to continue. name: of the
    checkpoint, for messages."""
    if missing := sorted(FIELDS.keys() - {"version", "speed"} - state.keys()):
        raise CheckpointError(
            f"{name}: cannot be resumed, because it has no {few(missing, most=20)}"
        )


# --- kinds ---


def whole_number(value: Any) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return "" if is_number and 0 <= value < 2**63 else "a whole number of at least 0"


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """A finite number from low to high."""

    def check(value: Any) -> str:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and low <= value <= high and abs(value) <= 1e300:
            return ""
        limits = "" if math.isinf(low) else f" of at least {low:g}"
        return f"a number{limits}" if math.isinf(high) else f"a number from {low:g} to {high:g}"

    return check


def text(longest: int) -> Check:
    def check(value: Any) -> str:
        is_text = isinstance(value, str) and len(value) <= longest
        return "" if is_text else f"text of at most {longest:,} characters"

    return check


def tensors(value: Any) -> str:
    is_state_dict = isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(own, Tensor) for name, own in value.items()
    )
    return "" if is_state_dict else "tensors by name"


def plain_values(value: Any) -> str:
    """Numbers, text and short lists of them, by name."""
    is_plain = isinstance(value, dict) and all(
        isinstance(name, str) and _is_plain(own, depth=3) for name, own in value.items()
    )
    return "" if is_plain else "names and plain values"


def record(**checks: Check) -> Check:
    """A dictionary with exactly these fields."""

    def check(value: Any) -> str:
        names = ", ".join(checks)
        if not isinstance(value, dict) or value.keys() != checks.keys():
            return f"a dictionary of {names}"
        rules = ((name, own(value[name])) for name, own in checks.items())
        return next((f"a dictionary whose {name} is {rule}" for name, rule in rules if rule), "")

    return check


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, (list, tuple)):
        return depth > 0 and len(value) <= 1000 and all(_is_plain(own, depth - 1) for own in value)
    if isinstance(value, int):
        return abs(value) < 2**64
    return value is None or isinstance(value, float) or not text(LONGEST_NAME)(value)


def _classes(value: Any) -> str:
    is_list = isinstance(value, list) and 2 <= len(value) <= MAX_CLASSES
    if is_list and not any(map(text(LONGEST_NAME), value)):
        return ""
    return f"a list of 2 to {MAX_CLASSES:,} names"


def _average(value: Any) -> str:
    if value is None:
        return ""
    if rule := tensors(value):
        return f"{rule}, or None"
    count = value.get("n_averaged")
    is_count = count is not None and count.shape == () and count.dtype == torch.int64
    return "" if is_count and count >= 0 else "a moving average with its count, n_averaged"


def _sums(value: Any) -> str:
    is_sums = isinstance(value, Tensor) and value.shape == (4,) and value.dtype == torch.float32
    return "" if is_sums else "a tensor of 4 sums"


def _optimizer(value: Any) -> str:
    if record(state=_optimizer_state, param_groups=_groups)(value):
        return "a state dict of an optimizer"
    return ""


def _optimizer_state(value: Any) -> str:
    is_state = isinstance(value, dict) and all(
        isinstance(index, int) and isinstance(own, dict) and not any(map(_kept, own.items()))
        for index, own in value.items()
    )
    return "" if is_state else "tensors and numbers of each parameter"


def _kept(item: tuple[Any, Any]) -> str:
    """An entry of what an optimizer keeps for a parameter."""
    name, value = item
    is_known = isinstance(name, str) and (isinstance(value, Tensor) or _is_plain(value, depth=0))
    return "" if is_known else "a tensor or a number"


def _groups(value: Any) -> str:
    is_groups = isinstance(value, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and not any(map(whole_number, group["params"]))
        and all(isinstance(n, str) for n in group)
        and all(
            _is_plain(own, depth=1) or (isinstance(own, Tensor) and own.ndim == 0)
            for name, own in group.items()
            if name != "params"
        )
        for group in value
    )
    return "" if is_groups else "parameter groups"


def _loader(value: Any) -> str:
    if rule := plain_values(value):
        return rule
    is_placed = not any(whole_number(value.get(name)) for name in ("epoch", "position"))
    return "" if is_placed else "a state with epoch and position, whole numbers of at least 0"


FIELDS: dict[str, Check] = {
    "version": text(100),
    "config": plain_values,
    "classes": _classes,
    "model": tensors,
    "ema": _average,
    "optimizer": _optimizer,
    "scaler": plain_values,
    "step": whole_number,
    "skipped_steps": whole_number,
    "evaluated_epochs": whole_number,
    "best_top1": number(-1, 1),
    "loader": _loader,
    "meter": record(sums=_sums),
    "speed": record(steps=whole_number, seconds=number(0), waited=number(0)),
    "launch": text(1000),
}
"""All fields but the format, each with its check."""


def _tensors(value: Any, depth: int = _DEEPEST) -> Iterator[Tensor]:
    """All tensors in the fields, at any depth; fields of unknown names may be nested deeper."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (dict, list, tuple)):
        owns: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for own in owns:
            yield from _tensors(own, depth - 1)
