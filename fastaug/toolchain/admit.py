"""The child process of an admission check, started by toolchain/child.py.

    python -m fastaug.toolchain.admit RESULT SECONDS

Reads a pickled (compare, kernel, device) from stdin and writes the report to RESULT as JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from fastaug.errors import describe_error
from fastaug.toolchain.child import STARTED, UNAVAILABLE


def main(result: Path, seconds: int) -> int:
    if hasattr(signal, "alarm"):  # ends this process if its parent is gone and a kernel hangs
        signal.alarm(seconds)
    try:
        compare, kernel, device = pickle.load(sys.stdin.buffer)
        torch.cuda.set_device(device)
        torch.zeros(1, device=device).item()
    except Exception as error:  # unpickling imports the module of a user's kernel
        result.write_text(json.dumps({UNAVAILABLE: describe_error(error)}))
        return 0
    result.write_text(STARTED)
    try:
        report = compare(kernel, device)
        if report.admitted:
            torch.cuda.synchronize(device)
    except Exception as error:
        print(describe_error(error), file=sys.stderr, flush=True)
        return 1
    result.write_text(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    # Without cleanup: after a fault, that of CUDA's libraries may crash or hang.
    os._exit(main(Path(sys.argv[1]), int(sys.argv[2])))
