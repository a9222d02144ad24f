"""Batch norm over the parts of all ranks together.

torch's own SyncBatchNorm runs on GPUs alone; this one is plain torch, so what CI sees is what runs.
Parts are equally large on all ranks, so means of means are means.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastaug.errors import ConfigError
from fastaug.runtime.distributed import Group


class SyncBatchNorm2d(nn.BatchNorm2d):
    """x [N, C, H, W] -> the same, normalized by the statistics of all ranks while training."""

    group = Group()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            values = x if x.dtype is torch.float64 else x.float()
            own_mean = values.mean((0, 2, 3))
            own_variance = values.var((0, 2, 3), correction=0)
            mean: Tensor = _MeanOverRanks.apply(own_mean, self.group)
            # The spread of the ranks' means is part of the whole variance. In this form nothing
            # cancels where means are far from 0.
            variance: Tensor = _MeanOverRanks.apply(
                own_variance + (own_mean - mean).square(), self.group
            )
            self._remember(mean.detach(), variance.detach(), self.group.ranks * x[:, 0].numel())
            scale = self.weight * torch.rsqrt(variance + self.eps)
            shift = self.bias - mean * scale
            normalized = values * scale[:, None, None] + shift[:, None, None]
        return normalized.to(x.dtype)

    def _remember(self, mean: Tensor, variance: Tensor, count: int) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        self.num_batches_tracked.add_(1)


class _MeanOverRanks(torch.autograd.Function):
    """The mean of the ranks' tensors. Each rank's loss depends on it, so gradients are averaged,
    too; DDP then averages over the ranks' losses."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.mean_(tensor.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.mean_(gradient.contiguous().clone()), None


def synchronize_batch_norm(model: nn.Module, name: str, group: Group) -> None:
    """Put SyncBatchNorm2d in the place of every batch norm of the model."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    if not norms:
        raise ConfigError(f"--batch-norm sync: {name} has no batch norm; use local")
    if strange := next((norm for norm in norms if type(norm) is not nn.BatchNorm2d), None):
        raise ConfigError(
            f"--batch-norm sync: {name} has a batch norm of its own ({type(strange).__name__}) "
            "that cannot be synchronized; use local, or resnet18"
        )
    for norm in norms:
        # The same parameters in the same place: only what forward does is another.
        norm.__class__ = SyncBatchNorm2d
        norm.group = group  # type: ignore[assignment]
