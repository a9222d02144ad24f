"""The three objectives over the views of an image, and the invariance regularizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastaug.errors import ConfigError
from fastaug.kernels.autograd import apply_kernel
from fastaug.kernels.config import Average
from fastaug.kernels.contract import AVERAGES, Kernel
from fastaug.kernels.registry import find_kernel


class ObjectiveTerms(NamedTuple):
    """loss = mean over images of nll + kl_weight * kl; only loss has a gradient."""

    loss: Tensor
    """Scalar, differentiable."""
    nll: Tensor
    """[B], the negative log-likelihood of each image in nats, detached."""
    kl: Tensor
    """[B], the mean KL over the ordered pairs of views of each image in nats, detached."""


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
    kl_weight: weight of the pairwise KL between the views; label smoothing does not affect it.
    """
    if average not in AVERAGES:
        raise ConfigError(f"average must be one of {', '.join(AVERAGES)}, got {average!r}")
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
    return loss_terms(
        _resolved(kernel, logits, average),
        logits,
        targets,
        average=average,
        kl_weight=kl_weight,
        label_smoothing=label_smoothing,
    )


def loss_terms(
    kernel: Kernel | str,
    logits: Tensor,
    targets: Tensor,
    *,
    average: Average,
    kl_weight: float,
    label_smoothing: float,
) -> ObjectiveTerms:
    """objective() without checks and lookups, for a kernel that resolve_kernel returned."""
    loss, nll, kl = apply_kernel(
        kernel, logits, targets, average, kl_weight, label_smoothing, mean=True
    )
    return ObjectiveTerms(loss, nll, kl)


def pairwise_kl(logits: Tensor, *, kernel: str | Kernel = "auto") -> Tensor:
    """logits: [B, K, C] -> mean KL(p_k || p_k') over the ordered pairs k != k': [B], in nats.

    Differentiable: the paper's regularizer, for any training loop. Zero for K = 1.
    """
    if logits.ndim != 3 or not logits.shape[1] or not logits.shape[2]:
        raise _wrong_shape(logits.shape)
    return image_kl(_resolved(kernel, logits, None), logits)


def image_kl(kernel: Kernel | str, logits: Tensor) -> Tensor:
    """pairwise_kl() without checks and lookups, for a kernel that resolve_kernel returned."""
    return apply_kernel(kernel, logits, None, None, 1.0, 0.0, mean=False)[0]


def _resolved(kernel: Kernel | str, logits: Tensor, average: Average | None) -> Kernel | str:
    """In a graph that is being compiled, kernels stay names: each run of the graph looks it up."""
    return kernel if torch.compiler.is_compiling() else find_kernel(kernel, logits, average)


def _wrong_shape(shape: Sequence[int]) -> ConfigError:
    return ConfigError(
        f"logits must be [images, views, classes], got shape {list(shape)}; "
        "from a flat batch: logits.unflatten(0, (-1, views))"
    )
