"""The model of benchmarks/step_model.py for the CPU at hand, beside what was measured on it.

Its inputs are measured: rates by probes that are no part of any network, and of throughput.csv one
decode and one loader row. Loader and training share the cores.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import records
import torch
from step_model import (
    OBJECTIVE_OPERATIONS,
    Rates,
    Work,
    objective_seconds,
    optimizer_seconds,
    roofline,
    view_seconds,
)
from timing import seconds_of
from torch.nn import functional as F

from fastaug.errors import ConfigError


@dataclass(frozen=True)
class CpuInputs:
    """What this machine does, measured now on operations that are no part of any network."""

    flops: float
    """Of one 3x3 convolution, 64 to 64 channels, 16 images of 56x56."""
    bandwidth: tuple[tuple[float, float], ...]
    """(bytes read and written, bytes/s) of relu: caches and page faults make it depend on size."""
    launch: float
    """Seconds of an addition of two numbers."""
    parallel: float
    """Seconds of a relu of 1 MB: milliseconds, if others keep a core busy that a thread needs."""


BUSY = 5e-4
"""A relu of 1 MB that takes more seconds had to wait for others; it takes 2e-5 by itself."""


def cpu_inputs(precision: str = "fp32", seconds: float = 0.3) -> CpuInputs:
    """With torch's present number of threads, each from the quickest of its calls.

    Waits up to 20 s for a quiet moment: a thread that has to share its core slows both, a hundred
    times in short operations.
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
    return CpuInputs(flops / convolution, tuple(bandwidth), launch, 1e6 / bandwidth[1][1])


def _quickest(call: Callable[[], object], seconds: float) -> float:
    cpu = torch.device("cpu")
    first = max(seconds_of(call, 2, cpu) / 2, 1e-7)
    loops = max(1, int(1e-4 / first))  # long enough to be timed
    rounds = max(3, min(1000, int(seconds / (first * loops))))
    return min(seconds_of(call, loops, cpu) / loops for _ in range(rounds))


class Stage(NamedTuple):
    """A part of a step, as benchmarks/throughput.py names it; K is 0 where it is all the same."""

    contender: str
    policy: str
    k: int


READ = (
    *("date", "cpu", "threads", "device", "model", "classes", "size", "batch_size", "precision"),
    *("workers", "part", "contender", "policy", "K", "quantity", "median", "status"),
)
"""The columns of throughput.csv that are used."""


def read_stages(path: Path) -> tuple[dict[str, str], dict[Stage, float]]:
    """Of the last run of stages on this CPU: a row, for its settings, and seconds for a batch."""
    first = f"first run: python benchmarks/throughput.py --parts stages --out {path.parent}"
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"--check {path}: {error.strerror}; {first}") from error
    if missing := [name for name in READ if rows and name not in rows[0]]:
        raise ConfigError(f"--check {path}: has no column {missing[0]}; {first}")
    wanted = {"part": "stages", "device": "cpu", "quantity": "time", "status": "ok"}
    wanted["cpu"] = records.cpu_name()
    rows = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    if not rows:
        raise ConfigError(f"--check {path}: no stages measured on this CPU; {first}")
    last = records.run(rows)
    found = {
        Stage(row["contender"], row["policy"], int(row["K"] or 0)): float(row["median"]) / 1e3
        for row in last
    }
    if missing := {"decode", "loader", "forward"} - {stage.contender for stage in found}:
        raise ConfigError(f"--check {path}: its last run has no {min(missing)}; {first}")
    return last[0], found


class Cores(NamedTuple):
    """Threads of torch, threads or processes of the loader, and cores for both."""

    threads: int
    workers: int
    cores: int

    def together(self, training: float, loader: float) -> float:
        """Seconds of both at once: no shorter than either, nor than the cores' share of the sum."""
        work = self.threads * training + self.workers * loader
        return max(training, loader, work / self.cores)


def cpu_seconds(work: Work, rates: Rates, k: int, cores: Cores) -> dict[str, float]:
    """The same on a CPU, by the names of benchmarks/throughput.py.

    rates.decode and rates.views are of all workers together. Operations wait for their launch.
    """
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
    """Seconds of a stage: from the probes alone, with the network's share of them, measured."""

    stage: Stage
    predicted: float
    calibrated: float
    measured: float


class Comparison(NamedTuple):
    inputs: tuple[Stage, ...]
    """What was measured and is an input of both predictions; forward is one of the second alone."""
    share: float
    """Of what the probes do in a second, that the network's forward pass does."""
    lines: list[Line]


def compare(
    work: Work, cpu: CpuInputs, measured: Mapping[Stage, float], cores: Cores
) -> Comparison:
    """The loader's inputs are two rows: decode at the smallest K, the loader at the largest.

    There an image, and here a view, is most of the time: the difference of two large numbers would
    be noise.
    """
    decode, loader = (
        extreme((stage for stage in measured if stage.contender == name), key=lambda stage: stage.k)
        for name, extreme in (("decode", min), ("loader", max))
    )
    an_image = max(decode.k, 1) * measured[decode] / work.views
    a_view = max(1e-9, measured[loader] / work.views - an_image / max(loader.k, 1))
    probes = Rates(
        flops=cpu.flops,
        memory=cpu.bandwidth[-1][1],
        memory_by_size=cpu.bandwidth,
        launch=cpu.launch,
        decode=1 / an_image,
        views=1 / a_view,
    )
    forward = Stage("forward", "", 0)
    share = cpu_seconds(work, probes, 1, cores)["forward"] / measured[forward]
    slower = replace(
        probes,
        flops=share * probes.flops,
        memory=share * probes.memory,
        memory_by_size=tuple((size, share * rate) for size, rate in cpu.bandwidth),
        launch=probes.launch / share,
    )
    lines = []
    for stage in sorted(measured, key=lambda stage: (stage.k, stage.contender)):
        # A loader row of another policy would need that policy's view as an input.
        if stage in (decode, loader) or stage.policy not in ("", loader.policy):
            continue
        of = [cpu_seconds(work, rates, stage.k or 1, cores) for rates in (probes, slower)]
        if stage.contender in of[0]:
            predicted, calibrated = (seconds[stage.contender] for seconds in of)
            lines.append(Line(stage, predicted, calibrated, measured[stage]))
    return Comparison((decode, loader), share, lines)
