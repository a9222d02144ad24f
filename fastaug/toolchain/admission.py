"""Admission: a compiled kernel is compared with its reference before it may be used on a device.

Shared by the loss kernels and the view engines, which bring their own cases. An admission is cached
for a device and the content of the sources; a refusal is not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fastaug.errors import describe_error
from fastaug.runtime.atomic import atomic_write
from fastaug.runtime.cache import cache_dir
from fastaug.toolchain.build import digest


@dataclass(frozen=True)
class AdmissionReport:
    """Result of an admission check."""

    kernel: str
    device: str
    admitted: bool
    cases: int
    """Number of compared cases, without those that the kernel does not support."""
    worst: str
    """The case with the largest error, or the first one that raised an error."""

    def __str__(self) -> str:
        verdict = "admitted" if self.admitted else "refused"
        return (
            f"kernel {self.kernel!r} on {self.device}: {verdict}, {self.cases} cases; {self.worst}"
        )


def compare_cases(
    name: str, device: torch.device, cases: Iterable[tuple[str, Callable[[], tuple[float, str]]]]
) -> AdmissionReport:
    """cases: names, each with a function that returns the largest error in units of its tolerance
    and the result that has it. Admitted if there is a case, no error is above 1 and none raises."""
    worst, worst_case, count = 0.0, "no differences", 0
    for case, measure in cases:
        count += 1
        try:
            error, what = measure()
        except Exception as raised:  # a driver or a user's kernel may raise anything
            worst_case = f"{case}: {describe_error(raised)}"
            return AdmissionReport(name, device_name(device), False, count, worst_case)
        if not error <= worst:  # NaN is the worst
            worst, worst_case = error, f"{what} off by {error:.2g} x the tolerance, {case}"
            if math.isnan(error):
                break
    return AdmissionReport(name, device_name(device), count > 0 and worst <= 1, count, worst_case)


def cached_report(file: Path | None, check: Callable[[], AdmissionReport]) -> AdmissionReport:
    """The report in a file; otherwise that of the check, which is stored there if it admits."""
    if file is not None and file.is_file():
        with suppress(OSError, ValueError, TypeError):
            return AdmissionReport(**json.loads(file.read_text()))
    report = check()
    if file is not None and report.admitted:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as unfinished:
                unfinished.write_text(json.dumps(asdict(report)))
    return report


def report_file(files: Iterable[Path], name: str, device: torch.device) -> Path:
    """The cache file of the report on a kernel that is made from these files."""
    content = digest(files, name, device_name(device), torch.__version__)
    return cache_dir() / "kernels" / f"admitted-{content}.json"


def device_name(device: torch.device) -> str:
    """The model of a GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
