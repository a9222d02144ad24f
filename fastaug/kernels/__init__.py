"""Loss kernels: the contract, the registry, the one autograd wrapper; one file a backend."""

from fastaug.kernels.autograd import PerImageObjective
from fastaug.kernels.contract import Average, Kernel
from fastaug.kernels.registry import available_kernels, find_kernel, load_kernel, register_kernel

__all__ = [
    "Average",
    "Kernel",
    "PerImageObjective",
    "available_kernels",
    "find_kernel",
    "load_kernel",
    "register_kernel",
]
