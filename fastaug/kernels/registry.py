"""The registry of loss kernels, and the choice among them, which is logged."""

from __future__ import annotations

import importlib
import logging
from importlib.metadata import entry_points

import torch
from torch import Tensor

from fastaug.errors import KernelUnavailableError, suggest
from fastaug.kernels.admission import check_admission, compare, forget
from fastaug.kernels.config import Average
from fastaug.kernels.contract import Kernel, why_unsupported
from fastaug.kernels.cuda import CudaKernel
from fastaug.kernels.native import NativeKernel
from fastaug.kernels.reference import ReferenceKernel
from fastaug.kernels.triton import TritonKernel
from fastaug.toolchain.admission import AdmissionReport

log = logging.getLogger("fastaug")

ENTRY_POINTS = "fastaug.kernels"
"""The entry point group of kernels in other packages: name = package.module:attribute."""

_REFERENCE = ReferenceKernel()
# Fastest first: "auto" takes the first one that can run and is admitted.
_OWN: tuple[Kernel, ...] = (CudaKernel(), TritonKernel(), NativeKernel(), _REFERENCE)
_KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _OWN}
_found: dict[object, Kernel] = {}
_logged: set[str] = set()


def register_kernel(name: str, kernel: Kernel) -> None:
    """Register a kernel under a name, for `kernel=name` and `--kernel name`."""
    if name == "auto" or ":" in name:
        raise KernelUnavailableError(
            f"a kernel cannot be called {name!r}: 'auto' and ':' are reserved"
        )
    _check_contract(name, kernel)
    _KERNELS[name] = kernel
    _found.clear()


def available_kernels(logits: Tensor | None = None) -> dict[str, str | None]:
    """Each kernel with None, or why it cannot take these logits (default: fp32 on the CPU).

    Those of fastaug, the registered ones, and those of installed packages.
    """
    if logits is None:
        logits = torch.empty(1, 2, 2, dtype=torch.float32, device="cpu")
    return {name: _why_not(name, logits) for name in dict.fromkeys([*_KERNELS, *_offered()])}


def _why_not(name: str, logits: Tensor) -> str | None:
    try:
        return load_kernel(name).supports(logits)
    except KernelUnavailableError as error:
        return str(error)
    except Exception as error:  # someone else's kernel must not hide the others
        return f"{type(error).__name__}: {error}"


def check_kernel(kernel: str | Kernel, device: str | torch.device = "cpu") -> AdmissionReport:
    """Compare a kernel with the float64 reference, whether or not it was admitted before."""
    kernel = load_kernel(kernel) if isinstance(kernel, str) else kernel
    report = compare(kernel, torch.device(device))
    if not report.admitted:
        forget(kernel, torch.device(device))
        _found.clear()
    return report


def resolve_kernel(
    kernel: str | Kernel,
    *,
    views: int,
    classes: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    average: Average | None = None,
) -> Kernel:
    """The kernel to use for logits [B, views, classes]: it can run here, and is admitted.

    kernel: "auto", a name, package.module:attribute, or a kernel. average: what it must be able to
    average; None if it is only for the pairwise KL. The choice is logged.
    """
    logits = torch.empty(1, views, classes, dtype=dtype, device=device)
    return find_kernel(kernel, logits, average)


def find_kernel(kernel: str | Kernel, logits: Tensor, average: Average | None = None) -> Kernel:
    """resolve_kernel() for given logits. Cached, because every call of objective() comes here."""
    _, views, classes = logits.shape
    key = (kernel, logits.device, logits.dtype, views, classes, average)
    try:
        return _found[key]
    except (KeyError, TypeError):  # TypeError: a kernel that is not hashable
        is_auto = isinstance(kernel, str) and kernel == "auto"
        found = _automatic(logits, average) if is_auto else _named(kernel, logits, average)
        if getattr(kernel, "__hash__", None):
            _found[key] = found
        return found


def name_of(kernel: str | Kernel) -> str:
    """The name of a kernel for a compiled graph, which holds only names."""
    if isinstance(kernel, str):
        return kernel
    if _KERNELS.get(kernel.name) is not kernel:
        raise KernelUnavailableError(
            f"torch.compile knows kernels by name: register_kernel({kernel.name!r}, kernel) first"
        )
    return kernel.name


def _automatic(logits: Tensor, average: Average | None) -> Kernel:
    for kernel in _OWN:
        if why_unsupported(kernel, logits, average) is not None:
            continue
        report = _admission_of(kernel, logits.device)
        if report.admitted:
            _log_once(logging.INFO, f"loss kernel: {kernel.name}")
            return kernel
        _log_once(logging.WARNING, str(report))
    raise KernelUnavailableError(f"no loss kernel takes {logits.dtype} logits on {logits.device}")


def _log_once(level: int, text: str) -> None:
    """Logits of other shapes mostly lead to the same choice."""
    if text not in _logged:
        _logged.add(text)
        log.log(level, text)


def _named(kernel: str | Kernel, logits: Tensor, average: Average | None) -> Kernel:
    kernel = load_kernel(kernel) if isinstance(kernel, str) else kernel
    if reason := why_unsupported(kernel, logits, average):
        raise KernelUnavailableError(f"kernel {kernel.name!r} cannot run here: {reason}")
    report = _admission_of(kernel, logits.device)
    if not report.admitted:
        raise KernelUnavailableError(str(report))
    _log_once(logging.INFO, f"loss kernel: {kernel.name}")
    return kernel


def _admission_of(kernel: Kernel, device: torch.device) -> AdmissionReport:
    """The reference is always admitted: others are compared with it."""
    if type(kernel) is ReferenceKernel:
        return AdmissionReport(kernel.name, str(device), True, 0, "others are compared with it")
    return check_admission(kernel, device)


def load_kernel(name: str) -> Kernel:
    """A kernel by its name (built in, registered, or of an installed package), or by
    package.module:attribute."""
    if name in _KERNELS:
        return _KERNELS[name]
    if name == "auto":
        raise KernelUnavailableError(
            f"'auto' chooses among kernels; name one of {', '.join(_KERNELS)}"
        )
    offered = _offered()
    module_name, colon, attribute = offered.get(name, name).partition(":")
    if not colon:
        known = ["auto", *_KERNELS, *offered]
        raise KernelUnavailableError(
            f"no kernel {name!r}: {suggest(name, known)}, or package.module:attribute"
        )
    try:
        kernel = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # someone else's module may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise KernelUnavailableError(f"kernel {name!r} cannot be loaded: {reason}") from error
    _check_contract(name, kernel)
    return kernel


def _offered() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}


def _check_contract(name: str, kernel: object) -> None:
    missing = [part for part in ("name", "supports", "value_and_grad") if not hasattr(kernel, part)]
    if missing:
        raise KernelUnavailableError(
            f"kernel {name!r} has no {' and no '.join(missing)}; "
            "a kernel has name, supports and value_and_grad (fastaug/kernels/contract.py)"
        )
    if isinstance(kernel, type):
        raise KernelUnavailableError(f"kernel {name!r} is a class; name an instance of it")
