"""The interface of a loss kernel."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Protocol, get_args

import torch
from torch import Tensor

from fastaug.errors import ConfigError, KernelUnavailableError
from fastaug.kernels.config import Average
from fastaug.runtime.plugins import accepts_call
from fastaug.toolchain.build import DTYPES, enum_codes

AVERAGES: tuple[Average, ...] = get_args(Average)


class Kernel(Protocol):
    """Computes the objective of every image and its gradient.

    Any object with `name`, `supports` and `value_and_grad` is a kernel. It may also have
    - `averages`: the averages that it computes; default: all of them.
    - `soft_targets`: True if it takes targets [B, C], see value_and_grad; default: False. Then
      "auto" uses it for them after a check of its own, and naming it for them is no error.
    - `mean_and_grad(logits, targets, average, kl_weight, label_smoothing) -> mean: [], nll, kl,
      grad of the mean`: saves a third of the time of a small batch. Its logits may require a
      gradient; autograd must not record what it does.
    - `sources() -> Iterable[Path]`: all files that the kernel is made from. A kernel with `sources`
      is checked once for each device and content of these files, others once in each process.
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

        With `soft_targets`, targets may be [B, C] in the dtype of the values, with any strides: the
        probability of each class. They are used as given, nll = -sum_c q_c log p_c with
        q = (1 - label_smoothing) * targets + label_smoothing / C; rows may have any sum. Where
        q_c = 0, a class at -inf contributes 0.
        """


_CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "supports": (("logits",), ()),
    "value_and_grad": (
        ("logits", "targets"),
        ("average", "kl_weight", "label_smoothing", "need_grad"),
    ),
}
"""Method of a kernel -> its positional and its keyword arguments."""


def check_contract(kernel: object, name: str = "") -> None:
    """Raise KernelUnavailableError unless this is a kernel. name: for the message."""
    kind = type(kernel).__name__
    name = name or str(getattr(kernel, "name", "")) or kind
    contract = "a kernel has name, supports and value_and_grad (fastaug/kernels/contract.py)"
    if isinstance(kernel, type):
        raise KernelUnavailableError(
            f"kernel {name!r} is the class {kernel.__name__}; give an instance, such as "
            f"{kernel.__name__}()"
        )
    missing = [] if isinstance(getattr(kernel, "name", None), str) else ["name"]
    missing += [method for method in _CALLS if not callable(getattr(kernel, method, None))]
    if missing:
        raise KernelUnavailableError(
            f"kernel {name!r} of type {kind} has no {' and no '.join(missing)}; {contract}"
        )
    for method, (positional, keywords) in _CALLS.items():
        if not accepts_call(getattr(kernel, method), positional, keywords):
            arguments = ", ".join((*positional, *(("*", *keywords) if keywords else ())))
            raise KernelUnavailableError(
                f"kernel {name!r}: cannot call {method}({arguments}); {contract}"
            )


def import_kernel(address: str, name: str = "") -> Kernel:
    """The kernel at package.module:attribute. name: for messages; default: the address."""
    module, _, attribute = address.partition(":")
    name = name or address
    try:
        kernel = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # someone else's module may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise KernelUnavailableError(f"kernel {name!r} cannot be loaded: {reason}") from error
    check_contract(kernel, name)
    return kernel


def check_logits(logits: Tensor) -> None:
    """Raise ConfigError unless these are logits [B, K, C]; B may be 0."""
    if not isinstance(logits, Tensor):
        raise ConfigError(f"logits must be a tensor [B, K, C], got {type(logits).__name__}")
    if logits.ndim != 3 or not logits.shape[1] or not logits.shape[2]:
        raise ConfigError(
            f"logits must be [images, views, classes], got shape {list(logits.shape)}; "
            "from a flat batch: logits.unflatten(0, (-1, views))"
        )


def is_soft(targets: Tensor | None) -> bool:
    """True for targets [B, C]."""
    return targets is not None and targets.is_floating_point()


def why_unsupported(
    kernel: Kernel, logits: Tensor, average: Average | None, soft: bool = False
) -> str | None:
    """None, or why a kernel cannot compute this average of these logits here, for soft targets if
    `soft`."""
    if reason := kernel.supports(logits):
        return reason
    if soft and not getattr(kernel, "soft_targets", False):
        return (
            "takes int64 targets [B], not soft targets [B, C] (it has no soft_targets = True); use "
            "auto"
        )
    averages = getattr(kernel, "averages", AVERAGES)
    if average is None or average in averages:
        return None
    return f"computes --average {', '.join(averages)}, not {average}"


def takes_mean(kernel: Kernel, logits: Tensor) -> bool:
    """True if mean_and_grad is called. Not for fp16: a gradient divided by the number of images
    would underflow, which the loss scale is there to prevent."""
    return hasattr(kernel, "mean_and_grad") and logits.dtype is not torch.float16


def wrong_target(image: int, target: int, classes: int) -> ConfigError:
    """The error of a kernel on a CPU; on a GPU, nll is NaN for such an image instead."""
    return ConfigError(f"targets must be 0 to {classes - 1}, got {target} for image {image}")


# --- for fastaug's compiled kernels ---


def why_wrong_dtype(logits: Tensor) -> str | None:
    if logits.dtype in DTYPES:
        return None
    return f"takes fp32, fp16 and bf16 logits, not {logits.dtype}; use reference"


@cache
def average_code(average: Average | None) -> int:
    """The entry of `enum Average` in cuda/objective.h, by name."""
    return enum_codes("objective.h", "Average")[(average or "none").upper()]


def compiled_averages() -> tuple[Average, ...]:
    """The averages that cuda/objective.h has."""
    codes = enum_codes("objective.h", "Average")
    return tuple(average for average in AVERAGES if average.upper() in codes)
