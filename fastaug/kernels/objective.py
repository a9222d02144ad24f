"""The three objectives over the views of an image, and the invariance regularizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from fastaug.errors import ConfigError
from fastaug.kernels.autograd import evaluate
from fastaug.kernels.config import Average
from fastaug.kernels.contract import Kernel

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
    shape = logits.shape
    if len(shape) != 3 or not shape[1] or not shape[2]:
        raise _wrong_shape(shape)
    if targets.shape != (shape[0],) or targets.dtype is not torch.int64:
        raise ConfigError(
            f"targets must be int64 of shape [{shape[0]}], one for each image, "
            f"got {targets.dtype} of shape {list(targets.shape)}"
        )
    loss, nll, kl = evaluate(logits, targets, kernel, average, kl_weight, label_smoothing, True)
    return ObjectiveTerms(loss, nll, kl)


def pairwise_kl(logits: Tensor, *, kernel: str | Kernel = "auto") -> Tensor:
    """logits: [B, K, C] -> mean KL(p_k || p_k') over the ordered pairs k != k': [B], in nats.

    Differentiable: the regularizer of the paper for anyone's training loop. Zero for K = 1.
    """
    if logits.ndim != 3 or not logits.shape[1] or not logits.shape[2]:
        raise _wrong_shape(logits.shape)
    return evaluate(logits, None, kernel, None, 1.0, 0.0, False)[0]


def _wrong_shape(shape: Sequence[int]) -> ConfigError:
    return ConfigError(
        f"logits must be [images, views, classes], got shape {list(shape)}; "
        "from a flat batch: logits.unflatten(0, (-1, views))"
    )
