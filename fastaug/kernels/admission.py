"""The admission check of a loss kernel: a comparison with the float64 reference before its use.

It takes milliseconds for a fast kernel, and on a GPU also the start of a child process. The
tolerances leave room for fp32 arithmetic on the given logits; the shorter form of the KL,
sum p (z - mean z), is off by a thousand tolerances.
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
# How different the views are: a KL of about 1e-5 nats, of about 1, of tens.
_SPREADS = (3e-3, 1.0, 8.0)


@dataclass(frozen=True)
class _Case:
    logits: Tensor
    targets: Tensor | None
    settings: dict[str, Any]
    name: str


def compare(kernel: Kernel, device: torch.device) -> AdmissionReport:
    """Compare a kernel with the float64 reference, over shapes, dtypes, averages and gradients.

    Cases that the kernel does not support are skipped.
    """
    reasons = []

    def supported() -> Iterator[tuple[str, Callable[[], tuple[float, str]]]]:
        for case in _cases(device):
            if reason := why_unsupported(kernel, case.logits, case.settings["average"]):
                reasons.append(reason)
            else:
                yield case.name, partial(_error, kernel, case)

    with torch.inference_mode(False), torch.enable_grad():  # an evaluation may be the first use
        report = compare_cases(kernel.name, device, supported())
    if report.cases:
        return report
    return replace(report, worst=f"not supported: {reasons[-1]}", conclusive=False)


def check_admission(
    kernel: Kernel, device: torch.device, *, address: str | None = None, again: bool = False
) -> AdmissionReport:
    """compare(), or its cached report for this device and these sources unless `again`.

    A kernel that does not name its sources is compared once in each process. address: the
    module:attribute that has the kernel, from where a child process can import it.
    """
    key = (id(kernel), device)
    if key in _reports and not again:
        return _reports[key][1]
    _reports.pop(key, None)
    file, sent = _report_file(kernel, device), Imported(address) if address else kernel
    report = admission.check(compare, kernel, device, file=file, sent=sent, again=again)
    if file is None or not file.is_file():
        _reports[key] = kernel, report
    return report


_reports: dict[tuple[int, torch.device], tuple[Kernel, AdmissionReport]] = {}
"""Reports of this process that no file has, with the kernel, so that no other one gets its id."""


class Imported:
    """A kernel that is pickled as its address module:attribute, because it may not be picklable."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return import_kernel, (self.address,)


def _report_file(kernel: Kernel, device: torch.device) -> Path | None:
    """The file of the report; None for a kernel that does not name its sources: its base classes
    and helpers may be in other files, whose changes would go unnoticed."""
    if not hasattr(kernel, "sources"):
        return None
    try:
        files = [Path(file) for file in kernel.sources()]
        return report_file([*files, Path(__file__)], kernel.name, device)
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
        images, views, classes = _SHAPES[number % len(_SHAPES)]
        base = 3 * torch.randn(images, 1, classes, generator=generator)
        noise = torch.randn(images, views, classes, generator=generator)
        # A slice of a larger tensor, so that images and views have unusual strides.
        larger = torch.full((images + 1, views, classes + 3), math.nan, dtype=dtype)
        larger[:-1, :, :classes] = base + _SPREADS[number % len(_SPREADS)] * noise
        logits = larger.to(device)[:-1, :, :classes]
        targets = torch.randint(classes, (images,), generator=generator)
        targets[0] = classes - 1
        settings = {
            "average": average,
            "kl_weight": (1.0, 0.3, 1.0, 0.0)[number // 2 % 4],
            "label_smoothing": (0.1, 0.0)[number // 3 % 2],
            "need_grad": number % 5 != 4,
        }
        yield _Case(
            logits,
            None if average is None else targets.to(device),
            settings,
            f"{str(dtype).removeprefix('torch.')} {images}x{views}x{classes}, "
            + ", ".join(f"{key}={value}" for key, value in settings.items()),
        )
    empty = torch.empty(0, 2, 3, device=device)
    settings = {"average": None, "kl_weight": 1.0, "label_smoothing": 0.0, "need_grad": True}
    yield _Case(empty, None, settings, "no images")


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
