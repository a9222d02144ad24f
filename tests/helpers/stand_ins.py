"""Runs programs on stand-in GPUs (tests/tools/nullgpu): torch's CUDA code without a GPU."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import nullgpu

ROOT = Path(__file__).parents[2]


@cache
def _library() -> Path:
    return nullgpu.build()


def run_on_stand_ins(
    command: list[str], *, timeout: float = 300, env: dict[str, str] | None = None, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """settings: those of nullgpu.environment: devices, log, functional, late_copies, fault, ..."""
    variables = nullgpu.environment(_library(), **settings) | (env or {})
    return subprocess.run(
        command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )


def settings_of(file: Path) -> dict[str, Any]:
    """The dictionary STAND_INS of a file of checks, read without importing the file."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STAND_INS":
            return ast.literal_eval(node.value)
    raise ValueError(f"{file} does not define STAND_INS")


def run_checks(file: Path, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Run the tests of a file by pytest, in a process that has stand-in GPUs."""
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, f"--basetemp={scratch / 'checks'}"]
    log = scratch / "calls.tsv"
    log.touch()
    return run_on_stand_ins([*command, str(file)], log=log, **settings_of(file))
