"""Device, precision and memory of the process."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import multiprocessing
import os
import platform
import shutil
import sys

import torch

from fastaug.errors import ConfigError

log = logging.getLogger("fastaug")

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """--device as an available torch device, a GPU with its number; under torchrun, each rank has
    its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.is_available():
        name = f"cuda:{_own_gpu()}"
    device = available_device(name, "--device")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}")
    return device


def _own_gpu() -> int:
    """Number of this rank's GPU among those that the process sees."""
    if "LOCAL_RANK" not in os.environ:  # set by torchrun
        return torch.cuda.current_device()
    # A cluster may show each process only its own GPU (srun --gpus-per-task=1).
    return 0 if torch.cuda.device_count() == 1 else int(os.environ["LOCAL_RANK"])


def use_device(name: str) -> torch.device:
    """resolve_device, and make a GPU the current one of this process.

    Libraries take the default stream, whose handle is 0 on every GPU, as that of the current GPU.
    """
    device = resolve_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def available_device(device: str | torch.device, argument: str = "device") -> torch.device:
    """A torch device that can be used here; ConfigError names the argument if it cannot."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{argument} must be cpu, cuda or cuda:N, got {device!r}") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"{argument} {found}: torch {torch.__version__} finds no CUDA GPU here; "
            "use cpu, or check the driver with nvidia-smi"
        )
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"{argument} {found}: this machine has {torch.cuda.device_count()} GPU(s), starting at "
            "cuda:0, and each rank needs its own"
        )
    return found


def avoid_broken_cpu_arithmetic(device: torch.device, precision: str) -> None:
    """Call before the first bf16 or fp16 operation on a CPU.

    Some virtual machines announce a matrix unit (AMX) that does not work: torch's oneDNN crashes
    with an illegal instruction at the first bf16 product. A child process tries one; if it crashes,
    an environment variable, which oneDNN reads at its first use, disables AMX.
    """
    if device.type != "cpu" or precision not in _DTYPES or "ONEDNN_MAX_CPU_ISA" in os.environ:
        return
    probe = multiprocessing.get_context("fork").Process(target=_multiply, args=(precision,))
    probe.start()
    probe.join()
    if probe.exitcode != 0:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
        log.info(
            "%s: the matrix unit (AMX) of this CPU does not work here and is disabled", precision
        )


def _multiply(precision: str) -> None:
    torch.set_num_threads(1)
    matrix = torch.ones(64, 64, dtype=_DTYPES[precision])
    torch.mm(matrix, matrix)


def keep_freed_memory(device: torch.device) -> None:
    """Make glibc keep freed memory for later tensors; call before training on a CPU.

    By default glibc returns large blocks to the system and gets them back, page by page and zeroed,
    in every operation: a third of a step at 224 px. Keeping them takes up to a third more memory,
    as freed blocks do not always fit. Does nothing if glibc's own variables (MALLOC_...) are set.
    """
    user_settings = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    if device.type != "cpu" or not _IS_LINUX or any(name in os.environ for name in user_settings):
        return
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # not in musl
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


_IS_LINUX = sys.platform == "linux"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


def cpp_compiler() -> str | None:
    """The C++ compiler of this machine: $CXX, g++ or clang++."""
    found = (name and shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++"))
    return next((path for path in found if path), None)


def why_no_triton() -> str | None:
    """None, or why Triton cannot run programs on a GPU. It compiles their launchers as C code."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    named = os.environ.get("CC")
    if any(shutil.which(name) for name in ([named] if named else ["gcc", "clang"])):
        return None
    given = f"CC={named}" if named else "gcc or clang"
    return f"Triton needs a C compiler, and there is no {given}: install one, or set CC"


def check_compiler(device: torch.device) -> None:
    """Raise if torch.compile would not find its compilers: its own error has fifty lines."""
    if device.type == "cpu" and cpp_compiler() is None:
        raise ConfigError(
            "--compile on a CPU needs a C++ compiler, and neither g++ nor clang++ was found; "
            "install one, set CXX, or omit --compile"
        )
    if device.type == "cuda" and (reason := why_no_triton()):
        raise ConfigError(f"--compile on a GPU: {reason}; or omit --compile")


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The autocast context of the forward pass."""
    dtype = _DTYPES.get(precision)
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def environment(device: torch.device) -> dict[str, str]:
    """Software and hardware that a run was measured on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "gpu": gpu,
        "cpu_threads": str(torch.get_num_threads()),
    }


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_bound() -> int:
    """Bytes that one file may take: a third of the physical memory."""
    return physical_memory() // 3
