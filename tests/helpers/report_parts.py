"""Parts of a GPU report that end in every way; they need no GPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time

from fastaug.diagnostics.gpu_report.recorder import Recorder, SkippedCheck


def passes(recorder: Recorder) -> None:
    recorder.table("speed", "Speed", [("K", ""), ("time", "ms")])
    recorder.row("speed", 4, float("nan"))
    with recorder.check("good") as found:
        found.append("quick" if recorder.quick else "full")


def fails(recorder: Recorder) -> None:
    with recorder.check("bad"):
        raise RuntimeError("the reason")
    with recorder.check("unneeded"):
        raise SkippedCheck("needs two GPUs")
    with recorder.check("still run"):
        pass


def skips(recorder: Recorder) -> None:
    with recorder.check("unneeded"):
        raise SkippedCheck("needs two GPUs")


def raises(recorder: Recorder) -> None:
    passes(recorder)
    raise OSError("outside of a check")


def crashes(recorder: Recorder) -> None:
    passes(recorder)
    print("last words", flush=True)
    ctypes.string_at(0)


def hangs(recorder: Recorder) -> None:
    """With a process of its own, whose number is the name of a check."""
    started = subprocess.Popen(["sleep", "1000"])
    with recorder.check(str(started.pid)):
        pass
    time.sleep(1000)


def leaves(recorder: Recorder) -> None:
    os._exit(3)
