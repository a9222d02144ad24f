"""Admission: a compiled kernel is compared with its reference before it may be used on a device.

Shared by the loss kernels and the view engines, which bring their own cases. A report, admission or
refusal, is cached for a device, its driver, torch's version and the content of the sources.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastaug.errors import describe_error
from fastaug.runtime.cache import cache_dir, cache_write, optional_write
from fastaug.toolchain.build import digest
from fastaug.toolchain.child import ChildFailedError, NoChildError, compare_in_child

log = logging.getLogger("fastaug")


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
    conclusive: bool = True
    """False for a check that could not be finished, for example without memory: not cached."""
    cached: bool = False
    """True for the report of an earlier check."""

    def __str__(self) -> str:
        verdict = "admitted" if self.admitted else "refused"
        text = (
            f"kernel {self.kernel!r} on {self.device}: {verdict}, {self.cases} cases; {self.worst}"
        )
        if self.cached and not self.admitted:
            text += " (in an earlier check; python -m fastaug.doctor repeats it)"
        return text


def compare_cases(
    name: str, device: torch.device, cases: Iterable[tuple[str, Callable[[], tuple[float, str]]]]
) -> AdmissionReport:
    """cases: names, each with a function that returns the largest error in units of its tolerance
    and the result that has it. Admitted if there is a case, no error is above 1 and none raises."""
    worst, worst_case, count = 0.0, "no differences", 0
    model = device_name(device)  # a GPU cannot be asked after a fault
    for case, measure in cases:
        count += 1
        try:
            error, what = measure()
        except Exception as raised:  # a driver or a user's kernel may raise anything
            worst_case = f"{case}: {describe_error(raised)}"
            conclusive = not isinstance(raised, MemoryError | torch.OutOfMemoryError)
            return AdmissionReport(name, model, False, count, worst_case, conclusive)
        if not error <= worst:  # NaN is the worst
            worst, worst_case = error, f"{what} off by {error:.2g} x the tolerance, {case}"
            if math.isnan(error):
                break
    return AdmissionReport(name, model, count > 0 and worst <= 1, count, worst_case)


Compare = Callable[[Any, torch.device], AdmissionReport]


def check(
    compare: Compare,
    kernel: Any,
    device: torch.device,
    *,
    file: Path | None,
    sent: Any = None,
    again: bool = False,
) -> AdmissionReport:
    """The report in the file, if there is one and `again` is False; otherwise that of
    compare(kernel, device), which is stored in the file.

    A time limit is stored, too: a restarted run should not wait for it again. sent: what is pickled
    for a child process in the place of the kernel.
    """
    if file is not None and not again and file.is_file():
        with suppress(OSError, ValueError, TypeError):
            return replace(AdmissionReport(**json.loads(file.read_text())), cached=True)
    report = _compared(compare, kernel, device, kernel if sent is None else sent)
    if file is not None:
        with optional_write():
            _store(report, file)
    return report


def _store(report: AdmissionReport, file: Path) -> None:
    if not report.conclusive:
        file.unlink(missing_ok=True)
        return
    with cache_write(file) as unfinished:
        unfinished.write_text(json.dumps(asdict(report)))


def _compared(compare: Compare, kernel: Any, device: torch.device, sent: Any) -> AdmissionReport:
    """compare(kernel, device), for a GPU in a child process.

    On a CPU in this process: an error there leaves nothing behind, and the 3 s in which a child
    imports torch would be a hundred times the comparison.
    """
    if device.type != "cuda":
        return compare(kernel, device)
    name = kernel.name
    log.info("comparing kernel %r with its reference on %s in a child process", name, device)
    try:
        return AdmissionReport(**compare_in_child(compare, sent, device))
    except ChildFailedError as error:
        return AdmissionReport(name, device_name(device), False, 0, str(error), error.conclusive)
    except NoChildError as error:
        log.warning(
            "kernel %r on %s is compared in this process, which cannot use the GPU any more if the "
            "kernel faults: no child process (%s)",
            *(name, device, error),
        )
        return compare(kernel, device)


def report_file(files: Iterable[Path], name: str, device: torch.device) -> Path:
    """The cache file of the report on a kernel that is made from these files."""
    content = digest(files, name, device_name(device), driver_version(device), torch.__version__)
    return cache_dir() / "kernels" / f"admission-{content}.json"


def device_name(device: torch.device) -> str:
    """The model of a GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def driver_version(device: torch.device) -> str:
    """The newest CUDA version that NVIDIA's driver knows, and what its kernel module says about
    itself; empty for a CPU."""
    if device.type != "cuda":
        return ""
    version = ctypes.c_int()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    file = Path("/proc/driver/nvidia/version")
    return f"{version.value} {file.read_text() if file.is_file() else ''}"  # not in WSL
