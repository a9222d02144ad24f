"""The reference kernel: the objective and its gradient in plain torch, on any device.

Names: z logits, lp log-probabilities, p probabilities of each view, all [B, K, C]; q the smoothed
target [B, C], q_sum its sum over the classes [B, 1] (1 for a class index); g the softmax of the
mean logits [B, C].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastaug.kernels.config import Average
from fastaug.kernels.contract import is_soft, wrong_target


class ReferenceKernel:
    name = "reference"
    soft_targets = True

    def supports(self, logits: Tensor) -> str | None:
        return (
            None
            if logits.is_floating_point()
            else f"logits must be floating point, got {logits.dtype}"
        )

    @torch.no_grad()
    def value_and_grad(
        self,
        logits: Tensor,
        targets: Tensor | None,
        *,
        average: Average | None,
        kl_weight: float,
        label_smoothing: float,
        need_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        # Arithmetic in half precision gives garbage: the KL even comes out negative.
        z = logits if logits.dtype == torch.float64 else logits.float()
        lp = z.log_softmax(-1)
        # With weight 0 the KL is only a value: its gradient may be infinite, and 0 * inf is NaN.
        kl, kl_grad = _pairwise_kl(lp, need_grad and kl_weight != 0)
        nll, grad = torch.zeros_like(kl), torch.zeros_like(lp)
        if average is not None:
            assert targets is not None
            q, q_sum = _smoothed(targets, z.shape[-1], label_smoothing, z.dtype)
            nll, grad = _NLL[average](z, lp, q, q_sum)
        if kl_grad is not None:
            grad = grad + kl_weight * kl_grad
        return nll, kl, grad.to(logits.dtype) if need_grad else None


def _pairwise_kl(lp: Tensor, need_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Mean KL over the ordered pairs of views, in O(K C): [B], and its gradient [B, K, C].

    sum over k, k' of KL(p_k || p_k') = K * sum over k, c of (p_kc - g_c)(lp_kc - lg_c), where
    g = softmax(mean_k lp). Every term is >= 0, so nothing cancels: fp32 is accurate to 5e-6 at
    KL = 2e-5 nats, where the error of the shorter form p * (z - mean z) exceeds its value.
    """
    views = lp.shape[1]
    if views == 1:
        return lp.new_zeros(lp.shape[0]), torch.zeros_like(lp) if need_grad else None
    p = lp.exp()
    mean_lp = lp.mean(1, keepdim=True)
    lg = mean_lp.log_softmax(-1)
    # A class at -inf in all views contributes nothing; in some views only, the KL is infinite.
    absent = (lp == -math.inf) & (lg == -math.inf)
    terms = (p - lg.exp()) * (lp - lg)
    kl = terms.masked_fill_(absent, 0).sum((1, 2)) / (views - 1)
    if not need_grad:
        return kl, None
    d = (lp - mean_lp).masked_fill_(absent, 0)
    m = (p * d).sum(-1, keepdim=True)
    return kl, (p * (d - m) + (p - p.mean(1, keepdim=True))) / (views - 1)


def _smoothed(
    targets: Tensor, classes: int, smoothing: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | int]:
    """q and q_sum."""
    if is_soft(targets):
        q = targets.to(dtype) * (1 - smoothing) + smoothing / classes
        return q, q.sum(-1, keepdim=True)
    if targets.device.type == "cpu" and len(wrong := targets[(targets < 0) | (targets >= classes)]):
        raise wrong_target(targets.tolist().index(wrong[0]), int(wrong[0]), classes)
    q = torch.full((len(targets), classes), smoothing / classes, dtype=dtype, device=targets.device)
    return q.scatter_add_(1, targets[:, None], q.new_full((len(targets), 1), 1 - smoothing)), 1


def _cross_entropy(q: Tensor, lp: Tensor) -> Tensor:
    """-sum_c q_c lp_c, where q_c = 0 counts as 0 also at lp_c = -inf."""
    return -(q * lp.masked_fill((q == 0) & (lp == -math.inf), 0)).sum(-1)


_Sum = Tensor | int


def _average_losses(z: Tensor, lp: Tensor, q: Tensor, q_sum: _Sum) -> tuple[Tensor, Tensor]:
    q = q[:, None].expand_as(lp)
    if isinstance(q_sum, Tensor):
        q_sum = q_sum[:, None]
    return _cross_entropy(q, lp).mean(1), (lp.exp() * q_sum - q) / lp.shape[1]


def _average_probs(z: Tensor, lp: Tensor, q: Tensor, q_sum: _Sum) -> tuple[Tensor, Tensor]:
    # log of the mean probability through logsumexp: exp would underflow at a logit gap of 200.
    lp_mean = lp.logsumexp(1) - math.log(lp.shape[1])
    ratio = (lp - lp_mean[:, None]).exp()
    ratio.masked_fill_((lp_mean == -math.inf)[:, None], 1)
    weighted = q[:, None] * ratio
    grad = (lp.exp() * weighted.sum(-1, keepdim=True) - weighted) / lp.shape[1]
    return _cross_entropy(q, lp_mean), grad


def _average_logits(z: Tensor, lp: Tensor, q: Tensor, q_sum: _Sum) -> tuple[Tensor, Tensor]:
    lg = z.mean(1).log_softmax(-1)
    return _cross_entropy(q, lg), ((lg.exp() * q_sum - q) / lp.shape[1])[:, None].expand_as(lp)


_NLL = {"losses": _average_losses, "probs": _average_probs, "logits": _average_logits}
