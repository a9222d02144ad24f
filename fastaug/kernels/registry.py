"""The registry of loss kernels, and the choice among them, which is logged."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.metadata import entry_points

import torch
from torch import Tensor

from fastaug.errors import KernelUnavailableError, suggest
from fastaug.kernels.admission import check_admission
from fastaug.kernels.config import Average
from fastaug.kernels.contract import (
    Kernel,
    check_contract,
    check_logits,
    import_kernel,
    why_unsupported,
)
from fastaug.kernels.cuda import CudaKernel
from fastaug.kernels.native import NativeKernel
from fastaug.kernels.reference import ReferenceKernel
from fastaug.kernels.triton import TritonKernel
from fastaug.runtime.device import available_device
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
    if not isinstance(name, str) or not name or name == "auto" or ":" in name:
        raise KernelUnavailableError(
            f"a kernel cannot have the name {name!r}: give a string other than 'auto' and "
            "without ':', as register_kernel(name, kernel)"
        )
    check_contract(kernel, name)
    _KERNELS[name] = kernel
    _found.clear()


def available_kernels(
    logits: Tensor | str | torch.device = "cpu",
) -> dict[str, str | None]:
    """Name of each kernel -> None if it is available, or why not.

    Lists fastaug's kernels, registered ones, and those of installed packages. logits: the tensor
    [B, K, C] that a kernel must take; or a device, for fp32 logits on it.
    """
    if not isinstance(logits, Tensor):
        device = available_device(logits)
        logits = torch.empty(1, 2, 2, dtype=torch.float32, device=device)
    check_logits(logits)
    return {name: _why_not(name, logits) for name in dict.fromkeys([*_KERNELS, *_offered()])}


def _why_not(name: str, logits: Tensor) -> str | None:
    try:
        return load_kernel(name).supports(logits)
    except KernelUnavailableError as error:
        return str(error)
    except Exception as error:  # someone else's kernel must not hide the others
        return f"{type(error).__name__}: {error}"


def check_kernel(kernel: str | Kernel, device: str | torch.device = "cpu") -> AdmissionReport:
    """Compare a kernel with the float64 reference now, also for soft targets if it takes them. The
    report replaces a cached one."""
    address, kernel, device = _address(kernel), _loaded(kernel), available_device(device)
    report = check_admission(kernel, device, address=address, again=True)
    if report.admitted and getattr(kernel, "soft_targets", False):
        soft = check_admission(kernel, device, soft=True, address=address, again=True)
        worst = f"{report.worst}; {soft.worst}" if soft.admitted else soft.worst
        report = replace(soft, cases=report.cases + soft.cases, worst=worst)
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
    soft: bool = False,
) -> Kernel:
    """An admitted kernel that can run here, for logits [B, views, classes].

    kernel: "auto", a name, package.module:attribute, or a kernel. average: what it must be able to
    average; None for only the pairwise KL. soft: for targets [B, C]. The choice is logged.
    """
    logits = torch.empty(1, views, classes, dtype=dtype, device=device)
    return find_kernel(kernel, logits, average, soft)


def find_kernel(
    kernel: str | Kernel, logits: Tensor, average: Average | None = None, soft: bool = False
) -> Kernel:
    """resolve_kernel() for given logits. Cached, because objective() calls it each time."""
    _, views, classes = logits.shape
    key = (kernel, logits.device, logits.dtype, views, classes, average, soft)
    try:
        return _found[key]
    except (KeyError, TypeError):  # TypeError: a kernel that is not hashable
        is_auto = isinstance(kernel, str) and kernel == "auto"
        asked = (logits, average, soft)
        found = _automatic(*asked) if is_auto else _named(kernel, *asked)
        if getattr(kernel, "__hash__", None):
            _found[key] = found
        return found


def name_of(kernel: str | Kernel) -> str:
    """The name of a kernel for a compiled graph, which holds only names."""
    if isinstance(kernel, str):
        return kernel
    if _KERNELS.get(kernel.name) is not kernel:
        raise KernelUnavailableError(
            f"torch.compile needs the name of a kernel: register_kernel({kernel.name!r}, kernel) "
            "first"
        )
    return kernel.name


def _automatic(logits: Tensor, average: Average | None, soft: bool) -> Kernel:
    reasons = {}
    for kernel in _OWN:
        if (reason := why_unsupported(kernel, logits, average, soft)) is not None:
            reasons[kernel.name] = reason
            continue
        report = _admission_of(kernel, logits.device, soft)
        if report.admitted:
            # The others are for GPUs, which a CPU's user does not miss.
            native = reasons.get("native") if logits.device.type == "cpu" else None
            why = f" (native: {native})" if native else ""
            _log_once(logging.INFO, f"loss kernel: {kernel.name}{why}")
            return kernel
        _log_once(logging.WARNING, str(report), key=str(replace(report, cached=False)))
    raise KernelUnavailableError(f"no loss kernel takes {logits.dtype} logits on {logits.device}")


def _log_once(level: int, text: str, key: str = "") -> None:
    """Log a choice once: logits of other shapes mostly lead to the same one."""
    if (key or text) not in _logged:
        _logged.add(key or text)
        log.log(level, text)


def _named(kernel: str | Kernel, logits: Tensor, average: Average | None, soft: bool) -> Kernel:
    address, kernel = _address(kernel), _loaded(kernel)
    if reason := why_unsupported(kernel, logits, average, soft):
        raise KernelUnavailableError(f"kernel {kernel.name!r} cannot run here: {reason}")
    report = _admission_of(kernel, logits.device, soft, address)
    if not report.admitted:
        raise KernelUnavailableError(str(report))
    _log_once(logging.INFO, f"loss kernel: {kernel.name}")
    return kernel


def _admission_of(
    kernel: Kernel, device: torch.device, soft: bool, address: str | None = None
) -> AdmissionReport:
    """The reference is always admitted: others are compared with it."""
    if type(kernel) is ReferenceKernel:
        return AdmissionReport(kernel.name, str(device), True, 0, "others are compared with it")
    return check_admission(kernel, device, soft=soft, address=address)


def load_kernel(name: str) -> Kernel:
    """A kernel by its name (built in, registered, or of an installed package), or by
    package.module:attribute."""
    if name in _KERNELS:
        return _KERNELS[name]
    if name == "auto":
        raise KernelUnavailableError(
            f"'auto' is not a kernel, it chooses one; name one of {', '.join(_KERNELS)}"
        )
    if address := _address(name):
        return import_kernel(address, name)
    known = ["auto", *_KERNELS, *_offered()]
    raise KernelUnavailableError(
        f"no kernel {name!r}: {suggest(name, known)} (your own: package.module:attribute)"
    )


def _address(kernel: str | Kernel) -> str | None:
    """package.module:attribute of a kernel that is given by it or by the name of an entry point;
    None for built-in and registered ones, and for objects."""
    if not isinstance(kernel, str) or kernel in _KERNELS:
        return None
    address = _offered().get(kernel, kernel)
    return address if ":" in address else None


def _loaded(kernel: str | Kernel) -> Kernel:
    """A kernel given by name or as an object."""
    if isinstance(kernel, str):
        return load_kernel(kernel)
    check_contract(kernel)
    return kernel


def _offered() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
