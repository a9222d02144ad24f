"""Images per second versus K: what another view costs, and where the time of a step goes.

    python benchmarks/throughput.py [--quick] [--data DATA] [--views 1 2 4 8 16]
    python benchmarks/throughput.py --parts loaders --data cifar-like --size 32 --crop pad \
        --views 16 --batch-size 64 --out benchmarks/results/cifar
    python benchmarks/throughput.py --compare before.csv after.csv

loaders: fastaug's three and what people use today, alone, on the same files, to the same output
(benchmarks/loader_contenders.py). stages: the parts of a training step, each by itself, and whole
steps with the real loader and with synthetic views (benchmarks/stages.py). All take turns in
rounds, in a new order each round. A batch has --batch-size views whatever K is, as in training.
The files lie in the system's cache: reading from storage is not measured.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import records
import throughput_rows as table
from loader_contenders import LOADERS, OWN, Own
from throughput_compare import compare
from throughput_plot import draw
from throughput_report import show
from throughput_run import Benchmark

from fastaug import cli
from fastaug.errors import ConfigError, suggest

Policy = Literal["crop-flip", "randaugment"]


@dataclass(frozen=True)
class Options:
    """Images per second versus K, of the loaders and of training steps, and their parts."""

    views: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of views K; each must divide --batch-size."""
    data: str = ""
    """What --data of the training takes, or a folder of images; default: 256 photo-like JPEGs of
    about 500 x 375, made once and cached; cifar-like: images of 32 px cut out of them, as many as
    CIFAR has, in memory, for --size 32 --crop pad."""
    parts: tuple[Literal["loaders", "stages"], ...] = ("loaders", "stages")
    """loaders: side by side, alone; stages: a training step and its parts."""
    loaders: tuple[str, ...] = ()
    """Loaders to measure: "fastaug fused", "fastaug dali operators", "fastaug torch",
    "torchvision, one decode", "torchvision, K decodes", "timm, K decodes", "ffcv"; default: all."""
    policies: tuple[Policy, ...] = ("crop-flip", "randaugment")
    """What makes a view; the stages take the first one."""
    crop: Literal["resized", "pad"] = "resized"
    """As --crop of the training."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How all loaders but ffcv resize a crop; the default is torchvision's, the training's own is
    bicubic without antialiasing."""
    antialias: bool = True
    """They antialias it, as torchvision does by default. Without it timm takes no part: it always
    does."""
    randaugment_layers: int = 2
    """Operations of RandAugment."""
    randaugment_magnitude: float = 5.0
    """Their strength, 0 to 10."""
    loader: Own = "fused"
    """Of the stages. fused and dali: --loader dali of the training with that --views-engine."""
    model: str = ""
    """As --model of the training; default: nf_resnet50 on a GPU, nf_resnet26 on a CPU."""
    classes: int = 1000
    """C, outputs of the network."""
    size: int = 224
    """Side of a view in pixels."""
    batch_size: int = 0
    """Views in a batch; 0: 256 on a GPU, 32 on a CPU."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of the network; auto: bf16 on a GPU, fp32 on a CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    workers: int = 0
    """Threads or processes of each loader; 0: as many as cores."""
    repeats: int = 5
    """Rounds; each thing is timed once in each."""
    turn_seconds: float = 0.7
    """About what is timed of each thing in a round, after as long to settle."""
    quick: bool = False
    """Under a minute: K of 1 and 8, four loaders, crop and flip, small views, few rounds; other
    flags change single values."""
    out: str = "benchmarks/results"
    """Folder of throughput.csv, to which rows are added, and of throughput.png."""
    compare: tuple[str, ...] = ()
    """Measure nothing: ratios of the latest run in the second file to that in the first; of one
    file: of its last two. Exit code 1 if something became slower beyond the noise."""
    plot_only: bool = False
    """Measure nothing: draw throughput.png from the latest run in throughput.csv."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        for flag, values, least in (
            ("--views", self.views, 1),
            ("--classes", (self.classes,), 2),
            ("--batch-size", (self.batch_size,), 0),
            ("--workers", (self.workers,), 0),
            ("--repeats", (self.repeats,), 1),
        ):
            if not values:
                raise ConfigError(f"{flag} needs at least one number")
            if wrong := [value for value in values if value < least]:
                raise ConfigError(f"{flag} must be at least {least}, got {wrong[0]}")
        if not self.policies or not self.parts:
            raise ConfigError("--policies and --parts need at least one name each")
        if not 0 < self.turn_seconds <= 60:
            raise ConfigError(f"--turn-seconds must be between 0 and 60, got {self.turn_seconds}")
        for name in self.loaders:
            if name not in LOADERS:
                raise ConfigError(f"--loaders: unknown {name!r}: {suggest(name, LOADERS)}")
        if len(self.compare) > 2:
            raise ConfigError(f"--compare takes one or two files, got {len(self.compare)}")


QUICK = Options(
    views=(1, 8),
    loaders=(*OWN.values(), "torchvision, one decode"),
    policies=("crop-flip",),
    size=64,
    batch_size=16,
    repeats=3,
    turn_seconds=0.1,
    model="nf_resnet26",
)
"""What --quick stands for."""


def parse(args: Sequence[str]) -> Options:
    default = QUICK if "--quick" in args else Options()
    return cli.parse(Options, args, prog="python benchmarks/throughput.py", default=default)


def main(args: Sequence[str]) -> int:
    options = parse(args)
    folder = Path(options.out).expanduser()
    if options.compare:
        return compare([Path(name).expanduser() for name in options.compare])
    if options.plot_only:
        conclude(folder)
        return 0
    benchmark = Benchmark(options)
    file = records.Records(folder / f"{table.NAME}.csv", table.COLUMNS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cluster's Ctrl-C
    try:
        benchmark.run()
    finally:  # interrupted: what was measured until then
        if rows := benchmark.rows():
            file.append(rows)
            conclude(folder, rows[0]["date"])
    return 0


def conclude(folder: Path, date: str = "") -> None:
    """What the run of that date, or the latest one, says; its picture."""
    file, picture = folder / f"{table.NAME}.csv", folder / f"{table.NAME}.png"
    rows = records.read(file, table.COLUMNS)
    if not rows:
        raise ConfigError(f"{file}: holds no run yet; measure one first")
    run = records.run(rows, date)
    show(run)
    print(f"rows: {file}, {len(run)} of this run")
    try:
        if draw(run, picture):
            print(f"picture: {picture}")
    except OSError as error:
        raise ConfigError(f"{picture}: cannot be written ({error.strerror})") from error


if __name__ == "__main__":
    sys.exit(cli.run(main))
