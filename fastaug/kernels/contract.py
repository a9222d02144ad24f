"""What a loss kernel is."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fastaug.errors import ConfigError
from fastaug.kernels.config import Average


class Kernel(Protocol):
    """Computes the objective of every image and its gradient. Anything with these three will do.

    One that takes the mean over images, too, spares a small batch a third of its time by a method
    `mean_and_grad(logits, targets, average, kl_weight, label_smoothing) -> mean: [], nll, kl, grad
    of the mean`. These logits may require a gradient, and nothing of what it does is recorded.

    A kernel is admitted once for a device and for what is in its source file, and in each process
    if it has attributes of its own. One that is made of more files (or compiled from them) names
    them all by a method `sources() -> Iterable[Path]`.
    """

    name: str

    def supports(self, logits: Tensor) -> str | None:
        """None, or why this kernel cannot take these logits here."""

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
        """logits: [B, K, C], targets: [B] int64 -> nll: [B], kl: [B], grad: [B, K, C] or None.

        grad is the gradient of nll_b + kl_weight * kl_b for each image b. average=None is the
        regularizer alone: no targets, nll is zero. Values are fp32 for fp32, fp16 and bf16 logits;
        grad has the dtype of the logits.
        """


def takes_mean(kernel: Kernel, logits: Tensor) -> bool:
    """Whether its mean_and_grad is called: not for fp16, whose gradient, divided by the number of
    images, would lose to underflow what a loss scale is there to keep."""
    return hasattr(kernel, "mean_and_grad") and logits.dtype is not torch.float16


def wrong_target(image: int, target: int, classes: int) -> ConfigError:
    """Where a kernel can tell without waiting for a GPU; there, nll is NaN for such an image."""
    return ConfigError(f"targets must be 0 to {classes - 1}, got {target} for image {image}")
