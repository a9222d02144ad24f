"""Loss kernels: the contract, the registry, the one autograd wrapper; one file a backend."""

from fastaug.kernels.admission import KernelReport
from fastaug.kernels.autograd import evaluate
from fastaug.kernels.contract import Average, Kernel
from fastaug.kernels.registry import (
    available_kernels,
    check_kernel,
    find_kernel,
    load_kernel,
    register_kernel,
)

__all__ = [
    "Average",
    "Kernel",
    "KernelReport",
    "available_kernels",
    "check_kernel",
    "evaluate",
    "find_kernel",
    "load_kernel",
    "register_kernel",
]
