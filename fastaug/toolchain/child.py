"""A comparison on a GPU in a child process.

A kernel that faults leaves an error that every later CUDA call of its process returns: only the end
of the process clears it.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

TIME_LIMIT = 120.0
"""Seconds. Most of them are for the import of torch from a slow disk and for compilers (28 programs
of Triton); the comparison itself takes less than a second."""
_SECONDS_TO_DIE = 10.0
STARTED, UNAVAILABLE = "started", "unavailable"
"""Content of the result file when the comparison starts; key of the reason why it cannot start."""
_SIGKILL = 9  # Windows has no signal.SIGKILL
_FROM_OUTSIDE = (_SIGKILL, signal.SIGTERM)
"""Signals of the system or of a person, for example when memory is short."""
_RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)


class NoChildError(Exception):
    """The comparison cannot start in a child process. The message says why."""


class ChildFailedError(Exception):
    """The child process has crashed or met the time limit. The message says how."""

    def __init__(self, message: str, *, conclusive: bool) -> None:
        """conclusive: the comparison had started, and nobody else ended the process."""
        super().__init__(message)
        self.conclusive = conclusive


def compare_in_child(
    compare: Callable[[Any, torch.device], Any], kernel: Any, device: torch.device
) -> dict[str, Any]:
    """The fields of the report of compare(kernel, device), computed in a fresh interpreter.

    kernel is pickled. NoChildError if that fails, or if the child cannot load it or open the GPU: a
    GPU in exclusive mode is for one process.
    """
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    try:
        request = pickle.dumps((compare, kernel, device))
    except Exception as error:  # any kind: a kernel may be anyone's
        raise NoChildError(f"it cannot be pickled: {error}") from error
    with tempfile.TemporaryDirectory(prefix="fastaug-") as folder:
        result, errors = Path(folder) / "result.json", Path(folder) / "stderr"
        code = _run(request, result, errors)
        content = result.read_text() if result.is_file() else ""
        stderr = errors.read_text(errors="replace").split("\n")
    if code == 0:
        found = json.loads(content)
        if UNAVAILABLE in found:
            raise NoChildError(found[UNAVAILABLE])
        return found
    has_started = content == STARTED
    if code is None:
        raise ChildFailedError(f"no result within {TIME_LIMIT:g} s", conclusive=has_started)
    last = next((line.strip() for line in reversed(stderr) if line.strip()), "no message")
    failure = f"the child process {_ending(code)}: {last}"
    if not has_started:
        raise NoChildError(failure)
    raise ChildFailedError(failure, conclusive=-code not in _FROM_OUTSIDE)


def _run(request: bytes, result: Path, errors: Path) -> int | None:
    """The exit code, negative for a signal; None at the time limit."""
    environment = {name: value for name, value in os.environ.items() if not _is_of_rank(name)}
    environment["PYTHONPATH"] = os.pathsep.join(str(path) or os.getcwd() for path in sys.path)
    limit = str(int(TIME_LIMIT) + 1)  # the child's own, later than the one here
    program = [sys.executable, "-P", "-m", "fastaug.toolchain.admit", str(result), limit]
    try:
        with tempfile.TemporaryFile() as sent, errors.open("wb") as stderr:
            sent.write(request)
            sent.seek(0)
            # Files instead of pipes, which a compiler that outlives the child would keep open; a
            # session, so that the child's compilers are ended with it.
            child = subprocess.Popen(
                program,
                env=environment,
                stdin=sent,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
    except OSError as error:
        raise NoChildError(f"the child process cannot be started: {error}") from error
    try:
        return child.wait(TIME_LIMIT)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, _SIGKILL) if hasattr(os, "killpg") else child.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver may not let it go
                child.wait(_SECONDS_TO_DIE)


def _is_of_rank(variable: str) -> bool:
    """True for torchrun's variables: a child must not join the group of the ranks."""
    return variable in _RANK_VARIABLES or variable.startswith("TORCHELASTIC_")


def _ending(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was ended by signal {-code}"
