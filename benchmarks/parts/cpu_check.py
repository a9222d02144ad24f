"""The model of a step (fastaug.diagnostics.step_model) for this CPU, compared with measurements.

Its inputs are measured: rates by probes that are not part of any network, and one decode and one
loader row of throughput.csv. Loader and training share the cores.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

from fastaug.diagnostics.step_model import (
    OBJECTIVE_OPERATIONS,
    Rates,
    Work,
    objective_seconds,
    optimizer_seconds,
    roofline,
    view_seconds,
)
from fastaug.errors import ConfigError
from parts import results
from parts.timing import seconds_of

BUSY = 5e-4
"""Seconds; a relu of 1 MB takes 2e-5 on idle cores."""


@dataclass(frozen=True)
class Probes:
    """Speed of this machine, measured now."""

    flops: float
    """FLOP/s of a 3x3 convolution, 64 to 64 channels, 16 images of 56x56."""
    bandwidth: tuple[tuple[float, float], ...]
    """(bytes read and written, bytes/s) of relu: caches and page faults make it depend on size."""
    launch: float
    """Seconds of an addition of two numbers."""
    parallel: float
    """Seconds of a relu of 1 MB: milliseconds if other programs keep a core busy."""


def run_probes(precision: str = "fp32", seconds: float = 0.3) -> Probes:
    """Minimum over many calls, with torch's current number of threads.

    Waits up to 20 s for idle cores: a thread that shares its core slows short operations a hundred
    times.
    """
    megabyte = torch.randn(125_000)
    for _ in range(20):
        if _quickest(lambda: torch.relu(megabyte), 0.05) < BUSY:
            break
        time.sleep(1)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    images = torch.randn(16, 64, 56, 56, dtype=dtype).to(memory_format=torch.channels_last)
    kernel = torch.randn(64, 64, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)
    flops = 2 * images.numel() * kernel[0].numel()
    with torch.no_grad():
        convolution = _quickest(lambda: F.conv2d(images, kernel, padding=1), seconds)
        bandwidth = []
        for size in (1e5, 1e6, 4e6, 16e6, 64e6, 256e6):
            x = torch.randn(int(size / 8))  # read and written, 4 bytes each
            bandwidth.append((size, size / _quickest(lambda x=x: torch.relu(x), seconds)))
        one = torch.zeros(1)
        launch = _quickest(lambda: one + 1, seconds)
    return Probes(flops / convolution, tuple(bandwidth), launch, 1e6 / bandwidth[1][1])


def _quickest(call: Callable[[], object], seconds: float) -> float:
    cpu = torch.device("cpu")
    first = max(seconds_of(call, 2, cpu) / 2, 1e-7)
    loops = max(1, int(1e-4 / first))  # long enough to be timed
    rounds = max(3, min(1000, int(seconds / (first * loops))))
    return min(seconds_of(call, loops, cpu) / loops for _ in range(rounds))


class Stage(NamedTuple):
    """A part of a step, as benchmarks/throughput.py names it; k is 0 if it does not depend on K."""

    contender: str
    policy: str
    k: int


READ = (
    *("date", "cpu", "threads", "device", "model", "classes", "size", "batch_size", "precision"),
    *("workers", "part", "contender", "policy", "K", "quantity", "median", "status"),
)
"""Columns of throughput.csv that are used."""


def read_stages(path: Path) -> tuple[dict[str, str], dict[Stage, float]]:
    """The last run of stages on this CPU: one row, for its settings, and seconds per batch."""
    hint = f"first run: python benchmarks/throughput.py --parts stages --out {path.parent}"
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"--check {path}: {error.strerror}; {hint}") from error
    if missing := [name for name in READ if rows and name not in rows[0]]:
        raise ConfigError(f"--check {path}: has no column {missing[0]}; {hint}")
    wanted = {"part": "stages", "device": "cpu", "quantity": "time", "status": "ok"}
    wanted["cpu"] = results.cpu_name()
    rows = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    if not rows:
        raise ConfigError(f"--check {path}: no stages measured on this CPU; {hint}")
    last = results.select_run(rows)
    found = {
        Stage(row["contender"], row["policy"], int(row["K"] or 0)): float(row["median"]) / 1e3
        for row in last
    }
    if absent := {"decode", "loader", "forward"} - {stage.contender for stage in found}:
        raise ConfigError(f"--check {path}: its last run has no {min(absent)}; {hint}")
    return last[0], found


class Cores(NamedTuple):
    threads: int
    """Threads of torch."""
    workers: int
    """Threads or processes of the loader."""
    cores: int

    def together(self, training: float, loader: float) -> float:
        """Seconds of both at once: at least either, and the cores' share of the sum."""
        work = self.threads * training + self.workers * loader
        return max(training, loader, work / self.cores)


def stage_seconds(work: Work, rates: Rates, k: int, cores: Cores) -> dict[str, float]:
    """Predicted seconds of each stage. rates.decode and rates.views are of all workers."""
    forward = sum(roofline(work.forward, rates)) + rates.launch * len(work.forward)
    backward = sum(roofline(work.backward, rates)) + rates.launch * len(work.backward)
    objective = objective_seconds(work, rates) + rates.launch * OBJECTIVE_OPERATIONS
    optimizer = optimizer_seconds(work, rates)
    loader = work.views / k / rates.decode + view_seconds(work, rates)
    synthetic = forward + backward + objective + optimizer
    return {
        "loader": loader,
        "forward": forward,
        "forward+backward": forward + backward,
        "objective": objective,
        "optimizer": optimizer,
        "bare step": forward + backward + optimizer,
        "step, synthetic views": synthetic,
        "step": cores.together(synthetic, loader),
    }


class Line(NamedTuple):
    """Seconds of a stage: predicted from the probes, calibrated on forward, and measured."""

    stage: Stage
    predicted: float
    calibrated: float
    measured: float


class Comparison(NamedTuple):
    inputs: tuple[Stage, ...]
    """Measured stages that are inputs of both predictions; forward is one of the second only."""
    share: float
    """Speed of the network's forward pass relative to the probes."""
    lines: list[Line]


def compare(
    work: Work, probes: Probes, measured: Mapping[Stage, float], cores: Cores
) -> Comparison:
    """The loader's inputs are decode at the smallest K and the loader at the largest.

    There an image, and here a view, takes most of the time: the difference of two large numbers
    would be noise.
    """
    decode, loader = (
        extreme((stage for stage in measured if stage.contender == name), key=lambda stage: stage.k)
        for name, extreme in (("decode", min), ("loader", max))
    )
    an_image = max(decode.k, 1) * measured[decode] / work.views
    a_view = max(1e-9, measured[loader] / work.views - an_image / max(loader.k, 1))
    full = Rates(
        flops=probes.flops,
        memory=probes.bandwidth[-1][1],
        memory_by_size=probes.bandwidth,
        launch=probes.launch,
        decode=1 / an_image,
        views=1 / a_view,
    )
    share = stage_seconds(work, full, 1, cores)["forward"] / measured[Stage("forward", "", 0)]
    slower = replace(
        full,
        flops=share * full.flops,
        memory=share * full.memory,
        memory_by_size=tuple((size, share * rate) for size, rate in probes.bandwidth),
        launch=full.launch / share,
    )
    lines = []
    for stage in sorted(measured, key=lambda stage: (stage.k, stage.contender)):
        # A loader row of another policy would need that policy's view as an input.
        if stage in (decode, loader) or stage.policy not in ("", loader.policy):
            continue
        both = [stage_seconds(work, rates, stage.k or 1, cores) for rates in (full, slower)]
        if stage.contender in both[0]:
            predicted, calibrated = (seconds[stage.contender] for seconds in both)
            lines.append(Line(stage, predicted, calibrated, measured[stage]))
    return Comparison((decode, loader), share, lines)
