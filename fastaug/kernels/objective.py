"""The three objectives over the views of an image, and the invariance regularizer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastaug.errors import ConfigError
from fastaug.kernels.autograd import apply_kernel
from fastaug.kernels.config import Average
from fastaug.kernels.contract import AVERAGES, Kernel, check_logits, is_soft
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
    """logits: [B, K, C], targets: [B] int64 or [B, C] floating -> the training loss and its terms.

    targets: the class of each image; or, soft, the probability of each class, as
    torch.nn.functional.cross_entropy takes it: rows are used as given, whatever their sum, and no
    gradient flows to them.
    average: what is averaged over the K views of an image: "losses", "probs" or "logits".
    kl_weight: weight of the pairwise KL between the views; label smoothing does not affect it.
    """
    check_options(average, kl_weight, label_smoothing)
    check_logits(logits)
    _check_targets(targets, logits)
    return loss_terms(
        _resolved(kernel, logits, average, is_soft(targets)),
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
    check_logits(logits)
    return image_kl(_resolved(kernel, logits, None), logits)


def image_kl(kernel: Kernel | str, logits: Tensor) -> Tensor:
    """pairwise_kl() without checks and lookups, for a kernel that resolve_kernel returned."""
    return apply_kernel(kernel, logits, None, None, 1.0, 0.0, mean=False)[0]


def _resolved(
    kernel: Kernel | str, logits: Tensor, average: Average | None, soft: bool = False
) -> Kernel | str:
    """The kernel; while compiling only its name, which each run of the graph looks up."""
    return kernel if torch.compiler.is_compiling() else find_kernel(kernel, logits, average, soft)


def check_options(average: Average, kl_weight: float, label_smoothing: float) -> None:
    """Raise ConfigError unless objective() takes these."""
    if average not in AVERAGES:
        raise ConfigError(f"average must be one of {', '.join(AVERAGES)}, got {average!r}")
    _check_range("kl_weight", kl_weight, math.inf)
    _check_range("label_smoothing", label_smoothing, 1)


def _check_range(name: str, value: float, limit: float) -> None:
    try:
        if 0 <= value < limit:
            return
    except TypeError:  # not a number
        pass
    below = "finite" if limit == math.inf else f"below {limit:g}"
    raise ConfigError(f"{name} must be at least 0 and {below}, got {value!r}")


def _check_targets(targets: Tensor, logits: Tensor) -> None:
    images, _, classes = logits.shape
    is_tensor = isinstance(targets, Tensor)
    if is_tensor and targets.shape == (images,) and targets.dtype is torch.int64:
        return
    given = type(targets).__name__
    if is_tensor:
        given = f"{targets.dtype} of shape {list(targets.shape)}"
        is_floating = targets.is_floating_point()
        if targets.shape == (images, classes) and is_floating:
            if targets.device == logits.device:
                return
            given += f" on {targets.device}; use targets.to(logits.device)"
        elif targets.shape == (images,) and not is_floating:
            given += "; use targets.long()"
        elif targets.shape == (images, classes):
            given += "; use targets.float()"
    raise ConfigError(
        f"targets must be an int64 tensor of shape [{images}], one class index for each image, or "
        f"a floating-point tensor of shape [{images}, {classes}] on {logits.device}, one "
        f"probability for each class, got {given}"
    )
