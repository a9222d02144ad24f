"""The three objectives over the views of an image, and the invariance regulariser."""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from fastaug.errors import ConfigError
from fastaug.kernels import Average, Kernel, evaluate

_AVERAGES = get_args(Average)


class ObjectiveTerms(NamedTuple):
    """loss = mean over images of nll + kl_weight * kl; the gradient flows through loss alone."""

    loss: Tensor
    """Scalar, differentiable."""
    nll: Tensor
    """[B], the negative log-likelihood of each image, in nats, as a value."""
    kl: Tensor
    """[B], the mean KL over the ordered pairs of views of each image, in nats, as a value."""


def objective(
    logits: Tensor,
    targets: Tensor,
    *,
    average: Average = "losses",
    kl_weight: float = 1.0,
    label_smoothing: float = 0.0,
    kernel: str | Kernel = "auto",
) -> ObjectiveTerms:
    """logits: [B, K, C], targets: [B] int64 -> the training loss and its terms.

    average: what is averaged over the K views of an image: "losses", "probs" or "logits".
    kl_weight: weight of the pairwise KL between the views; it does not see the label smoothing.
    """
    if average not in _AVERAGES:
        raise ConfigError(f"average must be one of {', '.join(_AVERAGES)}, got {average!r}")
    if not 0 <= label_smoothing < 1:
        raise ConfigError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}")
    images = _check_logits(logits)
    if targets.numel() != images or targets.ndim != 1 or targets.dtype is not torch.int64:
        raise ConfigError(
            f"targets must be int64 of shape [{images}], one for each image, "
            f"got {targets.dtype} of shape {list(targets.shape)}"
        )
    loss, nll, kl = evaluate(logits, targets, kernel, average, kl_weight, label_smoothing, True)
    return ObjectiveTerms(loss, nll, kl)


def pairwise_kl(logits: Tensor, *, kernel: str | Kernel = "auto") -> Tensor:
    """logits: [B, K, C] -> mean KL(p_k || p_k') over the ordered pairs k != k': [B], in nats.

    Differentiable: the regulariser of the paper for anyone's training loop. Zero for K = 1.
    """
    _check_logits(logits)
    return evaluate(logits, None, kernel, None, 1.0, 0.0, False)[0]


def _check_logits(logits: Tensor) -> int:
    """How many images there are."""
    if logits.ndim == 3:
        images, views, classes = logits.shape
        if views and classes:
            return images
    raise ConfigError(
        f"logits must be [images, views, classes], got shape {list(logits.shape)}; "
        "from a flat batch: logits.unflatten(0, (-1, views))"
    )
