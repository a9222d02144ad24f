"""The autograd wrapper of all kernels, in eager mode and under torch.compile."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastaug.kernels.config import Average
from fastaug.kernels.contract import Kernel, is_soft, takes_mean
from fastaug.kernels.registry import find_kernel, name_of


class WithGradient(torch.autograd.Function):
    """A value with a known gradient for the logits: value: [] or [B], grad: [B, K, C] -> value.

    The kernel computes the gradient together with the value, so backward is at most one product.
    Each operation counts in a small batch, so nll and kl, which have no gradient, stay outside.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, value: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        # The decorator that refuses a second derivative costs a fifth of a small backward pass.
        if torch.is_grad_enabled():
            return _scaled_once(ctx, upstream), None, None
        return _scaled(ctx, upstream), None, None


def _scaled(ctx: Any, upstream: Tensor) -> Tensor:
    (grad,) = ctx.saved_tensors
    if upstream.ndim:
        return grad * upstream[:, None, None].to(grad.dtype)
    # loss.backward() itself: this saves a pass over the gradient and a copy. Only on a CPU, where
    # item() does not synchronize.
    if upstream.is_cpu and upstream.item() == 1:
        return grad
    return grad * upstream  # a scalar does not change the dtype of a tensor


_scaled_once = once_differentiable(_scaled)


def apply_kernel(
    kernel: Kernel | str,
    logits: Tensor,
    targets: Tensor | None,
    average: Average | None,
    kl_weight: float,
    label_smoothing: float,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """nll + kl_weight * kl of each image [B], or the mean [], differentiable; nll: [B], kl: [B].

    kernel: one that find_kernel or resolve_kernel returned. While compiling, a name will do: the
    graph holds only the name.
    """
    need_grad = logits.requires_grad and torch.is_grad_enabled()
    if targets is not None and targets.ndim == 2:  # soft
        targets = targets.detach().to(_precise(logits))
    grad: Tensor | None
    if torch.compiler.is_compiling():
        nll, kl, grad = torch.ops.fastaug.value_and_grad(
            *(logits.detach(), targets, name_of(kernel)),
            *(average, kl_weight, label_smoothing, need_grad),
        )
    else:
        found: Any = kernel
        if mean and need_grad and takes_mean(found, logits):
            value, nll, kl, grad = found.mean_and_grad(
                logits, targets, average, kl_weight, label_smoothing
            )
            return WithGradient.apply(logits, value, grad), nll, kl
        nll, kl, grad = found.value_and_grad(
            logits.detach(),
            targets,
            average=average,
            kl_weight=kl_weight,
            label_smoothing=label_smoothing,
            need_grad=need_grad,
        )
    # kl is infinite if a class is -inf in only some views: with weight 0 it must not count.
    value = nll.add(kl, alpha=kl_weight) if kl_weight else nll.clone()
    if need_grad:
        value = WithGradient.apply(logits, value, grad)
    return (value.mean() if mean else value), nll, kl


def _precise(logits: Tensor) -> torch.dtype:
    """The dtype of the values, and of soft targets."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


@torch.library.custom_op("fastaug::value_and_grad", mutates_args=())
def _value_and_grad(
    logits: Tensor,
    targets: Tensor | None,
    kernel: str,
    average: str | None,
    kl_weight: float,
    label_smoothing: float,
    need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """value_and_grad in a compiled graph, of a kernel given by name; grad is [0] if not needed."""
    known = cast("Average | None", average)
    nll, kl, grad = find_kernel(kernel, logits, known, is_soft(targets)).value_and_grad(
        logits,
        targets,
        average=known,
        kl_weight=kl_weight,
        label_smoothing=label_smoothing,
        need_grad=need_grad,
    )
    return nll, kl, logits.new_empty(0) if grad is None else grad


@_value_and_grad.register_fake
def _(
    logits: Tensor,
    targets: Tensor | None,
    kernel: str,
    average: str | None,
    kl_weight: float,
    label_smoothing: float,
    need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    nll = logits.new_empty(logits.shape[0], dtype=_precise(logits))
    grad = logits.new_empty(logits.shape if need_grad else (0,))
    return nll, torch.empty_like(nll), grad
