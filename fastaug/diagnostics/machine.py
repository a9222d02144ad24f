"""What the machine has, as facts: each with what to do about it where something is missing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fastaug.runtime.cache import cache_dir
from fastaug.runtime.cores import core_count
from fastaug.runtime.device import cpp_compiler


@dataclass(frozen=True)
class Fact:
    name: str
    value: str
    todo: str = ""
    """What to install or do, in one line; empty where nothing is missed."""
    failed: bool = False
    """It is there and should work, and does not."""


Probe = Callable[[], Iterator[Fact]]

_X86 = {"AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "AVX-512": "avx512f"}
_X86 |= {"bf16": "avx512_bf16", "AMX": "amx_tile"}
_ARM = {"NEON": "asimd", "SVE": "sve", "fp16": "asimdhp", "bf16": "bf16"}
_THREAD_SETTINGS = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "MKL_NUM_THREADS", "KMP_AFFINITY")


def look(name: str, probe: Probe) -> list[Fact]:
    """What a probe finds; if it raises, that is one more line."""
    facts: list[Fact] = []
    try:
        facts.extend(probe())
    except Exception as error:
        facts.append(Fact(name, f"cannot be found out: {one_line(error)}"))
    return facts


def hardware() -> dict[str, Probe]:
    """Name -> probe, for the machine and its settings."""
    return {
        "CPU": _cpu,
        "CPU features": _cpu_features,
        "memory": _memory,
        "GPU": _gpus,
        "NVIDIA driver": _driver,
        "C++ compiler": _compiler,
        "cache folder": _cache_folder,
        "torch threads": _threads,
    }


def one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _cpuinfo() -> dict[str, str]:
    """Of the first core; empty where there is no /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cpu() -> Iterator[Fact]:
    name = _cpuinfo().get("model name") or platform.processor() or platform.machine()
    yield Fact("CPU", f"{name}, {core_count()} usable cores of {os.cpu_count()}")


def _cpu_features() -> Iterator[Fact]:
    info = _cpuinfo()
    known, listed = (_X86, info["flags"]) if "flags" in info else (_ARM, info.get("Features", ""))
    if not listed:
        yield Fact("CPU features", "unknown: the system does not say")
        return
    there = {name: flag in listed.split() for name, flag in known.items()}
    lacking = ", ".join(name for name, is_there in there.items() if not is_there)
    value = ", ".join(name for name, is_there in there.items() if is_there) or "none of those"
    yield Fact("CPU features", value + (f"; not {lacking}" if lacking else ""))


def _memory() -> Iterator[Fact]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    value = _size(total)
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's own
    if limit.is_file() and (most := limit.read_text().strip()).isdigit():
        value += f", of which this container may take {_size(int(most))}"
    yield Fact("memory", value)


def _gpus() -> Iterator[Fact]:
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        yield Fact(f"cuda:{index}", f"{gpu.name}, {_size(gpu.total_memory)}, {capability}")
    if not torch.cuda.is_available():
        yield _why_no_gpu()


def _why_no_gpu() -> Fact:
    """No GPU is no fault; one that is there and that torch cannot use is."""
    driver = driver_version()
    if driver is None and not _has_nvidia_card():
        return Fact("GPU", "none found (nvidia-smi lists one once its driver is installed)")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Fact("GPU", "hidden by CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        todo = "install a torch with CUDA (pip install torch): this one is for the CPU alone"
        return Fact("GPU", "there is one, and torch is built for the CPU alone", todo)
    if driver is None:
        todo = "install NVIDIA's driver, until nvidia-smi lists the GPU"
        return Fact("GPU", "there is one, and no driver for it", todo)
    try:
        torch.cuda.init()
        reason = "torch does not say why"
    except Exception as error:
        reason = one_line(error)
    todo = f"install a driver for CUDA {torch.version.cuda}, or a torch for an older CUDA"
    return Fact("GPU", f"torch cannot use it: {reason}", todo, failed=True)


def _driver() -> Iterator[Fact]:
    yield Fact("NVIDIA driver", driver_version() or "none found")


def driver_version() -> str | None:
    """From nvidia-smi, or from the driver's own file."""
    if smi := shutil.which("nvidia-smi"):
        query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    own = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", own.read_text()) if own.is_file() else None
    return found[1] if found else None


def _has_nvidia_card() -> bool:
    """By the PCI bus: a display or compute device of NVIDIA, with a driver or without."""
    return any(
        (device / "vendor").read_text().strip() == "0x10de"
        and (device / "class").read_text().startswith("0x03")
        for device in Path("/sys/bus/pci/devices").glob("*")
    )


def _compiler() -> Iterator[Fact]:
    if (compiler := cpp_compiler()) is None:
        todo = "install g++ or clang++: the native kernel and --compile need it"
        yield Fact("C++ compiler", "none found", todo)
        return
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30)
    if done.returncode == 0 and done.stdout:
        yield Fact("C++ compiler", f"{compiler}, {done.stdout.splitlines()[0]}")
    else:
        todo = f"install g++ or clang++, or set CXX to one that works: {compiler} does not"
        value = f"{compiler} does not say its version (exit code {done.returncode})"
        yield Fact("C++ compiler", value, todo, failed=True)


def _cache_folder() -> Iterator[Fact]:
    folder = cache_dir()
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        yield Fact("cache folder", f"{folder}, {_size(size)}")
    else:
        todo = (
            "set FASTAUG_CACHE to a folder that can be written: without one, each run compiles the "
            "kernels and looks at the images anew"
        )
        yield Fact("cache folder", f"{folder}, {_size(size)}, cannot be written", todo)


def _threads() -> Iterator[Fact]:
    threads, cores = torch.get_num_threads(), core_count()
    there = [f"{name}={os.environ[name]}" for name in _THREAD_SETTINGS if name in os.environ]
    value = f"{threads}; {', '.join(there) or 'OMP_NUM_THREADS is not set'}"
    todo = f"set OMP_NUM_THREADS={cores}: torch has {threads} threads for {cores} usable cores"
    yield Fact("torch threads", value, todo if threads > cores else "")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
