"""Clipping of a step's gradient, without a host sync: --clip-norm, --clip-value, --agc."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from fastaug.engine.config import OptimConfig
from fastaug.models.head import head_parameters

SMALLEST_NORM = 1e-3
"""AGC: weights count as at least this large, so that those that start at 0 can move."""


class Clipping:
    """Clips the gradients of a model as the settings say, or not at all."""

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self._config = config
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        head = head_parameters(model) if config.agc else set()
        self._body = [p for n, p in model.named_parameters() if p.requires_grad and n not in head]

    def __call__(self) -> None:
        config = self._config
        if config.clip_norm:
            clip_grad_norm_(self._parameters, config.clip_norm)
        elif config.clip_value:
            clip_grad_value_(self._parameters, config.clip_value)
        elif config.agc:
            clip_adaptively(self._body, config.agc)


@torch.no_grad()
def clip_adaptively(parameters: list[nn.Parameter], factor: float) -> None:
    """Scale the gradient of each unit down to at most `factor` times the norm of its weights (Brock
    et al., 2021). As in DeepMind's code, a vector is one unit, also if it is stored with sides of
    1; a matrix or a convolution has a unit for each output."""
    known = [(p, p.grad) for p in parameters if p.grad is not None]
    if not known:
        return
    limits = [_unit_norms(p) for p, _ in known]
    norms = [_unit_norms(grad) for _, grad in known]
    torch._foreach_clamp_min_(limits, SMALLEST_NORM)
    torch._foreach_mul_(limits, factor)
    torch._foreach_clamp_min_(norms, 1e-6)
    torch._foreach_div_(limits, norms)
    torch._foreach_clamp_max_(limits, 1.0)
    torch._foreach_mul_([grad for _, grad in known], limits)


def _unit_norms(x: Tensor) -> Tensor:
    """x [O, ...] -> [O, 1, ...], or [1, ...] for a vector: the L2 norm of each unit."""
    is_vector = sum(side > 1 for side in x.shape) <= 1
    sides = tuple(range(0 if is_vector else 1, x.ndim))
    return torch.linalg.vector_norm(x, dim=sides, keepdim=True)
