"""An optimizer's step that the device takes or skips by itself.

torch's fused optimizers read the decision on the device. For all others the step is taken in any
case, on a GPU, and undone on the device if it was to be skipped: a host sync would leave the GPU
idle in every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes per element."""


class GuardedStep:
    """optimizer.step() that changes nothing if `skip` is True, a value on the device.

    An unfused optimizer on a GPU needs memory for a copy of its weights and state during the step,
    when that of the activations is free. Its counters, which are numbers of the host, are those of
    a step that was taken until the host has read the outcome: before the next step and before
    state_dict(). By then the device is at work on the next step, so that the host waits no longer
    than for the outcome that the trainer reads at this point anyway.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._on_gpu = device.type == "cuda"
        self._is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._pending: tuple[Tensor, torch.cuda.Event, list[dict[str, Any]]] | None = None
        """Outcome of the last step, the event after which it is known, and the numbers before."""

    def take_unless(self, skip: Tensor) -> None:
        """skip: [] bool."""
        self.settle()
        if self._is_fused:
            # As a GradScaler does.
            self._optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
            self._optimizer.step()
        elif self._on_gpu and self._has_all_state():
            self._step_and_undo(skip)
        elif not skip.item():  # free on a CPU; on a GPU, once: the first step makes the state
            self._optimizer.step()

    def settle(self) -> None:
        """Set the counters back if the last step was skipped."""
        if self._pending is None:
            return
        skipped, event, numbers = self._pending
        self._pending = None
        if not event.query():
            event.synchronize()
        if skipped:
            for own, before in zip(self._dictionaries(), numbers, strict=True):
                own.update(before)

    def forget(self) -> None:
        """The state is about to be replaced."""
        self._pending = None

    def _has_all_state(self) -> bool:
        return all(
            parameter in self._optimizer.state
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        )

    @torch.no_grad()
    def _step_and_undo(self, skip: Tensor) -> None:
        numbers = [_numbers(own) for own in self._dictionaries()]
        before = self._device_tensors()
        saved = [torch.empty_like(tensor) for tensor in before]
        torch._foreach_copy_(saved, before)
        self._optimizer.step()
        _select(skip, saved, self._device_tensors())
        outcome = skip.to("cpu", non_blocking=True)
        event = torch.cuda.current_stream(skip.device).record_event()
        self._pending = outcome, event, numbers

    def _dictionaries(self) -> list[dict[str, Any]]:
        return [*self._optimizer.state.values(), *self._optimizer.param_groups]

    def _device_tensors(self) -> list[Tensor]:
        """The weights, and what is kept for them on the device."""
        found = [p for group in self._optimizer.param_groups for p in group["params"]]
        for own in self._optimizer.state.values():
            found += [v for v in own.values() if isinstance(v, Tensor) and v.is_cuda]
        return found


def _numbers(own: dict[str, Any]) -> dict[str, Any]:
    """The numbers of the host in a dictionary; those in tensors as copies."""
    found: dict[str, Any] = {}
    for name, value in own.items():
        if isinstance(value, Tensor) and not value.is_cuda:
            found[name] = value.clone()
        elif isinstance(value, (int, float)) and name != "lr":
            found[name] = value
    return found


def _select(skip: Tensor, saved: list[Tensor], new: list[Tensor]) -> None:
    """new = saved where skip, for all of them; saved is overwritten.

    As integers: new * 0 would be NaN where new is. One launch for many tensors, whereas torch.where
    takes one for each.
    """
    by_size: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    for old, own in zip(saved, new, strict=True):
        olds, owns = by_size.setdefault(own.element_size(), ([], []))
        olds.append(old.view(_INTEGERS[own.element_size()]))
        owns.append(own.view(_INTEGERS[own.element_size()]))
    for size, (olds, owns) in by_size.items():
        integer = _INTEGERS[size]
        torch._foreach_mul_(owns, (~skip).to(integer))
        torch._foreach_mul_(olds, skip.to(integer))
        torch._foreach_add_(owns, olds)
