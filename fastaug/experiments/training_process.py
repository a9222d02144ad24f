"""One run of a sweep: fastaug.train as a process, so that its failure does not end the sweep."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastaug.config import TrainConfig, setting_owners
from fastaug.errors import FastaugError
from fastaug.recipes import get_recipe
from fastaug.runs.contents import check_contents
from fastaug.runs.initial_weights import FOLLOWED
from fastaug.runs.metrics_records import parse_record
from fastaug.runtime.folder_files import open_regular, read_json_object
from fastaug.runtime.signals import TrainingInterruptedError
from fastaug.settings import flag, switch, typed

_POLL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1
_TAIL = 4096
"""Bytes at the end of a file that are searched for its last line."""


class RunFailedError(FastaugError):
    """A run has ended without a result; a retry may help."""


class RunDivergedError(FastaugError):
    """A run's loss became non-finite; a retry would end the same way."""


class RunRejectedError(FastaugError):
    """fastaug.train rejected the settings or data of a run; it would reject all other runs."""


def train_flags(config: TrainConfig, folder: Path) -> list[str]:
    """Flags of fastaug.train: the recipe, the settings that differ from it, and those that would
    follow the weights. --resume auto continues an earlier attempt."""
    recipe = get_recipe(config.run.recipe)
    followed = FOLLOWED if config.model.weights or config.model.pretrained else ()
    flags = ["--recipe", config.run.recipe]
    for name in setting_owners():
        value = config.get(name)
        is_default = value == recipe.get(name) and name not in followed
        if is_default or name in ("recipe", "out", "resume"):
            continue
        if isinstance(value, bool):
            flags.append(switch(name, value))
        elif isinstance(value, tuple):
            flags += [flag(name), *typed(value).split()]
        else:
            flags += [flag(name), repr(value) if isinstance(value, float) else str(value)]
    return [*flags, "--resume", "auto", "--out", str(folder)]


def run_training(
    config: TrainConfig,
    folder: Path,
    *,
    ranks: int,
    environment: Mapping[str, str],
    on_step: Callable[[int], None],
    signum: Callable[[], int],
) -> dict[str, Any]:
    """Train to the end and return summary.json. The output goes to output.txt in the run folder.

    on_step is called with the last logged step; signum returns the signal that stops the training,
    which saves a checkpoint first, or 0.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    module = [*(launcher if ranks > 1 else []), "-m", "fastaug.train"]
    command = [sys.executable, *module, *train_flags(config, folder)]
    folder.mkdir(parents=True, exist_ok=True)
    check_contents(folder)
    appending = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with open(open_regular(folder / "output.txt", appending), "ab") as output:
        output.write(f"$ {' '.join(command[1:])}\n".encode())
        output.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C reaches only the sweep, which forwards it
            preexec_fn=_terminate_with_parent if sys.platform == "linux" else None,
        )
        stopped_by = 0
        try:
            while process.poll() is None:
                if not stopped_by and (stopped_by := signum()):
                    process.send_signal(signal.SIGTERM)
                on_step(_last_step(folder))
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if stopped_by:
        raise TrainingInterruptedError(stopped_by)
    return _result(config, folder, process.returncode)


def _result(config: TrainConfig, folder: Path, code: int) -> dict[str, Any]:
    if code == 0 and (summary := finished_summary(folder)) is not None:
        return summary
    last = _last_line(folder / "output.txt")
    if (folder / "bad-batch.pt").exists():
        raise RunDivergedError(f"{folder.name}: diverged; the learning rate is too high")
    if code == 2:
        raise RunRejectedError(f"{folder.name}: {last.removeprefix('error: ')}")
    raise RunFailedError(f"{folder.name}: exit code {code} ({last}); see its output.txt")


def finished_summary(folder: Path) -> dict[str, Any] | None:
    """summary.json of a finished run, else None."""
    with suppress(OSError, ValueError):
        summary = read_json_object(folder / "summary.json")
        if summary.get("finished"):
            return summary
    return None


def _last_step(folder: Path) -> int:
    with suppress(OSError):
        if record := parse_record(_last_line(folder / "metrics.jsonl")):
            return record["step"]
    return 0


def _last_line(file: Path) -> str:
    with open(open_regular(file), "rb") as opened:
        opened.seek(max(0, os.fstat(opened.fileno()).st_size - _TAIL))
        lines: Sequence[str] = opened.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


if sys.platform == "linux":
    _LIBC = ctypes.CDLL(None)


def _terminate_with_parent() -> None:
    """Ask Linux to send SIGTERM, which saves a checkpoint, when the sweep is killed. Otherwise the
    training would continue while another worker takes over its run."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
