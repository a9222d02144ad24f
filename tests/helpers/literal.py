"""The paper's definitions, literally, in float64, through autograd: every kernel's oracle."""

from __future__ import annotations

import torch
from torch import Tensor

AVERAGES = ("losses", "probs", "logits")


def literal_nll(z: Tensor, y: Tensor, average: str, smoothing: float) -> Tensor:
    """Eqs. avg_losses_k, avg_probs_k, avg_logs_k, with a smoothed target: [B]. y: [B] or [B, C]."""
    classes = z.shape[-1]
    t = y if y.is_floating_point() else torch.nn.functional.one_hot(y, classes)
    q = (1 - smoothing) * t.double() + smoothing / classes

    def loss(p: Tensor) -> Tensor:
        return -(q * p.log()).sum(-1)

    p = [view.softmax(-1) for view in z.unbind(1)]
    if average == "losses":
        return torch.stack([loss(view) for view in p]).mean(0)
    if average == "probs":
        return loss(torch.stack(p).mean(0))
    return loss(torch.stack(z.unbind(1)).mean(0).softmax(-1))


def literal_kl(z: Tensor) -> Tensor:
    """Eq. kl_loss_k, all K^2 - K ordered pairs: [B]."""
    views = [view.softmax(-1) for view in z.unbind(1)]
    pairs = [(p * (p / r).log()).sum(-1) for p in views for r in views if p is not r]
    return sum(pairs, torch.zeros(len(z), dtype=z.dtype)) / max(1, len(pairs))


def literal_terms(
    z: Tensor, y: Tensor | None, average: str | None, kl_weight: float, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What a kernel returns, in float64: nll [B], kl [B], gradient of nll + kl_weight * kl."""
    z = z.detach().double().requires_grad_()
    nll, kl = z.new_zeros(len(z)), literal_kl(z)
    if average is not None and y is not None:
        nll = literal_nll(z, y, average, smoothing)
    total = (nll + kl_weight * kl).sum() + 0 * z.sum()  # one view has no KL to depend on z
    (grad,) = torch.autograd.grad(total, z)
    return nll.detach(), kl.detach(), grad
