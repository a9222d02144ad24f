"""Batch norm with statistics over all ranks.

torch's SyncBatchNorm runs only on GPUs; this one is plain torch, so that CI tests what runs. All
ranks have batches of the same size, so the mean of their means is the mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastaug.errors import ConfigError
from fastaug.runtime.distributed import Group


class SyncBatchNorm2d(nn.BatchNorm2d):
    """x [N, C, H, W] -> [N, C, H, W]; in training, normalized with the statistics of all ranks."""

    group = Group()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            values = x if x.dtype is torch.float64 else x.float()
            own_mean = values.mean((0, 2, 3))
            own_variance = values.var((0, 2, 3), correction=0)
            mean: Tensor = _MeanOverRanks.apply(own_mean, self.group)
            # The total variance includes that of the ranks' means. This form has no cancellation
            # when means are far from 0.
            variance: Tensor = _MeanOverRanks.apply(
                own_variance + (own_mean - mean).square(), self.group
            )
            self._update_running_stats(
                mean.detach(), variance.detach(), self.group.ranks * x[:, 0].numel()
            )
            scale = self.weight * torch.rsqrt(variance + self.eps)
            shift = self.bias - mean * scale
            normalized = values * scale[:, None, None] + shift[:, None, None]
        return normalized.to(x.dtype)

    def _update_running_stats(self, mean: Tensor, variance: Tensor, count: int) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        self.num_batches_tracked.add_(1)


class _MeanOverRanks(torch.autograd.Function):
    """Mean of a tensor over ranks. Every rank's loss depends on it, so the gradient is averaged
    too; DDP then averages over the ranks' losses."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.mean_(tensor.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.mean_(gradient.contiguous().clone()), None


def synchronize_batch_norm(model: nn.Module, name: str, group: Group) -> None:
    """Replace every batch norm of a model by SyncBatchNorm2d, in place."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    if not norms:
        raise ConfigError(f"--batch-norm sync: {name} has no batch norm; use local")
    if unknown := next((norm for norm in norms if type(norm) is not nn.BatchNorm2d), None):
        raise ConfigError(
            f"--batch-norm sync: {name} has a custom batch norm ({type(unknown).__name__}) "
            "that cannot be synchronized; use local, or resnet18"
        )
    for norm in norms:
        # Keeps the parameters and all references; only forward() changes.
        norm.__class__ = SyncBatchNorm2d
        norm.group = group  # type: ignore[assignment]
