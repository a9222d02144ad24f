"""Which loss kernels there are, and which one a name means. Choices are said, never silent."""

from __future__ import annotations

import importlib
import logging
from importlib.metadata import entry_points

import torch
from torch import Tensor

from fastaug.errors import KernelUnavailableError, suggest
from fastaug.kernels.admission import KernelReport, check_admission, compare, forget
from fastaug.kernels.contract import Kernel
from fastaug.kernels.cuda import CudaKernel
from fastaug.kernels.native import NativeKernel
from fastaug.kernels.reference import ReferenceKernel
from fastaug.kernels.triton import TritonKernel

log = logging.getLogger("fastaug")

ENTRY_POINTS = "fastaug.kernels"
"""The group by which other distributions offer kernels: name = package.module:attribute."""

_REFERENCE = ReferenceKernel()
# Fastest first: "auto" takes the first of these that can run and is admitted.
_OWN: tuple[Kernel, ...] = (CudaKernel(), TritonKernel(), NativeKernel(), _REFERENCE)
_KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _OWN}
_found: dict[object, Kernel] = {}
_logged: set[str] = set()


def register_kernel(name: str, kernel: Kernel) -> None:
    """Make a kernel known under a name, for `kernel=name` and `--kernel name`."""
    if name == "auto" or ":" in name:
        raise KernelUnavailableError(
            f"a kernel cannot be called {name!r}: 'auto' and ':' are taken"
        )
    _check_contract(name, kernel)
    _KERNELS[name] = kernel
    _found.clear()


def available_kernels(logits: Tensor | None = None) -> dict[str, str | None]:
    """Each kernel with None, or why it cannot take these logits (default: fp32 on the CPU).

    Those of fastaug, the registered ones, and those that installed distributions offer.
    """
    if logits is None:
        logits = torch.empty(1, 2, 2, dtype=torch.float32, device="cpu")
    return {name: _why_not(name, logits) for name in dict.fromkeys([*_KERNELS, *_offered()])}


def _why_not(name: str, logits: Tensor) -> str | None:
    try:
        return load_kernel(name).supports(logits)
    except KernelUnavailableError as error:
        return str(error)
    except Exception as error:  # of a kernel of someone else, which must not hide the others
        return f"{type(error).__name__}: {error}"


def check_kernel(kernel: str | Kernel, device: str | torch.device = "cpu") -> KernelReport:
    """The admission check, anew: a kernel of your own against the float64 reference."""
    kernel = load_kernel(kernel) if isinstance(kernel, str) else kernel
    report = compare(kernel, torch.device(device))
    if not report.admitted:
        forget(kernel, torch.device(device))
        _found.clear()
    return report


def find_kernel(name: str | Kernel, logits: Tensor) -> Kernel:
    """The admitted kernel for these logits: "auto", a name, package.module:attribute, or itself."""
    # Each step comes by here: what was found for such logits is not looked for again.
    _, views, classes = logits.shape
    key = (name, logits.device, logits.dtype, views, classes)
    try:
        return _found[key]
    except (KeyError, TypeError):  # TypeError: a kernel that is no key
        kernel = _automatic(logits) if name == "auto" else _named(name, logits)
        if getattr(name, "__hash__", None):
            _found[key] = kernel
        return kernel


def name_of(kernel: str | Kernel) -> str:
    """For a compiled graph, which holds names alone."""
    if isinstance(kernel, str):
        return kernel
    if _KERNELS.get(kernel.name) is not kernel:
        raise KernelUnavailableError(
            f"torch.compile knows kernels by name: register_kernel({kernel.name!r}, kernel) first"
        )
    return kernel.name


def _automatic(logits: Tensor) -> Kernel:
    for kernel in _OWN:
        if kernel.supports(logits) is not None:
            continue
        report = _admission_of(kernel, logits.device)
        if report.admitted:
            _log_once(logging.INFO, f"loss kernel: {kernel.name}")
            return kernel
        _log_once(logging.WARNING, str(report))
    raise KernelUnavailableError(f"no loss kernel takes {logits.dtype} logits on {logits.device}")


def _log_once(level: int, text: str) -> None:
    """Other shapes of logits mostly lead to the same choice, which is logged once."""
    if text not in _logged:
        _logged.add(text)
        log.log(level, text)


def _named(name: str | Kernel, logits: Tensor) -> Kernel:
    kernel = load_kernel(name) if isinstance(name, str) else name
    if reason := kernel.supports(logits):
        raise KernelUnavailableError(f"kernel {kernel.name!r} cannot run here: {reason}")
    report = _admission_of(kernel, logits.device)
    if not report.admitted:
        raise KernelUnavailableError(f"{report}")
    return kernel


def _admission_of(kernel: Kernel, device: torch.device) -> KernelReport:
    """The reference is what others are compared with: it is admitted."""
    if type(kernel) is ReferenceKernel:
        return KernelReport(kernel.name, str(device), True, 0, "the others are compared with it")
    return check_admission(kernel, device)


def load_kernel(name: str) -> Kernel:
    """A kernel by its name, ours, registered or offered, or by package.module:attribute."""
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
    except Exception as error:  # the module is someone else's, and may raise anything
        said = f"{type(error).__name__}: {error}"
        raise KernelUnavailableError(f"kernel {name!r} cannot be loaded: {said}") from error
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
