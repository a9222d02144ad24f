"""Start-up time and memory for many files.

    python benchmarks/startup.py --folder DISK/many --files 300000

Writes class folders of tiny JPEG files below --folder, a large and a small set, and measures
- the cold scan, in files per second,
- python -m fastaug.train --max-steps 1 with everything cached, from the start of the command to its
  end, with 1 and 2 ranks,
- the peak memory of a rank in these runs: RSS, and PSS, in which a page that two processes share
  counts half for each,
- the first batch of a new epoch, of the sampler only.
The differences between the two sets are slopes per million files. They are printed with what they
mean for 1.28 and 14 million files. The sets are deleted afterwards.
"""

from __future__ import annotations

import io
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from parts import results
from PIL import Image

from fastaug import cli
from fastaug.data.image_set import ImageSet
from fastaug.data.sampler import BatchSampler
from fastaug.errors import ConfigError
from fastaug.runtime.atomic import write_json

TRAINING = ("--dali", "--device", "cpu", "--max-steps", "1", "--model", "wrn-10-1", "--views", "2",
            "--batch-size", "32", "--size", "24", "--workers", "1")  # fmt: skip
TARGETS = (1_280_000, 14_000_000)
TEST_FILES = 20
SETTLE_SECONDS = 3.0
"""Modification times of folders are trusted after 2 seconds."""
EVERY = 0.1
"""Seconds between two samples of the memory."""
MIB = 2**20


@dataclass(frozen=True)
class Options:
    """Measure the start of a training with many files."""

    folder: str = ""
    """Where the files are written, below a new folder; default: the system's temporary folder."""
    files: int = 300_000
    """Training images of the large set."""
    few: int = 3_000
    """Training images of the small set."""
    classes: int = 1_000
    """Class folders."""
    ranks: tuple[int, ...] = (1, 2)
    """Numbers of ranks."""
    repeats: int = 3
    """Cached starts of each set; the fastest counts."""
    out: str = ""
    """Also write the results to this JSON file."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if not self.classes <= self.few < self.files:
            raise ConfigError(
                f"need --classes <= --few < --files, got {self.classes:,}, {self.few:,} and "
                f"{self.files:,}"
            )
        if self.repeats < 1 or not self.ranks or min(self.ranks) < 1:
            raise ConfigError("--repeats and --ranks must be at least 1")


class Start(NamedTuple):
    """A run of one step."""

    seconds: float
    cpu: float
    """Seconds of CPU time of all processes; depends less on what else the machine does."""
    rss: float
    """Peak of the largest rank, in MiB."""
    pss: float


class Line(NamedTuple):
    """A measure of the small and the large set."""

    name: str
    unit: str
    small: float
    large: float

    def per_million(self, options: Options) -> float:
        return 1e6 * (self.large - self.small) / (options.files - options.few)

    def at(self, files: int, options: Options) -> float:
        return self.small + self.per_million(options) * (files - options.few) / 1e6


def main(args: Sequence[str]) -> int:
    options = cli.parse(Options, args, prog="python benchmarks/startup.py")
    lines: list[Line] = []
    facts: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=options.folder or None) as made:
        folder = Path(made)
        environment = os.environ | {"FASTAUG_CACHE": str(folder / "cache")}
        sets = {"small": options.few, "large": options.files}
        for name, count in sets.items():
            write_set(folder / name, count, options.classes)
        time.sleep(SETTLE_SECONDS)
        small, large = (run_scan(folder / name, environment) for name in sets)
        lines.append(Line("cold scan", "s", small, large))
        facts["cold scan, files/s"] = 1e6 / lines[0].per_million(options)
        for ranks in options.ranks:
            starts = {
                name: cached_start(folder / name, ranks, options.repeats, environment)
                for name in sets
            }
            for field, unit in (("seconds", "s"), ("cpu", "s"), ("rss", "MiB"), ("pss", "MiB")):
                small, large = (getattr(start, field) for start in starts.values())
                lines.append(Line(f"{field}, {ranks} ranks", unit, small, large))
    for count in TARGETS:
        facts[f"first batch of a new epoch, {count:,} images, ms"] = 1e3 * first_batch(count)
    show(lines, facts, options)
    if options.out:
        write_json(Path(options.out), as_json(lines, facts, options))
    return 0


# --- measuring ---


def write_set(folder: Path, count: int, classes: int) -> None:
    """count training images, spread evenly over the classes, and a few test images."""
    encoded = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(encoded, "JPEG", quality=50)
    for split, images in (("train", count), ("val", TEST_FILES)):
        for label in range(min(classes, images)):
            place = folder / split / f"n{label:08}"
            place.mkdir(parents=True)
            for number in range(label, images, classes):
                name = f"{place}/n{label:08}_{number}.JPEG"
                with open(name, "wb", buffering=0) as file:
                    file.write(encoded.getbuffer())


def run_scan(data: Path, environment: Mapping[str, str]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "fastaug.scan", str(data)]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def cached_start(data: Path, ranks: int, repeats: int, environment: Mapping[str, str]) -> Start:
    """The best of some starts, after one that fills the caches."""
    starts = [one_start(data, ranks, environment) for _ in range(repeats + 1)][1:]
    return Start(*(min(values) for values in zip(*starts, strict=True)))


def one_start(data: Path, ranks: int, environment: Mapping[str, str]) -> Start:
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    out = data.parent / "run"
    command = [*launcher, "fastaug.train", "--data", str(data), *TRAINING, "--out", str(out)]
    begin, used = time.perf_counter(), cpu_seconds()
    rss = pss = 0.0
    with open(data.parent / "train.log", "w+") as log:
        training = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        while training.poll() is None:
            for process in [psutil.Process(training.pid), *children(training.pid)]:
                own = memory_of(process)
                rss, pss = max(rss, own[0]), max(pss, own[1])
            time.sleep(EVERY)
        seconds = time.perf_counter() - begin
        if training.returncode:
            log.seek(0)
            raise ConfigError(f"{' '.join(command)} failed: {log.read()[-2000:]}")
    shutil.rmtree(out)
    return Start(seconds, cpu_seconds() - used, rss, pss)


def cpu_seconds() -> float:
    """CPU time of the children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def memory_of(process: psutil.Process) -> tuple[float, float]:
    """RSS and PSS in MiB; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        values = dict(line.split(":", 1) for line in lines[1:])
        return tuple(int(values[name].split()[0]) / 1024 for name in ("Rss", "Pss"))  # type: ignore
    except (OSError, KeyError):
        return 0.0, 0.0


def first_batch(count: int) -> float:
    """Seconds until the sampler has the first batch of another epoch."""
    array = np.broadcast_to(np.zeros(3, np.uint8), (count, 1, 1, 3))
    images = ImageSet("many", ("a",), np.zeros(count, np.int64), array=array)
    sampler = BatchSampler(images, seed=0, train=True, images_per_batch=256)
    times = []
    for epoch in range(3):
        begin = time.perf_counter()
        next(iter(sampler.batches(images, epoch)))
        times.append(time.perf_counter() - begin)
    return min(times)


# --- reports ---


def show(lines: Sequence[Line], facts: Mapping[str, float], options: Options) -> None:
    machine = results.machine_name(results.describe_machine(torch.device("cpu")))
    print(f"{machine}; {options.few:,} and {options.files:,} files in {options.classes:,} classes")
    for name, value in facts.items():
        print(f"{name}: {value:,.1f}")
    far = "".join(f"{f'at {count:,}':>16}" for count in TARGETS)
    print(f"{'':24}{'small':>10}{'large':>10}{'per million':>14}{far}")
    for line in lines:
        values = [line.at(count, options) for count in TARGETS]
        print(
            f"{f'{line.name} ({line.unit})':24}{line.small:>10,.1f}{line.large:>10,.1f}"
            f"{line.per_million(options):>14,.1f}" + "".join(f"{v:>16,.1f}" for v in values)
        )


def as_json(lines: Sequence[Line], facts: Mapping[str, float], options: Options) -> dict[str, Any]:
    rows = [
        line._asdict()
        | {"per million": line.per_million(options)}
        | {f"at {count}": line.at(count, options) for count in TARGETS}
        for line in lines
    ]
    machine = results.describe_machine(torch.device("cpu"))
    return {"machine": machine, "options": asdict(options), "lines": rows, "facts": dict(facts)}


if __name__ == "__main__":
    sys.exit(cli.run(main))
