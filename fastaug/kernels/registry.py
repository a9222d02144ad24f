"""Which loss kernels there are, and which one a name means. Choices are said, never silent."""

from __future__ import annotations

import importlib
import logging

from torch import Tensor

from fastaug.errors import KernelUnavailable, suggest
from fastaug.kernels.contract import Kernel
from fastaug.kernels.reference import ReferenceKernel

log = logging.getLogger("fastaug")

# Fastest first: "auto" takes the first one that supports the logits.
_KERNELS: dict[str, Kernel] = {"reference": ReferenceKernel()}
_said: set[str] = set()


def register_kernel(name: str, kernel: Kernel) -> None:
    """Make a kernel known under a name, for `kernel=name` and `--kernel name`."""
    if name == "auto" or ":" in name:
        raise KernelUnavailable(f"a kernel cannot be called {name!r}: 'auto' and ':' are taken")
    _check_contract(name, kernel)
    _KERNELS[name] = kernel


def available_kernels(logits: Tensor | None = None) -> dict[str, str | None]:
    """Each registered kernel with None, or why it cannot take these logits (default: fp32, CPU)."""
    logits = Tensor(1, 2, 2) if logits is None else logits
    return {name: kernel.supports(logits) for name, kernel in _KERNELS.items()}


def find_kernel(name: str | Kernel, logits: Tensor) -> Kernel:
    """The kernel for these logits: "auto", a name, package.module:attribute, or itself."""
    if name == "auto":
        kernel = next(k for k in _KERNELS.values() if k.supports(logits) is None)
        if kernel.name not in _said:
            _said.add(kernel.name)
            log.info("loss kernel: %s", kernel.name)
        return kernel
    kernel = load_kernel(name) if isinstance(name, str) else name
    if reason := kernel.supports(logits):
        raise KernelUnavailable(f"kernel {kernel.name!r} cannot run here: {reason}")
    return kernel


def load_kernel(name: str) -> Kernel:
    """A kernel by its registered name or by package.module:attribute."""
    if name in _KERNELS:
        return _KERNELS[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise KernelUnavailable(
            f"no kernel {name!r}: {suggest(name, ['auto', *_KERNELS])}, or package.module:attribute"
        )
    try:
        kernel = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise KernelUnavailable(f"kernel {name!r} cannot be loaded: {error}") from error
    _check_contract(name, kernel)
    return kernel


def _check_contract(name: str, kernel: object) -> None:
    missing = [part for part in ("name", "supports", "value_and_grad") if not hasattr(kernel, part)]
    if missing:
        raise KernelUnavailable(
            f"kernel {name!r} has no {' and no '.join(missing)}; "
            "a kernel has name, supports and value_and_grad (fastaug/kernels/contract.py)"
        )
