"""Kernel launches, host syncs and copies of a training step, and the peak memory of a run."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NamedTuple

import torch

from fastaug.diagnostics.gpu_report.pictures import shape_folder, small_training
from fastaug.diagnostics.gpu_report.recorder import Recorder, SkippedCheck
from fastaug.engine.profiling import PARTS
from fastaug.engine.trainer import Trainer

_MODELS = (("wrn-16-4", 32, "fp32"), ("resnet18", 64, "bf16"), ("nf_resnet50", 64, "bf16"))
_QUICK_MODELS = (("wrn-10-1", 16, "fp32"),)
_CALLS = ("cuda_runtime", "cuda_driver")
"""Categories of the trace that are calls of the host to CUDA."""


class StepCalls(NamedTuple):
    """Calls to CUDA in one step, on average."""

    launches: float
    graphs: float
    syncs: float
    copies: float


def launches_part(recorder: Recorder) -> None:
    columns = [("model", ""), ("precision", ""), ("kernel launches", "a step")]
    columns += [("graph launches", "a step"), ("host syncs", "a step"), ("copies", "a step")]
    recorder.table("launches", "Calls to CUDA", [*columns, ("peak memory", "MB")])
    data = shape_folder(recorder.folder / "shapes", train=16 if recorder.quick else 40, test=2)
    for model, size, precision in _QUICK_MODELS if recorder.quick else _MODELS:
        with recorder.check(model) as found:
            out = recorder.folder / model
            steps = 4 if recorder.quick else 12
            quick = {"batch_size": 8, "kernel": "reference"} if recorder.quick else {}
            # The metrics of each logged step are read, which is a host sync.
            settings = {"max_steps": steps, "log_every": 1000, "profile": True, "device": "cuda"}
            config = small_training(data, out, model=model, size=size, precision=precision)
            torch.cuda.reset_peak_memory_stats()
            Trainer(config.replace(**settings, **quick)).fit()
            memory = torch.cuda.max_memory_allocated() / 1e6
            calls = count_calls(json.loads((out / "trace.json").read_bytes()))
            if calls is None:
                recorder.row("launches", model, precision, None, None, None, None, memory)
                raise SkippedCheck("torch's profiler has recorded no calls to CUDA (CUPTI)")
            recorder.row("launches", model, precision, *calls, memory)
            found.append(f"{calls.launches:.0f} launches, {calls.syncs:.1f} host syncs a step")


def count_calls(trace: dict[str, Any]) -> StepCalls | None:
    """Calls in a trace of --profile between the start of the first range of a step and the end of
    the last one; None if the profiler recorded no calls."""
    events = trace["traceEvents"]
    ranges = [e for e in events if e["name"] in PARTS and e.get("cat") == "user_annotation"]
    steps = sum(event["name"] == "optimizer" for event in ranges)
    calls = [event for event in events if event.get("cat") in _CALLS]
    if not steps or not calls:
        return None
    start = min(event["ts"] for event in ranges)
    end = max(event["ts"] + event["dur"] for event in ranges)
    names = Counter(event["name"] for event in calls if start <= event["ts"] <= end)

    def per_step(kind: str) -> float:
        return sum(count for name, count in names.items() if kind in name) / steps

    kinds = ("LaunchKernel", "GraphLaunch", "Synchronize", "Memcpy")  # of StepCalls
    return StepCalls(*map(per_step, kinds))
