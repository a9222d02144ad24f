"""compute-sanitizer's memcheck over the kernels, where it is installed.

python -m fastaug.diagnostics.gpu_report.sanitizer NAME runs the checks that it watches.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from fastaug.diagnostics.gpu_report.kernel_checks import KERNELS, kernel_checks
from fastaug.diagnostics.gpu_report.recorder import Check, Recorder, SkippedCheck
from fastaug.diagnostics.gpu_report.view_checks import view_checks
from fastaug.errors import ConfigError

_LIMIT = 90.0
"""Seconds of each target: memcheck slows kernels down many times."""
_LINES = 12


def _targets() -> dict[str, Callable[[], Iterable[Check]]]:
    kernels = {f"loss kernel {name}": lambda name=name: kernel_checks(name) for name in KERNELS}
    return {**kernels, "view engine": view_checks}


def sanitizer_part(recorder: Recorder) -> None:
    tool = find_tool()
    for name in _targets():
        with recorder.check(f"memcheck: {name}") as found:
            if tool is None:
                raise SkippedCheck("compute-sanitizer is not installed (it is in the CUDA toolkit)")
            found.append(_watched(tool, name))


def find_tool() -> str | None:
    places = sorted(Path("/usr/local").glob("cuda*/bin"))
    return shutil.which("compute-sanitizer") or next(
        (found for place in places if (found := shutil.which("compute-sanitizer", path=place))),
        None,
    )


def _watched(tool: str, name: str) -> str:
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", __name__]
    done = subprocess.run([*command, name], capture_output=True, text=True, timeout=_LIMIT)
    lines = (done.stdout + done.stderr).rstrip().splitlines()
    if done.returncode:
        last = "\n".join(lines[-_LINES:])
        raise RuntimeError(f"memcheck ended with exit code {done.returncode}:\n{last}")
    return next((line.strip("= ") for line in lines if "ERROR SUMMARY" in line), "no errors")


def main(name: str) -> int:
    """Run the quick checks of a target; a skipped one is none."""
    targets = _targets()
    if name not in targets:
        raise ConfigError(f"unknown target {name!r}: one of {', '.join(targets)}")
    for check in targets[name]():
        if check.quick:
            try:
                check.run()
            except SkippedCheck as error:
                print(f"{check.name}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
