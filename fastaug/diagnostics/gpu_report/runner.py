"""Runs the parts of a GPU report, each in its own process with a time limit.

A crash, a hang, or a CUDA error that ends the use of the GPU costs only the part it happens in. The
processes are forked from a server that has imported torch but never touched CUDA.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from fastaug.diagnostics.gpu_report.recorder import Recorder, read_records
from fastaug.diagnostics.gpu_report.results import PartResult, outcome_of

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
OUTPUT_LINES = 20
"""Last lines of a failed part's output that the report keeps."""


@dataclass(frozen=True)
class Part:
    """A part of the report. run: a function of a module, so that another process finds it."""

    title: str
    run: Callable[[Recorder], None]
    seconds: float
    """About how long it takes on a GPU, for the estimate of the time left."""
    limit: float
    """Seconds after which it is ended."""


def run_parts(
    parts: Mapping[str, Part], *, quick: bool, preload: Sequence[str], say: Callable[[str], None]
) -> Iterator[PartResult]:
    """Results of the parts, one after another; after Ctrl-C, the rest are skipped.

    preload: modules that the server of processes imports.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    started, left = time.monotonic(), sum(part.seconds for part in parts.values())
    interrupted = False
    with _scratch_folder() as scratch:
        for number, (name, part) in enumerate(parts.items(), start=1):
            if interrupted:
                yield PartResult(name, part.title, "skipped", 0.0, "not run: interrupted")
                continue
            say(f"[{number}/{len(parts)}] {name}: {part.title}")
            result, interrupted = _run(context, name, part, scratch, quick=quick)
            left -= part.seconds
            elapsed = time.monotonic() - started
            say(
                f"[{number}/{len(parts)}] {name}: {result.outcome} in {result.seconds:.0f} s; "
                f"{_minutes(elapsed)} so far{_left(left, parts, elapsed)}"
            )
            yield result


def _left(planned: float, parts: Mapping[str, Part], elapsed: float) -> str:
    """The estimate, corrected by how the parts so far compare with theirs."""
    total = sum(part.seconds for part in parts.values())
    if planned <= 0:
        return ""
    return f", about {_minutes(planned * elapsed / (total - planned))} left"


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="fastaug-gpu-report-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(
    context: multiprocessing.context.ForkServerContext,
    name: str,
    part: Part,
    scratch: Path,
    *,
    quick: bool,
) -> tuple[PartResult, bool]:
    """The result of a part, and True if Ctrl-C has ended it."""
    folder = scratch / name
    folder.mkdir()
    records, output = scratch / f"{name}.jsonl", scratch / f"{name}.txt"
    process = context.Process(target=_work, args=(part.run, records, output, folder, quick))
    started, interrupted = time.monotonic(), False
    try:
        process.start()
        process.join(part.limit)
    except KeyboardInterrupt:
        interrupted = True
    late = process.is_alive() and not interrupted
    _end(process)
    shutil.rmtree(folder, ignore_errors=True)
    found = read_records(records)
    detail, outcome = "", outcome_of(found.checks)
    if interrupted:
        detail, outcome = "interrupted", "failed" if outcome == "failed" else "skipped"
    elif late:
        detail, outcome = f"ended: it took longer than its {part.limit:.0f} s", "failed"
    elif not found.ended:
        detail, outcome = f"its process ended {_how(process.exitcode)}", "failed"
    lines = output.read_text(errors="replace").rstrip().splitlines() if output.exists() else []
    result = PartResult(
        name,
        part.title,
        outcome,
        round(time.monotonic() - started, 1),
        detail,
        found.checks,
        found.tables,
        "\n".join(lines[-OUTPUT_LINES:]) if outcome == "failed" else "",
    )
    return result, interrupted


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        with suppress(ValueError):
            return f"by {signal.Signals(-exitcode).name}"
    return f"with exit code {exitcode}"


def _end(process: BaseProcess) -> None:
    """End the process and all that it has started."""
    if process.pid is None:
        return
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(OSError):  # it may not have its own group yet
        process.kill()
    process.join()


# --- in the process of a part ---


def _work(
    run: Callable[[Recorder], None], records: Path, output: Path, folder: Path, quick: bool
) -> None:
    os.setsid()  # Ctrl-C reaches only the parent, which ends this whole group
    if sys.platform == "linux":  # ended with the server, and so with the parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    recorder = Recorder(records, folder, quick=quick)
    try:
        run(recorder)
        recorder.end()
    except Exception as error:  # outside of its checks
        recorder.end(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch and DALI may hang or crash while Python shuts down
