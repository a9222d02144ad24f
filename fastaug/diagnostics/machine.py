"""Checks of the hardware, the driver, the compiler and the settings of this machine."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import torch

from fastaug.diagnostics.fact import Check, Fact
from fastaug.errors import describe_error
from fastaug.runtime.cache import cache_dir
from fastaug.runtime.cores import core_count
from fastaug.runtime.device import cpp_compiler
from fastaug.toolchain import prebuilt

# Name -> its flag in /proc/cpuinfo.
_X86 = {"AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "AVX-512": "avx512f"}
_X86 |= {"bf16": "avx512_bf16", "AMX": "amx_tile"}
_ARM = {"NEON": "asimd", "SVE": "sve", "fp16": "asimdhp", "bf16": "bf16"}
_THREAD_SETTINGS = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "MKL_NUM_THREADS", "KMP_AFFINITY")


def list_devices() -> list[torch.device]:
    """The CPU and all GPUs that torch can use."""
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(_gpu_count()))]


def _gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def machine_checks() -> dict[str, Check]:
    """Checks of the hardware and its settings, by name."""
    gpus: dict[str, Check] = {f"cuda:{i}": partial(_gpu, i) for i in range(_gpu_count())}
    return {
        "CPU": _cpu,
        "CPU features": _cpu_features,
        "memory": _memory,
        **(gpus or {"GPU": _missing_gpu}),
        "NVIDIA driver": lambda: Fact(driver_version() or "none found"),
        "C++ compiler": _compiler,
        "CPU kernels": _cpu_kernels,
        "cache folder": _cache_folder,
        "torch threads": _threads,
    }


def _cpuinfo() -> dict[str, str]:
    """Fields of the first core; empty without /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cpu() -> Fact:
    name = _cpuinfo().get("model name") or platform.processor() or platform.machine()
    return Fact(f"{name}, {core_count()} usable cores of {os.cpu_count()}")


def _cpu_features() -> Fact:
    info = _cpuinfo()
    known, flags = (_X86, info["flags"]) if "flags" in info else (_ARM, info.get("Features", ""))
    if not flags:
        return Fact("unknown: /proc/cpuinfo does not list them")
    present = [name for name, flag in known.items() if flag in flags.split()]
    missing = [name for name in known if name not in present]
    value = ", ".join(present) or "none"
    return Fact(value + (f"; not {', '.join(missing)}" if missing else ""))


def _memory() -> Fact:
    value = _size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.is_file() and (most := limit.read_text().strip()).isdigit():
        value += f", of which this container may use {_size(int(most))}"
    return Fact(value)


def _gpu(index: int) -> Fact:
    gpu = torch.cuda.get_device_properties(index)
    capability = f"compute capability {gpu.major}.{gpu.minor}"
    return Fact(f"{gpu.name}, {_size(gpu.total_memory)}, {capability}")


def _missing_gpu() -> Fact:
    """Why torch finds no GPU. A GPU that is present but unusable is a failure."""
    driver = driver_version()
    if driver is None and not _has_nvidia_card():
        return Fact("none found (nvidia-smi lists one once its driver is installed)")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Fact("hidden by CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        todo = "install a torch with CUDA (pip install torch): this one is built for CPU only"
        return Fact("found one, but torch is built for CPU only", todo)
    if driver is None:
        todo = "install NVIDIA's driver; nvidia-smi must list the GPU"
        return Fact("found one, but no driver for it", todo)
    try:
        torch.cuda.init()
        reason = "torch gives no reason"
    except Exception as error:
        reason = describe_error(error)
    todo = f"install a driver for CUDA {torch.version.cuda}, or a torch for an older CUDA"
    return Fact(f"torch cannot use it: {reason}", todo, failed=True)


def driver_version() -> str | None:
    """NVIDIA's driver, from nvidia-smi or /proc/driver/nvidia."""
    if smi := shutil.which("nvidia-smi"):
        query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    file = Path("/proc/driver/nvidia/version")
    text = file.read_text() if file.is_file() else ""
    found = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", text)
    return found[1] if found else None


def _has_nvidia_card() -> bool:
    """Whether the PCI bus has a display or compute device of NVIDIA, with a driver or without."""
    return any(
        (device / "vendor").read_text().strip() == "0x10de"
        and (device / "class").read_text().startswith("0x03")
        for device in Path("/sys/bus/pci/devices").glob("*")
    )


def _compiler() -> Fact:
    if (compiler := cpp_compiler()) is None:
        if prebuilt.is_used():
            return Fact("none found; only --compile needs it")
        todo = "install g++ or clang++: the native kernel and --compile need it"
        return Fact("none found", todo)
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30)
    if done.returncode == 0 and done.stdout:
        return Fact(f"{compiler}, {done.stdout.splitlines()[0]}")
    todo = f"install g++ or clang++, or set CXX to one that works: {compiler} does not"
    value = f"{compiler} does not print its version (exit code {done.returncode})"
    return Fact(value, todo, failed=True)


def _cpu_kernels() -> Fact:
    level = prebuilt.level_of_this_cpu()
    if level is not None and prebuilt.is_used():
        return Fact(f"prebuilt for {level.name}")
    reason = "no prebuilt ones in this installation"
    if prebuilt.compiles_for_this_cpu():
        reason = f"{prebuilt.NATIVE_VARIABLE} is set"
    elif prebuilt.is_installed():
        reason = "the prebuilt ones are not for this CPU"
    return Fact(f"compiled for this CPU on first use: {reason}")


def _cache_folder() -> Fact:
    folder = cache_dir()
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    value = f"{folder}, {_size(size)}"
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Fact(value)
    todo = (
        "set FASTAUG_CACHE to a writable folder: without one, each run compiles the kernels and "
        "scans the images again"
    )
    return Fact(f"{value}, cannot be written", todo)


def _threads() -> Fact:
    threads, cores = torch.get_num_threads(), core_count()
    settings = [f"{name}={os.environ[name]}" for name in _THREAD_SETTINGS if name in os.environ]
    value = f"{threads}; {', '.join(settings) or 'OMP_NUM_THREADS is not set'}"
    todo = f"set OMP_NUM_THREADS={cores}: torch has {threads} threads for {cores} usable cores"
    return Fact(value, todo if threads > cores else "")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
