"""The child of test_security.py: opens the files of a list with little memory and time."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from image_sets import open_data

from fastaug.data.scan import scan_and_check

SECONDS = 60
"""Of the processor; far more than the few that it takes."""
MEMORY = 600 << 20
"""Bytes of address space beyond what it starts with."""


def main(folder: Path) -> None:
    """Print a line for each file: kind and text of the error, seconds, bytes grown by so far."""
    paths = json.loads((folder / "paths.json").read_text())
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in paths:
        begin, kind, said = time.monotonic(), "", ""
        try:
            scan_and_check(open_data(path, "train"), workers=1)
        except Exception as error:
            kind, said = type(error).__name__, str(error)
        growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024
        seconds = time.monotonic() - begin
        print(json.dumps({"kind": kind, "said": said, "seconds": seconds, "growth": growth}))
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
