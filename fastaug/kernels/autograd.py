"""The one autograd wrapper that serves every kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastaug.kernels.contract import Average, Kernel


class PerImageObjective(torch.autograd.Function):
    """logits: [B, K, C], targets: [B] -> nll + kl_weight * kl: [B]; nll: [B], kl: [B] as values.

    The kernel computes the gradient together with the value, so backward is one product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor | None,
        kernel: Kernel,
        average: Average | None,
        kl_weight: float,
        label_smoothing: float,
        need_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        nll, kl, grad = kernel.value_and_grad(
            logits,
            targets,
            average=average,
            kl_weight=kl_weight,
            label_smoothing=label_smoothing,
            need_grad=need_grad,
        )
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(nll, kl)
        # kl is infinite where a class is -inf in some views only: without weight it must not count.
        return (nll + kl_weight * kl if kl_weight else nll.clone()), nll, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, per_image_grad: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        scaled = grad * per_image_grad[:, None, None].to(grad.dtype)
        return scaled, None, None, None, None, None, None
