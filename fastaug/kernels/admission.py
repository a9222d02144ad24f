"""The admission check of a loss kernel: a comparison with the float64 reference before its use.

It takes milliseconds for a fast kernel, and on a GPU also the start of a child process. The
tolerances leave room for fp32 arithmetic on the given logits; the shorter form of the KL,
sum p (z - mean z), is off by a thousand tolerances.

Soft targets have a check and a report of their own, on their first use: others do not wait for the
programs that only soft targets need, nor are they refused for an error in these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from fastaug.errors import DataError
from fastaug.kernels.config import Average
from fastaug.kernels.contract import Kernel, import_kernel, takes_mean, why_unsupported
from fastaug.kernels.reference import ReferenceKernel
from fastaug.toolchain import admission
from fastaug.toolchain.admission import AdmissionReport, compare_cases, report_file

# Values: relative, and in nats. Gradients: relative to the image's largest; for half precision, the
# tolerance is the rounding of the gradient itself.
_VALUE_TOLERANCE, _VALUE_FLOOR = 1e-4, 1e-9
_GRAD_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Images, views, classes: one of each, odd ones, and those of the paper.
_SHAPES = ((3, 1, 1), (2, 2, 2), (2, 3, 7), (3, 4, 33), (2, 16, 100), (2, 8, 1000), (1, 5, 3001))
_CASES = 4 * len(_SHAPES)
# Random numbers in [0, 1) -> targets [B, C].
_SOFT_TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "a teacher": lambda random: (8 * random).softmax(-1),
    "any sum": lambda random: 2 * random,
    "one class": lambda random: (random == random.amax(-1, keepdim=True)).float(),
    "any sum, with zeros": lambda random: random * (random > 0.5),
    "zeros": torch.zeros_like,
}
_SOFT_CASES = 4 * len(_SOFT_TARGETS)
_PLAIN = {"kl_weight": 1.0, "label_smoothing": 0.0, "need_grad": True}
# How different the views are: a KL of about 1e-5 nats, of about 1, of tens.
_SPREADS = (3e-3, 1.0, 8.0)


@dataclass(frozen=True)
class _Case:
    logits: Tensor
    targets: Tensor | None
    settings: dict[str, Any]
    name: str


def compare(kernel: Kernel, device: torch.device, soft: bool = False) -> AdmissionReport:
    """Compare a kernel with the float64 reference, over shapes, dtypes, averages and gradients.

    Cases that the kernel does not support are skipped. soft: with soft targets.
    """
    reasons = []

    def supported() -> Iterator[tuple[str, Callable[[], tuple[float, str]]]]:
        for case in _soft_cases(device) if soft else _cases(device):
            if reason := why_unsupported(kernel, case.logits, case.settings["average"], soft):
                reasons.append(reason)
            else:
                yield case.name, partial(_error, kernel, case)

    with torch.inference_mode(False), torch.enable_grad():  # an evaluation may be the first use
        report = compare_cases(kernel.name, device, supported())
    if report.cases:
        return report
    return replace(report, worst=f"not supported: {reasons[-1]}", conclusive=False)


def check_admission(
    kernel: Kernel,
    device: torch.device,
    *,
    soft: bool = False,
    address: str | None = None,
    again: bool = False,
) -> AdmissionReport:
    """compare(), or its cached report for this device and these sources unless `again`.

    A kernel that does not name its sources is compared once in each process. address: the
    module:attribute that has the kernel, from where a child process can import it.
    """
    key = (id(kernel), device, soft)
    if key in _reports and not again:
        return _reports[key][1]
    _reports.pop(key, None)
    file, sent = _report_file(kernel, device, soft), Imported(address) if address else kernel
    comparison = partial(compare, soft=True) if soft else compare
    report = admission.check(comparison, kernel, device, file=file, sent=sent, again=again)
    if file is None or not file.is_file():
        _reports[key] = kernel, report
    return report


_reports: dict[tuple[int, torch.device, bool], tuple[Kernel, AdmissionReport]] = {}
"""Reports of this process that no file has, with the kernel, so that no other one gets its id."""


class Imported:
    """A kernel that is pickled as its address module:attribute, because it may not be picklable."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return import_kernel, (self.address,)


def _report_file(kernel: Kernel, device: torch.device, soft: bool) -> Path | None:
    """The file of the report; None for a kernel that does not name its sources: its base classes
    and helpers may be in other files, whose changes would go unnoticed."""
    if not hasattr(kernel, "sources"):
        return None
    try:
        files = [Path(file) for file in kernel.sources()]
        name = f"{kernel.name}, soft targets" if soft else kernel.name
        return report_file([*files, Path(__file__)], name, device)
    except (OSError, TypeError, DataError):
        return None


def _cases(device: torch.device) -> Iterator[_Case]:
    """Each dtype with each average, shape and spread; not every combination, because Triton
    compiles a program for each, which takes half a second."""
    averages: tuple[Average | None, ...] = (*get_args(Average), None)
    generator = torch.Generator().manual_seed(0)
    for number in range(_CASES):
        dtype = (torch.float32, torch.float16, torch.float32, torch.bfloat16)[number % 4]
        average = averages[(number // 4 + number) % len(averages)]
        images, _, classes = shape = _SHAPES[number % len(_SHAPES)]
        logits = _logits(shape, _SPREADS[number % len(_SPREADS)], dtype, generator)
        targets = torch.randint(classes, (images,), generator=generator)
        targets[0] = classes - 1
        settings = _settings(number, average)
        yield _Case(
            logits.to(device),
            None if average is None else targets.to(device),
            settings,
            _name(logits, settings),
        )
    empty = torch.empty(0, 2, 3, device=device)
    yield _Case(empty, None, {"average": None, **_PLAIN}, "no images")


def _soft_cases(device: torch.device) -> Iterator[_Case]:
    """Each kind of soft targets with each average and dtype, over all shapes; then logits so far
    apart that probabilities underflow, with a class that no view and no target has."""
    averages = get_args(Average)
    generator = torch.Generator().manual_seed(1)
    for number in range(_SOFT_CASES):
        dtype = (torch.float32, torch.float16, torch.float32, torch.bfloat16)[number % 4]
        logits = _logits(
            _SHAPES[number % len(_SHAPES)], _SPREADS[number % len(_SPREADS)], dtype, generator
        )
        kind = tuple(_SOFT_TARGETS)[number % len(_SOFT_TARGETS)]
        targets = _soft_targets(kind, logits, generator)
        settings = _settings(number, averages[number // 2 % len(averages)])
        settings["need_grad"] = number % 8 != 3
        name = f"targets: {kind}; {_name(logits, settings)}"
        yield _Case(logits.to(device), targets.to(device), settings, name)
    for average in averages:
        logits = _logits((3, 4, 33), 60.0, torch.float32, generator)
        targets = _soft_targets("a teacher", logits, generator)
        logits[:, :, 5], targets[:, 5] = -math.inf, 0
        settings = {"average": average, **_PLAIN}
        name = f"targets: a class at -inf; {_name(logits, settings)}"
        yield _Case(logits.to(device), targets.to(device), settings, name)
    empty, no_targets = torch.empty(0, 2, 3, device=device), torch.empty(0, 3, device=device)
    yield _Case(empty, no_targets, {"average": "losses", **_PLAIN}, "no images, soft targets")


def _logits(
    shape: tuple[int, int, int], spread: float, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """A slice of a larger tensor, so that images and views have unusual strides."""
    images, views, classes = shape
    base = 3 * torch.randn(images, 1, classes, generator=generator)
    noise = torch.randn(images, views, classes, generator=generator)
    larger = torch.full((images + 1, views, classes + 3), math.nan, dtype=dtype)
    larger[:-1, :, :classes] = base + spread * noise
    return larger[:-1, :, :classes]


def _soft_targets(kind: str, logits: Tensor, generator: torch.Generator) -> Tensor:
    """[B, C], a slice of a larger tensor."""
    images, _, classes = logits.shape
    larger = torch.full((images, classes + 3), math.nan)
    larger[:, :classes] = _SOFT_TARGETS[kind](torch.rand(images, classes, generator=generator))
    return larger[:, :classes]


def _settings(number: int, average: Average | None) -> dict[str, Any]:
    return {
        "average": average,
        "kl_weight": (1.0, 0.3, 1.0, 0.0)[number // 2 % 4],
        "label_smoothing": (0.1, 0.0)[number // 3 % 2],
        "need_grad": number % 5 != 4,
    }


def _name(logits: Tensor, settings: dict[str, Any]) -> str:
    shape = "x".join(map(str, logits.shape))
    values = ", ".join(f"{key}={value}" for key, value in settings.items())
    return f"{str(logits.dtype).removeprefix('torch.')} {shape}, {values}"


def _error(kernel: Kernel, case: _Case) -> tuple[float, str]:
    """The largest error in units of its tolerance, and the result that has it."""
    before = case.logits.clone()
    worst, worst_what = 0.0, "nothing"
    for what, found, expected in _results(kernel, case):
        _check_form(what, found, expected, case.logits)
        if found is None or expected is None or not found.numel():
            continue
        off = (found.double() - expected).abs()
        # With a single class everything is 0, and the rounding of p = 1 is not an error.
        single = case.logits.shape[2] == 1
        if found.ndim == 3:
            largest = expected.abs().amax((1, 2), keepdim=True).clamp_min(1 if single else 1e-30)
            off /= largest * _GRAD_TOLERANCE[case.logits.dtype]
        else:
            off /= expected.abs() * _VALUE_TOLERANCE + (1e-6 if single else _VALUE_FLOOR)
        error = off.max().item()
        if math.isnan(error):  # no comparison holds for it
            return error, what
        if error > worst:
            worst, worst_what = error, what
    if not torch.equal(case.logits, before):
        raise ValueError("it modified the logits")
    return worst, worst_what


def _results(kernel: Any, case: _Case) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Name, value of the kernel and value of the float64 reference, for each result."""
    exact = ReferenceKernel().value_and_grad(case.logits.double(), case.targets, **case.settings)
    logits = case.logits
    if not case.settings["need_grad"]:
        with torch.inference_mode():  # as in an evaluation
            logits = logits.clone()
    found = kernel.value_and_grad(logits, case.targets, **case.settings)
    yield from zip(("nll", "kl", "the gradient"), found, exact, strict=True)
    nll, kl, grad = exact
    if takes_mean(kernel, case.logits) and grad is not None and len(nll):
        settings = [case.settings[name] for name in ("average", "kl_weight", "label_smoothing")]
        mean = (nll + case.settings["kl_weight"] * kl).mean()
        names = [f"{part} of mean_and_grad" for part in ("mean", "nll", "kl", "gradient")]
        logits = case.logits.detach().requires_grad_()  # as in training
        found = kernel.mean_and_grad(logits, case.targets, *settings)
        yield from zip(names, found, (mean, nll, kl, grad / len(nll)), strict=True)


def _check_form(what: str, found: Tensor | None, expected: Tensor | None, logits: Tensor) -> None:
    if found is None or expected is None:
        if found is not expected:
            reason = "is missing" if found is None else "was returned with need_grad=False"
            raise ValueError(f"{what} {reason}")
        return
    if found.requires_grad:
        raise ValueError(f"{what} requires grad: compute it from logits.detach()")
    dtype = logits.dtype if expected.ndim == 3 else torch.float32
    if found.shape != expected.shape or found.dtype != dtype or found.device != logits.device:
        raise ValueError(
            f"{what} must be {dtype} of shape {list(expected.shape)} on {logits.device}, "
            f"got {found.dtype} of shape {list(found.shape)} on {found.device}"
        )
