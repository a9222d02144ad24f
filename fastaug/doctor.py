"""python -m fastaug.doctor: check this machine and list what to fix."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fastaug import cli
from fastaug.diagnostics import kernels, machine, packages
from fastaug.diagnostics.fact import Fact, run_checks
from fastaug.errors import ConfigError
from fastaug.runs.console import show_table
from fastaug.runtime.atomic import write_json
from fastaug.runtime.device import resolve_device
from fastaug.runtime.logs import silenced


@dataclass(frozen=True)
class DoctorConfig:
    """Check packages, hardware, kernels and view engines, and list what to install or fix."""

    device: str = "all"
    """Devices to check: all, cpu, cuda, or cuda:N."""
    quick: bool = False
    """Skip the timing of the kernels; with --gpu-report: small sizes, in about a minute."""
    json: str = ""
    """Also write the results to this JSON file."""
    gpu_report: str = ""
    """Check and measure everything on the GPUs (planned for five minutes), as HTML and JSON in
    this file or folder; by default gpu-report.html and .json here."""
    parts: str = ""
    """Parts of --gpu-report, such as decode,training; default: all."""
    debug: bool = False
    """Show the traceback of an error."""


def main(args: Sequence[str]) -> int:
    args = cli.with_value(args, "--gpu-report", ".")
    options = cli.parse(DoctorConfig, args, prog="python -m fastaug.doctor")
    if options.gpu_report and (options.json or options.device != "all"):
        given = f"--json {options.json}" if options.json else f"--device {options.device}"
        raise ConfigError(
            f"{given}: --gpu-report writes its own JSON and takes the GPUs that are visible; omit "
            "it, or set CUDA_VISIBLE_DEVICES"
        )
    if options.gpu_report:
        from fastaug.diagnostics.gpu_report.command import make_gpu_report

        return make_gpu_report(options.gpu_report, options.parts, quick=options.quick)
    if options.parts:
        raise ConfigError(f"--parts {options.parts} needs --gpu-report; add it")
    out = cli.output_file("--json", options.json) if options.json else None
    device = options.device
    devices = machine.list_devices() if device == "all" else [resolve_device(device)]
    with silenced():  # the tables show what would be logged
        found, facts = examine(devices, timed=not options.quick)
    todo = sorted((fact for fact in facts if fact.todo), key=lambda fact: not fact.failed)
    print("To do" if todo else "nothing to do")
    for number, fact in enumerate(todo, start=1):
        print(f"{number}. {'problem: ' if fact.failed else ''}{fact.todo}")
    if out is not None:
        found["todo"] = [{"what": fact.todo, "failed": fact.failed} for fact in todo]
        try:
            write_json(out, found)
        except OSError as error:
            raise ConfigError(f"--json {out}: cannot be written ({error.strerror})") from error
    return int(any(fact.failed for fact in facts))


def examine(devices: Sequence[torch.device], *, timed: bool) -> tuple[dict[str, Any], list[Fact]]:
    """Run all checks and show each table when it is complete.

    Returns the results as plain values for JSON, and all facts.
    """
    facts: list[Fact] = []

    def show(title: str, table: dict[str, Fact]) -> dict[str, str]:
        values = {name: fact.value for name, fact in table.items()}
        show_table(title, list(values.items()))
        facts.extend(table.values())
        return values

    found: dict[str, Any] = {"kernels": [], "auto": {}, "views": {}}
    found["versions"] = show("versions", run_checks(packages.package_checks(devices)))
    found["machine"] = show("machine", run_checks(machine.machine_checks()))
    for device in devices:
        results, table = kernels.check_kernels(device, timed=timed)
        found["kernels"] += map(asdict, results)
        found["auto"][str(device)] = show(f"loss kernels on {device}", table)["auto"]
        table = kernels.check_views(device, timed=timed)
        found["views"][str(device)] = show(f"view engines on {device}", table)
    return found, facts


if __name__ == "__main__":
    sys.exit(cli.run(main))
