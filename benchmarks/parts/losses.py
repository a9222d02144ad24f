"""Contenders of benchmarks/kernels.py, and the check that each computes the paper's loss.

cross_entropy           torch's, on the same B*K rows: no KL
cross_entropy-views     the same from what a training loop has: logits [B, K, C], labels [B]
copy                    a copy of the logits into existing memory: the speed of moving them
native, reference, ...  fastaug's kernels that can run here, and any other kernel
linear                  plain torch with autograd: one log_softmax, the KL in O(K C)
compiled                torch.compile of linear
literal                 all K^2 pairs as one tensor [B, K, K, C], with autograd
literal-loop            the same, pair by pair
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fastaug
from fastaug.errors import ConfigError
from fastaug.kernels.config import Average
from fastaug.kernels.registry import load_kernel
from fastaug.runtime.device import check_compiler
from parts import timing
from parts.timing import UnfitError

FORWARD, BOTH, DIRECT, COPY = "forward", "forward+backward", "value_and_grad", "copy"
"""Quantities that are timed."""
LONGEST = 60.0
"""Maximum seconds of a literal form in a case; beyond, its row has the status "skipped"."""


class Case(NamedTuple):
    images: int
    views: int
    classes: int

    def __str__(self) -> str:
        return f"B={self.images} K={self.views} C={self.classes}"


@dataclass(frozen=True)
class Inputs:
    logits: Tensor
    """[B, K, C], a leaf that requires grad."""
    targets: Tensor
    """[B] int64."""
    average: Average

    @classmethod
    def draw(cls, case: Case, average: Average, dtype: torch.dtype, device: torch.device) -> Inputs:
        """Draw logits of views that agree about as much as those of a trained network."""
        rng = torch.Generator(device).manual_seed(0)
        images, views, classes = case
        common = torch.randn(images, 1, classes, generator=rng, device=device)
        own = torch.randn(images, views, classes, generator=rng, device=device)
        targets = torch.randint(classes, (images,), generator=rng, device=device)
        return cls((3 * common + own).to(dtype).requires_grad_(), targets, average)


@dataclass(frozen=True)
class Contender:
    leaf: Tensor
    """Tensor whose .grad forward+backward sets."""
    calls: dict[str, Callable[[], Tensor]]
    """Quantity -> the timed call, which returns the loss."""


Build = Callable[[Inputs], Contender]


def contenders(names: Sequence[str] = ()) -> dict[str, Build]:
    """The baselines, then these kernels and forms (default: all). UnfitError ones raise when built.

    cross_entropy comes first: ratios are relative to it.
    """
    return {
        "cross_entropy": cross_entropy,
        "cross_entropy-views": cross_entropy_of_views,
        "copy": copy,
        **{
            name: partial(form if name in FORMS else kernel, name)
            for name in names or (*fastaug.available_kernels(), *FORMS)
        },
    }


def cross_entropy(inputs: Inputs) -> Contender:
    rows = inputs.logits.detach().flatten(0, 1).requires_grad_()
    targets = inputs.targets.repeat_interleave(inputs.logits.shape[1])
    return _through_autograd(lambda z: F.cross_entropy(z, targets), rows)


def cross_entropy_of_views(inputs: Inputs) -> Contender:
    targets, views = inputs.targets, inputs.logits.shape[1]

    def loss(z: Tensor) -> Tensor:
        return F.cross_entropy(z.flatten(0, 1), targets.repeat_interleave(views))

    return _through_autograd(loss, inputs.logits)


def copy(inputs: Inputs) -> Contender:
    source, target = inputs.logits.detach(), torch.empty_like(inputs.logits, requires_grad=False)
    return Contender(source, {COPY: lambda: target.copy_(source)})


def kernel(name: str, inputs: Inputs) -> Contender:
    logits, targets, average = inputs.logits, inputs.targets, inputs.average
    found = load_kernel(name)
    if reason := found.supports(logits):
        raise UnfitError(f"unavailable: {reason}")

    def loss(z: Tensor) -> Tensor:
        return fastaug.objective(z, targets, average=average, kernel=name).loss

    direct = partial(
        found.value_and_grad,
        logits.detach(),
        targets,
        average=average,
        kl_weight=1.0,
        label_smoothing=0.0,
        need_grad=True,
    )
    contender = _through_autograd(loss, logits)
    contender.calls[DIRECT] = lambda: direct()[0]
    return contender


def form(name: str, inputs: Inputs) -> Contender:
    loss: Callable[..., Tensor] = partial(
        FORMS[name], targets=inputs.targets, average=inputs.average
    )
    if name == "compiled":
        try:
            check_compiler(inputs.logits.device)
        except ConfigError:
            raise UnfitError(
                "unavailable: torch.compile needs a C++ compiler (g++, clang++)"
            ) from None
        loss = _compiled(loss)
    return _through_autograd(loss, inputs.logits)


def _compiled(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    import torch._inductor.config

    torch._dynamo.reset()  # compile each shape separately; dynamo gives up after eight
    torch._inductor.config.compile_threads = 1  # no pool of processes during the measurement
    torch._logging.set_logs(all=logging.ERROR)
    return torch.compile(loss, dynamic=False)


def _through_autograd(loss: Callable[[Tensor], Tensor], leaf: Tensor) -> Contender:
    def forward() -> Tensor:
        with torch.no_grad():
            return loss(leaf)

    def both() -> Tensor:
        leaf.grad = None
        value = loss(leaf)
        value.backward()
        return value.detach()

    return Contender(leaf, {FORWARD: forward, BOTH: both})


# --- forms ---


def linear(logits: Tensor, targets: Tensor, average: Average) -> Tensor:
    # In half precision the KL would be noise: like the kernels, all forms compute in fp32.
    z = logits.float()
    lp = z.log_softmax(-1)
    p = lp.exp()
    terms = (p - p.mean(1, keepdim=True)) * (lp - lp.mean(1, keepdim=True))
    kl = terms.sum((1, 2)) / max(1, lp.shape[1] - 1)
    return _nll(z, lp, targets, average) + kl.mean()


def literal(logits: Tensor, targets: Tensor, average: Average) -> Tensor:
    z = logits.float()
    lp = z.log_softmax(-1)
    views = lp.shape[1]
    pairs = lp.exp()[:, :, None] * (lp[:, :, None] - lp[:, None])
    kl = pairs.sum((1, 2, 3)) / max(1, views * (views - 1))
    return _nll(z, lp, targets, average) + kl.mean()


def literal_loop(logits: Tensor, targets: Tensor, average: Average) -> Tensor:
    z = logits.float()
    lp = z.log_softmax(-1)
    views = [(view.exp(), view) for view in lp.unbind(1)]
    kl = lp.new_zeros(len(lp))
    for k, (p, log_p) in enumerate(views):
        for other, (_, log_r) in enumerate(views):
            if other != k:
                kl = kl + (p * (log_p - log_r)).sum(-1)
    kl = kl / max(1, len(views) * (len(views) - 1))
    return _nll(z, lp, targets, average) + kl.mean()


def _nll(z: Tensor, lp: Tensor, targets: Tensor, average: Average) -> Tensor:
    """The scalar loss, from the log-probabilities lp where the average allows it."""
    if average == "losses":
        return F.nll_loss(lp.flatten(0, 1), targets.repeat_interleave(lp.shape[1]))
    if average == "probs":
        return F.nll_loss(lp.logsumexp(1) - math.log(lp.shape[1]), targets)
    return F.cross_entropy(z.mean(1), targets)


FORMS: dict[str, Callable[..., Tensor]] = {
    "linear": linear,
    "compiled": linear,
    "literal": literal,
    "literal-loop": literal_loop,
}


# --- checks ---


def exact(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The loss and its gradient [B, K, C] in float64."""
    z = inputs.logits.detach().double().requires_grad_()
    flags: Any = {"average": inputs.average, "kernel": "reference"}
    loss = fastaug.objective(z, inputs.targets, **flags).loss
    (grad,) = torch.autograd.grad(loss, z)
    return loss.detach(), grad


def check_result(name: str, contender: Contender, right: tuple[Tensor, Tensor]) -> None:
    """Make the first call of each quantity; raise UnfitError if loss or gradient are wrong."""
    values = {quantity: call() for quantity, call in contender.calls.items()}
    if name in ("cross_entropy", "cross_entropy-views", COPY):
        return
    assert contender.leaf.grad is not None
    bound = 1e-4 if contender.leaf.dtype == torch.float32 else 2e-2
    found = values[BOTH], contender.leaf.grad
    for part, ours, theirs in zip(("loss", "gradient"), found, right, strict=True):
        error = float((ours.double() - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))
        if not error <= bound:
            raise UnfitError(f"wrong: {part} off by {error:.1e} of its largest value")


def check_size(build: Build, inputs: Inputs, rounds: int) -> None:
    """Raise UnfitError if a literal form would need too much memory or time."""
    images, views, classes = inputs.logits.shape
    some_classes = min(classes, max(1, 2_000_000 // views**2))
    some_images = min(images, max(1, 2_000_000 // (views**2 * some_classes)))
    factor = images * classes / (some_images * some_classes)
    logits = inputs.logits.detach()[:some_images, :, :some_classes].clone().requires_grad_()
    targets = inputs.targets[:some_images].clamp_max(some_classes - 1)
    call = build(Inputs(logits, targets, inputs.average)).calls[BOTH]
    call()
    device, logits.grad = logits.device, None
    needed, free = factor * timing.peak_memory(call, device), timing.free_memory(device)
    if needed > 0.8 * free:
        raise UnfitError(f"skipped: would need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    # forward takes about a third of forward+backward; warm-up calls are worth four rounds
    seconds = 1.3 * factor * timing.seconds_of(call, 1, device) * (rounds + 4)
    if seconds > LONGEST:
        raise UnfitError(f"skipped: would take about {seconds:.0f} s")
