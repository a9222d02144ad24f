"""The child of test_hostile_runs.py: reports on folders with little memory and time."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from open_hostile import MEMORY

from fastaug import cli, figures, report
from fastaug.experiments import report_page  # noqa: F401  loads all that a report uses

SECONDS = 300
"""Processor time for all folders together."""


def main(folders: Sequence[str]) -> None:
    """Print a line for each folder: exit code, output, seconds. Figures are drawn of folders whose
    name ends in "figures"."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    for folder in folders:
        command = figures.main if folder.endswith("figures") else report.main
        begin, shown = time.monotonic(), io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            try:
                code = cli.run(command, [folder])
            except BaseException:
                code = 1
                traceback.print_exc(file=shown)
        seconds = time.monotonic() - begin
        found = {"folder": folder, "code": code, "seconds": seconds, "output": shown.getvalue()}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
