"""The interface of a loss kernel."""

from __future__ import annotations

from functools import cache
from typing import Protocol, get_args

import torch
from torch import Tensor

from fastaug.errors import ConfigError
from fastaug.kernels.config import Average
from fastaug.toolchain.build import DTYPES, enum_codes

AVERAGES: tuple[Average, ...] = get_args(Average)


class Kernel(Protocol):
    """Computes the objective of every image and its gradient. Any object with these three will do.

    A kernel may also have
    - `averages`, the averages that it computes; default: all of them.
    - `mean_and_grad(logits, targets, average, kl_weight, label_smoothing) -> mean: [], nll, kl,
      grad of the mean`, which saves a third of the time of a small batch. Its logits may require a
      gradient; what it does must not be recorded.
    - `sources() -> Iterable[Path]`, all files that it is made from, if that is more than the file
      of its class. A kernel is admitted once for a device and the content of its sources; one that
      has instance attributes and no `sources`, once in each process.
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

        grad is the gradient of nll_b + kl_weight * kl_b for each image b. average=None computes
        only the regularizer: there are no targets, and nll is zero. Values are fp32 for fp32, fp16
        and bf16 logits; grad has the dtype of the logits.
        """


def why_unsupported(kernel: Kernel, logits: Tensor, average: Average | None) -> str | None:
    """None, or why a kernel cannot compute this average of these logits here."""
    if reason := kernel.supports(logits):
        return reason
    averages = getattr(kernel, "averages", AVERAGES)
    if average is None or average in averages:
        return None
    return f"computes --average {', '.join(averages)}, not {average}"


def takes_mean(kernel: Kernel, logits: Tensor) -> bool:
    """True if mean_and_grad is called. Not for fp16: its gradient, divided by the number of images,
    would lose to underflow what a loss scale is there to keep."""
    return hasattr(kernel, "mean_and_grad") and logits.dtype is not torch.float16


def wrong_target(image: int, target: int, classes: int) -> ConfigError:
    """The error of a kernel on a CPU; on a GPU, nll is NaN for such an image instead."""
    return ConfigError(f"targets must be 0 to {classes - 1}, got {target} for image {image}")


# --- for the kernels of fastaug that are compiled ---


def why_wrong_dtype(logits: Tensor) -> str | None:
    if logits.dtype in DTYPES:
        return None
    return f"takes fp32, fp16 and bf16 logits, not {logits.dtype}; use reference"


@cache
def average_code(average: Average | None) -> int:
    """The entry of `enum Average` in cuda/objective.h, by name."""
    return enum_codes("objective.h", "Average")[(average or "none").upper()]


def compiled_averages() -> tuple[Average, ...]:
    """Those that cuda/objective.h has."""
    codes = enum_codes("objective.h", "Average")
    return tuple(average for average in AVERAGES if average.upper() in codes)
