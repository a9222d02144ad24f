"""Facts about the machine: versions, GPUs, CPU, and what nvidia-smi reports on clocks and power."""

from __future__ import annotations

import shutil
import subprocess

import torch

from fastaug.diagnostics import machine, packages
from fastaug.diagnostics.fact import Check, Fact, run_checks
from fastaug.diagnostics.gpu_report.recorder import Recorder, SkippedCheck

_FROM_SMI = {
    "driver_version": "driver",
    "memory.total": "memory",
    "clocks.max.sm": "max SM clock",
    "clocks.max.memory": "max memory clock",
    "clocks.current.sm": "SM clock now",
    "power.limit": "power limit",
    "power.draw": "power now",
    "temperature.gpu": "temperature (C)",
    "pcie.link.gen.max": "PCIe generation",
    "pcie.link.width.max": "PCIe lanes",
    "ecc.mode.current": "ECC",
    "mig.mode.current": "MIG",
}
"""Query of nvidia-smi -> column."""


def machine_part(recorder: Recorder) -> None:
    recorder.table("facts", "Software and hardware", [("what", ""), ("value", "")])
    # DALI on the GPU is what the parts "decode" and "loader" check.
    checks = packages.package_checks([torch.device("cpu")]) | machine.machine_checks() | _cuda()
    for name, fact in run_checks(checks).items():
        recorder.row("facts", name, fact.value)
        if fact.failed:
            with recorder.check(name):
                raise RuntimeError(f"{fact.value}; {fact.todo}")
    with recorder.check("a GPU computes") as found:
        ones = torch.ones(64, 64, device="cuda")
        assert (ones @ ones == 64).all()
        found.append(torch.cuda.get_device_name())
    with recorder.check("nvidia-smi"):
        rows = _smi()
        columns = [(name, "") for name in ("GPU", *_FROM_SMI.values())]
        recorder.table("nvidia-smi", "nvidia-smi", columns)
        for row in rows:
            recorder.row("nvidia-smi", *row)


def _cuda() -> dict[str, Check]:
    def gpus() -> Fact:
        found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return Fact(", ".join(f"{gpu.multi_processor_count}" for gpu in found))

    return {
        "CUDA of torch": lambda: Fact(str(torch.version.cuda)),
        "cuDNN": lambda: Fact(str(torch.backends.cudnn.version())),
        "NCCL": lambda: Fact(".".join(map(str, torch.cuda.nccl.version()))),
        "SMs of each GPU": gpus,
    }


def _smi() -> list[list[str]]:
    if (tool := shutil.which("nvidia-smi")) is None:
        raise SkippedCheck("nvidia-smi is not installed")
    query = f"--query-gpu={','.join(('index', *_FROM_SMI))}"
    done = subprocess.run(
        [tool, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=30
    )
    if done.returncode:
        raise RuntimeError(f"nvidia-smi ended with exit code {done.returncode}: {done.stdout}")
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(_FROM_SMI) + 1]
