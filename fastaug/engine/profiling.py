"""--profile: a Chrome trace of a few steps, and one line on where their time went."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from fastaug.runtime import trace as tracing
from fastaug.runtime.atomic import write_json

WARM_UP, STEPS = 5, 5
PARTS = {
    "forward": "forward",
    "objective": "objective",
    "backward": "backward",
    "optimizer": "optimizer",
    "wait for data": "waiting for data",
}
"""The ranges of a step, none inside another, and their names in the summary line."""
_CLOCK = "fastaug clock"


def steps_to_record(first: int, last: int, per_epoch: int) -> range:
    """Some steps between first and last, after the first ones of an epoch, which are slower.

    All are of one epoch: the evaluation between two of them would bury the steps in the trace.
    """
    end = min(last, (first // per_epoch + 1) * per_epoch)
    after = min(last, end + per_epoch)
    if end - first < WARM_UP + STEPS and after - end > end - first:
        first, end = end, after
    start = first + min(WARM_UP, (end - first) // 2)
    return range(start, min(start + STEPS, end))


class Profiler:
    """Records the given steps and writes the trace; without steps it does nothing.

    A context manager: a run that is interrupted leaves the trace of what was recorded.
    """

    def __init__(
        self, steps: range | None, path: Path, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self._steps, self._path, self._say = steps or range(0), path, say
        self._cuda = device.type == "cuda"
        self._torch: torch.profiler.profile | None = None
        self._done = steps is None

    def __enter__(self) -> Profiler:
        if not self._done:
            # Keeps torch's profiler from logging its start and stop to stderr.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            with self._new_torch_profiler():  # the first start takes over a second: not in a step
                pass
            self._spans = tempfile.NamedTemporaryFile(prefix="fastaug-spans-")
            tracing.set_worker_trace_file(self._spans.name)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._torch is not None:
            self._finish(self._torch)
        elif not self._done:
            self._turn_off()
            self._say("--profile: the run ended before the steps to record; there is no trace")

    def reach(self, step: int) -> None:
        """Call between steps, with the number of completed steps."""
        if self._done:
            return
        if self._torch is not None:
            self._recorded += 1
            if step >= self._steps.stop:
                self._finish(self._torch)
        elif step in self._steps:
            self._start()

    def _start(self) -> None:
        self._recorded = 0
        self._torch = self._new_torch_profiler()
        self._torch.start()
        self._marks = [_mark() for _ in range(5)]
        tracing.start_tracing(cuda=self._cuda)
        self._started = time.perf_counter_ns()

    def _finish(self, profile: torch.profiler.profile) -> None:
        ended = time.perf_counter_ns()
        profile.stop()
        try:
            with tempfile.TemporaryDirectory() as folder:
                profile.export_chrome_trace(f"{folder}/trace.json")
                trace = json.loads(Path(folder, "trace.json").read_bytes())
            spans = tracing.read_worker_ranges(self._spans.name)
            spans = [s for s in spans if s.end > self._started and s.start < ended]
            _add_workers(trace, spans, self._marks)
            write_json(self._path, trace, indent=None)
        except (OSError, ValueError) as error:  # a full disk, or what torch wrote is no trace
            self._say(f"--profile: {self._path} cannot be written ({error}); training continues")
        else:
            where = ", on the host" if self._cuda else ""  # which does not wait for the GPU
            steps = "1 step" if self._recorded == 1 else f"{self._recorded} steps"
            self._say(
                f"trace of {steps}: {self._path} (ui.perfetto.dev or chrome://tracing opens it); "
                f"of a step{where}: {_shares(trace, ended - self._started)}"
            )
        finally:
            self._turn_off()

    def _turn_off(self) -> None:
        self._done = True
        self._torch = None
        tracing.stop_tracing()
        tracing.set_worker_trace_file(None)
        self._spans.close()

    def _new_torch_profiler(self) -> torch.profiler.profile:
        activities = [ProfilerActivity.CPU]
        if self._cuda:
            activities.append(ProfilerActivity.CUDA)
        return torch.profiler.profile(activities=activities)


def _mark() -> tuple[int, int]:
    """A mark in the trace, between two readings of the workers' clock."""
    before = time.perf_counter_ns()
    with record_function(_CLOCK):
        pass
    return before, time.perf_counter_ns()


def _add_workers(
    trace: dict[str, Any], spans: list[tracing.WorkerRange], marks: list[tuple[int, int]]
) -> None:
    """Add a row per worker; the marks relate the trace's clock to theirs, and are removed."""
    events = trace["traceEvents"]
    seen = [event for event in events if event["name"] == _CLOCK]
    events[:] = [event for event in events if event["name"] != _CLOCK]
    seen.sort(key=lambda event: event["ts"])
    # Every mark bounds the difference of the two clocks from below and from above.
    low = max(before / 1e3 - event["ts"] for event, (before, _) in zip(seen, marks, strict=True))
    high = min(
        after / 1e3 - event["ts"] - event["dur"]
        for event, (_, after) in zip(seen, marks, strict=True)
    )
    ahead = (low + high) / 2
    for process in sorted({span.process for span in spans}):
        name = {"name": f"loader worker {process}"}
        row = {"ph": "M", "pid": process, "tid": process, "args": name}
        events += [row | {"name": "process_name"}, row | {"name": "thread_name"}]
    for span in spans:
        start, end = span.start / 1e3 - ahead, span.end / 1e3 - ahead
        row = {"pid": span.process, "tid": span.process, "ts": start, "dur": end - start}
        events.append({"ph": "X", "cat": "user_annotation", "name": span.name, **row})


def _shares(trace: dict[str, Any], nanoseconds: int) -> str:
    """Shares of the recorded time: "forward 31%, ..., other 2%"."""
    percent = dict.fromkeys(PARTS, 0.0)
    for event in trace["traceEvents"]:
        # On a GPU a range is there once more, as what the GPU did in it.
        if event["name"] in PARTS and event.get("cat") == "user_annotation":
            percent[event["name"]] += 100 * event["dur"] * 1e3 / nanoseconds
    named = [f"{PARTS[name]} {share:.0f}%" for name, share in percent.items()]
    return ", ".join([*named, f"other {100 - sum(percent.values()):.0f}%"])
