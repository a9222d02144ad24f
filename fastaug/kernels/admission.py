"""The admission check: a kernel against the float64 reference, before it may be used on a device.

Milliseconds for a kernel that is quick; passed once for a device and a content of its sources, it
is not run again. Tolerances are what fp32 arithmetic on the given logits reaches with room to
spare; the shorter form of the KL, sum p (z - mean z), is off by a thousand of them.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from fastaug.errors import DataError, describe_error
from fastaug.kernels.contract import Average, Kernel, takes_mean
from fastaug.kernels.reference import ReferenceKernel
from fastaug.runtime.atomic import atomic_write
from fastaug.runtime.cache import cache_dir
from fastaug.toolchain.build import digest

# Of values: relative, and in nats. Of gradients: relative to the largest of the image, which for
# half precision is the rounding of the gradient itself.
_VALUE_TOLERANCE, _VALUE_FLOOR = 1e-4, 1e-9
_GRAD_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# images, views, classes: one of each, odd ones, and those of the paper
_SHAPES = ((3, 1, 1), (2, 2, 2), (2, 3, 7), (3, 4, 33), (2, 16, 100), (2, 8, 1000), (1, 5, 3001))
_CASES = 4 * len(_SHAPES)
# how far views are apart: a KL of about 1e-5 nats, of about 1, of tens
_SPREADS = (3e-3, 1.0, 8.0)


@dataclass(frozen=True)
class KernelReport:
    """What the admission check found."""

    kernel: str
    device: str
    admitted: bool
    cases: int
    """Cases that were compared; those that the kernel does not support are left out."""
    worst: str
    """The case with the largest error, or the first one that could not be compared."""

    def __str__(self) -> str:
        verdict = "admitted" if self.admitted else "refused"
        return (
            f"kernel {self.kernel!r} on {self.device}: {verdict}, {self.cases} cases; {self.worst}"
        )


@dataclass(frozen=True)
class _Case:
    logits: Tensor
    targets: Tensor | None
    settings: dict[str, Any]
    name: str


def compare(kernel: Kernel, device: torch.device) -> KernelReport:
    """A kernel and the float64 reference, over shapes, dtypes, averages and gradients."""
    where = device_name(device)
    worst, worst_name, cases = 0.0, "no case", 0
    for case in _cases(device):
        if reason := kernel.supports(case.logits):
            worst_name = f"not supported: {reason}" if cases == 0 else worst_name
            continue
        cases += 1
        try:
            error, what = _error(kernel, case)
        except Exception as raised:  # whatever a kernel of someone else raises is its failure
            said = f"{case.name}: {describe_error(raised)}"
            return KernelReport(kernel.name, where, False, cases, said)
        if not error <= worst:  # NaN is the worst
            worst, worst_name = error, f"{what} off by {error:.2g} x the tolerance, {case.name}"
            if math.isnan(error):
                break
    return KernelReport(kernel.name, where, cases > 0 and worst <= 1, cases, worst_name)


def check_admission(kernel: Kernel, device: torch.device) -> KernelReport:
    """compare(), or what it found before for this device and these sources."""
    return cached_report(kernel, device, compare, _remembered(kernel, device))


def cached_report(
    kernel: Any,
    device: torch.device,
    compare: Callable[[Any, torch.device], KernelReport],
    file: Path | None,
) -> KernelReport:
    """The report in a file; or what compare finds, which is kept there if it is an admission."""
    if file is not None and file.is_file():
        with suppress(OSError, ValueError, TypeError):
            return KernelReport(**json.loads(file.read_text()))
    report = compare(kernel, device)
    if file is not None and report.admitted:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as unfinished:
                unfinished.write_text(json.dumps(asdict(report)))
    return report


def forget(kernel: Kernel, device: torch.device) -> None:
    """What was admitted before is not any more."""
    if file := _remembered(kernel, device):
        with suppress(OSError):
            file.unlink(missing_ok=True)


def _remembered(kernel: Kernel, device: torch.device) -> Path | None:
    """Where the report is kept; None where its source does not say all about a kernel."""
    try:
        if hasattr(kernel, "sources"):
            files = [Path(file) for file in kernel.sources()]
        elif getattr(kernel, "__dict__", None):  # two of a class may differ by what they hold
            return None
        else:
            files = [Path(inspect.getfile(type(kernel)))]
        return report_file([*files, Path(__file__)], kernel.name, device)
    except (OSError, TypeError, DataError):
        return None


def report_file(files: Iterable[Path], name: str, device: torch.device) -> Path:
    """Where the report on what these files make is kept."""
    content = digest(files, name, device_name(device), torch.__version__)
    return cache_dir() / "kernels" / f"admitted-{content}.json"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _cases(device: torch.device) -> Iterator[_Case]:
    """Each dtype with each average, shape and spread; not all of all, because Triton compiles a
    program for each, which takes half a second."""
    averages: tuple[Average | None, ...] = (*get_args(Average), None)
    generator = torch.Generator().manual_seed(0)
    for number in range(_CASES):
        dtype = (torch.float32, torch.float16, torch.float32, torch.bfloat16)[number % 4]
        average = averages[(number // 4 + number) % 4]
        images, views, classes = _SHAPES[number % len(_SHAPES)]
        base = 3 * torch.randn(images, 1, classes, generator=generator)
        noise = torch.randn(images, views, classes, generator=generator)
        # A slice of a larger tensor: the strides of images and views are anything.
        room = torch.full((images + 1, views, classes + 3), math.nan, dtype=dtype)
        room[:-1, :, :classes] = base + _SPREADS[number % len(_SPREADS)] * noise
        logits = room.to(device)[:-1, :, :classes]
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
    yield _Case(empty, None, settings, "no images at all")


def _error(kernel: Kernel, case: _Case) -> tuple[float, str]:
    """The largest error, in units of its tolerance, and of what."""
    before = case.logits.clone()
    worst, worst_what = 0.0, "nothing"
    for what, found, expected in _results(kernel, case):
        _check_form(what, found, expected, case.logits)
        if found is None or expected is None or not found.numel():
            continue
        off = (found.double() - expected).abs()
        # Of a single class all is 0, and a rounding of p = 1 is no error.
        single = case.logits.shape[2] == 1
        if found.ndim == 3:
            largest = expected.abs().amax((1, 2), keepdim=True).clamp_min(1 if single else 1e-30)
            off /= largest * _GRAD_TOLERANCE[case.logits.dtype]
        else:
            off /= expected.abs() * _VALUE_TOLERANCE + (1e-6 if single else _VALUE_FLOOR)
        error = off.max().item()
        if math.isnan(error):  # nothing is worse, and nothing compares with it
            return error, what
        if error > worst:
            worst, worst_what = error, what
    if not torch.equal(case.logits, before):
        raise ValueError("the logits were changed")
    return worst, worst_what


def _results(kernel: Any, case: _Case) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """What the kernel found, what the reference finds in float64."""
    exact = ReferenceKernel().value_and_grad(case.logits.double(), case.targets, **case.settings)
    logits = case.logits
    if not case.settings["need_grad"]:
        with torch.inference_mode():  # that evaluation has its logits from
            logits = logits.clone()
    found = kernel.value_and_grad(logits, case.targets, **case.settings)
    yield from zip(("nll", "kl", "the gradient"), found, exact, strict=True)
    nll, kl, grad = exact
    if takes_mean(kernel, case.logits) and grad is not None and len(nll):
        settings = [case.settings[name] for name in ("average", "kl_weight", "label_smoothing")]
        mean = (nll + case.settings["kl_weight"] * kl).mean()
        names = ("the mean", "nll beside it", "kl beside it", "its gradient")
        logits = case.logits.detach().requires_grad_()  # as training has them
        found = kernel.mean_and_grad(logits, case.targets, *settings)
        yield from zip(names, found, (mean, nll, kl, grad / len(nll)), strict=True)


def _check_form(what: str, found: Tensor | None, expected: Tensor | None, logits: Tensor) -> None:
    if found is None or expected is None:
        if found is not expected:
            raise ValueError(f"{what} is {'missing' if found is None else 'there, unasked for'}")
        return
    if found.requires_grad:
        raise ValueError(f"{what} has been recorded: work on logits.detach()")
    dtype = logits.dtype if expected.ndim == 3 else torch.float32
    if found.shape != expected.shape or found.dtype != dtype or found.device != logits.device:
        raise ValueError(
            f"{what} must be {dtype} of shape {list(expected.shape)} on {logits.device}, "
            f"got {found.dtype} of shape {list(found.shape)} on {found.device}"
        )
