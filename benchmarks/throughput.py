"""Images per second versus K: the cost of another view, and the parts of a step's time.

    python benchmarks/throughput.py [--quick] [--data DATA] [--views 1 2 4 8 16]
    python benchmarks/throughput.py --parts loaders --data cifar-like --size 32 --crop pad \
        --views 16 --batch-size 64 --out benchmarks/results/cifar
    python benchmarks/throughput.py --compare before.csv after.csv

loaders: fastaug's three and commonly used ones, without training, on the same files, with the same
output (benchmarks/parts/loaders.py), in a process as any training loop has it. stages: the parts of
a training step, each by itself, and whole steps with the real loader and with synthetic views
(benchmarks/parts/stages.py), in a process that keeps freed memory, as fastaug.train does. Within
each of the two, all take turns in rounds, in a new order each round. A batch has --batch-size views
at every K, as in training. The files are in the page cache: reading from storage is not measured.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from parts import command, results, throughput_tables, timing
from parts import throughput_rows as rows
from parts.loaders import LOADERS, OWN, Own, check_batch, decode_only, training_loader
from parts.plotting import draw_throughput, draw_view_cost
from parts.stages import DECODE, LOADER, STEP, Stages
from parts.throughput_rows import Key
from parts.timing import Memory, Stream, Turn, UnfitError, status_of
from rich.progress import Progress

from fastaug import cli
from fastaug.config import TrainConfig
from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.scan import scan_and_check
from fastaug.data.sources import DataSource, open_flat
from fastaug.diagnostics.photos import cifar_like, photo_folder
from fastaug.errors import ConfigError, suggest
from fastaug.runtime.arithmetic import set_arithmetic
from fastaug.runtime.cores import core_count
from fastaug.runtime.device import avoid_broken_cpu_arithmetic, keep_freed_memory, use_device

CHECKED = 3
"""Batches of each loader that are checked before it is timed."""


@dataclass(frozen=True)
class Options:
    """Images per second versus K, of loaders and of training steps, and their parts."""

    views: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of views K; each must divide --batch-size."""
    data: str = ""
    """Data, as for fastaug.train, or a folder of images. Default: 256 photo-like JPEGs of about
    500 x 375, generated once and cached; cifar-like: 32 px crops of them, the number of CIFAR's
    images, in memory, for --size 32 --crop pad."""
    parts: tuple[Literal["loaders", "stages"], ...] = ("loaders", "stages")
    """loaders: loaders without training; stages: a training step and its parts."""
    loaders: tuple[str, ...] = ()
    """Loaders to measure: "fastaug fused", "fastaug dali operators", "fastaug torch",
    "torchvision, one decode", "torchvision, K decodes", "timm, K decodes", "ffcv"; default: all."""
    policies: tuple[Literal["crop-flip", "randaugment"], ...] = ("crop-flip", "randaugment")
    """Augmentation of a view; the stages use the first one."""
    crop: Literal["resized", "pad"] = "resized"
    """Crop, as for fastaug.train."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How all loaders except ffcv resize a crop. The default is torchvision's; that of
    fastaug.train is bicubic without antialiasing."""
    antialias: bool = True
    """Antialias crops, torchvision's default. timm always does, and is skipped without it."""
    randaugment_layers: int = 2
    """Number of RandAugment's operations."""
    randaugment_magnitude: float = 5.0
    """Magnitude of RandAugment, 0 to 10."""
    loader: Own = "fused"
    """Loader of the stages. fused and dali: --loader dali of fastaug.train with that
    --views-engine."""
    model: str = ""
    """Model, as for fastaug.train; default: nf_resnet50 on a GPU, nf_resnet26 on a CPU."""
    classes: int = 1000
    """Outputs of the network, C."""
    size: int = 224
    """Side of a view in pixels."""
    batch_size: int = 0
    """Views in a batch; 0: 256 on a GPU, 32 on a CPU."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Precision of the network; auto: bf16 on a GPU, fp32 on a CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    workers: int = 0
    """Threads or processes of each loader; 0: the number of cores."""
    repeats: int = 5
    """Rounds; everything is timed once per round."""
    turn_seconds: float = 0.7
    """Approximate duration of a turn, after the same time to settle."""
    quick: bool = False
    """Takes under a minute: K of 1 and 8, four loaders, crop and flip, small views, few rounds.
    Other flags override single values."""
    out: str = "benchmarks/results"
    """Folder of throughput.csv, to which rows are appended, and of throughput.png."""
    compare: tuple[str, ...] = ()
    """Do not measure: compare the last run of the second file with that of the first, or the last
    two runs of one file. Exit code 1 if something became slower by more than the noise."""
    plot_only: bool = False
    """Do not measure: draw throughput.png from the last run in throughput.csv."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        command.check_at_least(
            {
                "--views": (self.views, 1),
                "--classes": ((self.classes,), 2),
                "--batch-size": ((self.batch_size,), 0),
                "--workers": ((self.workers,), 0),
                "--repeats": ((self.repeats,), 1),
            }
        )
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
"""Defaults with --quick."""


def main(args: Sequence[str]) -> int:
    options = command.parse(QUICK, args, "throughput.py")
    path = Path(options.out).expanduser() / f"{rows.NAME}.csv"
    if options.compare:
        return throughput_tables.compare(*_two_runs(options.compare))
    if options.plot_only:
        conclude(path)
        return 0
    benchmark = Benchmark(options)
    file = results.ResultFile(path, rows.COLUMNS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cluster's Ctrl-C
    try:
        benchmark.run()
    finally:  # after an interrupt: what was measured so far
        if found := benchmark.rows():
            file.append(found)
            conclude(path, found[0]["date"])
    return 0


def conclude(path: Path, date: str = "") -> None:
    """Print and draw the run of that date, or the last one."""
    found = results.read(path, rows.COLUMNS)
    if not found:
        raise ConfigError(f"{path}: has no run yet; measure one first")
    run = results.select_run(found, date)
    throughput_tables.show(run)
    print(f"results: {path}, {len(run)} rows of this run")
    draw_throughput(run, path.with_suffix(".png"))
    draw_view_cost(run, path.with_name("view-cost.png"))


def _two_runs(names: Sequence[str]) -> list[list[dict[str, str]]]:
    paths = [Path(name).expanduser() for name in names]
    found = [results.read(path, rows.COLUMNS) for path in paths]
    for path, read in zip(paths, found, strict=True):
        if not read:
            raise ConfigError(f"--compare {path}: has no run")
    if len({path.resolve() for path in paths}) == 2:
        return [results.select_run(read) for read in found]
    dates = list(dict.fromkeys(row["date"] for row in found[0]))
    if len(dates) < 2:
        raise ConfigError(f"--compare {paths[0]}: has only one run; give a second file")
    return [results.select_run(found[0], date) for date in dates[-2:]]


Plans = dict[Key, Callable[[Key], None]]
"""What to measure, and how to build it."""


class Benchmark:
    """One run: all of a part is built, then takes turns. rows() works after an interrupt too."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._device = use_device(options.device)
        self._base = _config(options, self._device)
        for views in options.views:
            self._base.replace(views=views)  # a K that does not divide the batch is an error now
        set_arithmetic(self._device, self._base.run.precision)
        avoid_broken_cpu_arithmetic(self._device, self._base.run.precision)
        self._images = _open_images(options)
        self._about = _describe_run(options, self._base, self._device)
        self._stages: Stages | None = None
        self._measures: dict[Key, Callable[[], Turn]] = {}
        self._memory: dict[Key, Memory] = {}
        self._samples: dict[Key, list[Turn]] = {}
        self._failures: list[rows.Row] = []

    def rows(self) -> list[rows.Row]:
        """Rows of what was measured so far."""
        memory, per_batch = self._memory, self._base.optim.batch_size
        found = rows.make_rows(self._samples, memory, per_batch, core_count())
        return [self._about | row for row in (*found, *self._failures)]

    def run(self) -> None:
        with command.progress_bar("throughput:") as bar, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # raised inside the other libraries
            if rows.LOADERS in self._options.parts:
                self._measure(self._loader_plans(), bar)
            if rows.STAGES in self._options.parts:  # last: what it sets cannot be undone
                keep_freed_memory(self._device)
                self._measure(self._stage_plans(), bar)

    def _measure(self, plans: Plans, bar: Progress) -> None:
        self._measures = {}
        self._build(plans, bar)
        self._take_turns(bar)

    def _build(self, plans: Plans, bar: Progress) -> None:
        task = bar.add_task("", total=len(plans))
        for key, build in plans.items():
            bar.update(task, description=f"preparing {key}")
            try:
                build(key)
            except ConfigError:  # for example an unknown model
                raise
            except Exception as error:  # any kind: a contender that cannot run is a row
                self._failures.append(rows.failure(key, status_of(error)))
            bar.advance(task)
        bar.remove_task(task)

    def _loader_plans(self) -> Plans:
        options = self._options
        plans: Plans = {
            Key(rows.LOADERS, name, policy, k): self._build_loader
            for policy in options.policies
            for name in options.loaders or LOADERS
            for k in options.views
        }
        # The cost of a view is relative to a decode of the same round.
        return plans | (self._decoder_plans() if rows.STAGES in options.parts else {})

    def _stage_plans(self) -> Plans:
        policy = self._options.policies[0]
        plans: Plans = {Key(rows.STAGES, "network"): self._build_network}
        if rows.LOADERS not in self._options.parts:
            plans |= self._decoder_plans()
        for k in self._options.views:
            plans[Key(rows.STAGES, LOADER, policy, k)] = self._build_loader
            plans[Key(rows.STAGES, STEP, policy, k)] = self._build_training
        return plans

    def _decoder_plans(self) -> Plans:
        keys = (Key(rows.STAGES, DECODE, "", k) for k in self._options.views)
        return dict.fromkeys(keys, self._build_decoder)

    def _build_loader(self, key: Key) -> None:
        config = self._config(key)
        batch = config.optim.batch_size * config.view.size**2 * 3 * 4
        ahead = 3 * config.data.prefetch + 2 * config.data.workers
        timing.check_memory(batch * ahead, torch.device("cpu"), "prefetched batches take")
        name = OWN[self._options.loader] if key.contender == LOADER else key.contender
        stream = LOADERS[name](self._images, config, self._device)
        with closing(stream.batches()) as batches:
            for batch in itertools.islice(batches, CHECKED):
                check_batch(batch, config)
        self._add_stream(key, stream)

    def _build_decoder(self, key: Key) -> None:
        config = self._config(key)
        self._add_stream(key, decode_only(self._images, config, self._device, config.data.loader))

    def _build_network(self, _key: Key) -> None:
        stages = Stages(self._base, self._options.classes, self._device)
        for name, call in stages.of_any_k().items():
            self._add_call(Key(rows.STAGES, name), call)
        for k in self._options.views:
            for name, call in stages.of_k(k).items():
                self._add_call(Key(rows.STAGES, name, "", k), call)
        self._stages = stages

    def _build_training(self, key: Key) -> None:
        if self._stages is None:
            raise UnfitError("needs the network, which could not be built")
        config = self._config(key)
        own = LOADERS[OWN[self._options.loader]](self._images, config, self._device)
        self._add_stream(key, self._stages.training(config, self._images, own.ahead))

    def _config(self, key: Key) -> TrainConfig:
        return self._base.replace(views=key.K, augment=key.policy or self._options.policies[0])

    def _add_stream(self, key: Key, stream: Stream) -> None:
        seconds = self._options.turn_seconds
        count, self._memory[key] = timing.first_turn(stream, self._device, seconds)
        self._measures[key] = partial(timing.turn, stream, count, self._device, seconds)

    def _add_call(self, key: Key, call: Callable[[], object]) -> None:
        taken = timing.repeat(call, 1, self._device).seconds
        count = max(1, math.ceil(self._options.turn_seconds / taken))
        self._measures[key] = partial(timing.repeat, call, count, self._device)

    def _take_turns(self, bar: Progress) -> None:
        rounds, current = self._options.repeats, 0
        task = bar.add_task("", total=rounds * len(self._measures))

        def on_round(done: int) -> None:
            nonlocal current
            current = done + 1
            if bar.disable:
                print(f"round {current} of {rounds}", file=sys.stderr)

        def on_turn(key: Key) -> None:
            bar.update(task, description=f"round {current} of {rounds}, {key}", advance=1)

        failed = timing.interleave(
            self._measures, self._samples, rounds=rounds, on_round=on_round, on_turn=on_turn
        )
        self._failures += [rows.failure(key, status_of(error)) for key, error in failed.items()]


def _open_images(options: Options) -> ImageSet:
    data = options.data
    if not data:
        data = str(photo_folder())
    elif data == "cifar-like":
        data = str(cifar_like())
    images = scan_and_check(open_flat(DataConfig(data)) or DataSource(DataConfig(data)).train)
    if len(images.classes) > options.classes:
        raise ConfigError(f"--classes {options.classes}: {data} has {len(images.classes)} classes")
    return images


def _config(options: Options, device: torch.device) -> TrainConfig:
    gpu = device.type == "cuda"
    precision = options.precision
    if precision == "auto":
        precision = "bf16" if gpu else "fp32"
    loader, engine = training_loader(options.loader)
    return TrainConfig.from_flat(
        data=options.data or "photos",
        loader=loader,
        views_engine=engine,
        model=options.model or ("nf_resnet50" if gpu else "nf_resnet26"),
        size=options.size,
        views=1,
        batch_size=options.batch_size or (256 if gpu else 32),
        precision=precision,
        device=str(device),
        workers=options.workers or core_count(),
        crop=options.crop,
        crop_area=(0.08, 1.0),
        interpolation=options.interpolation,
        antialias=options.antialias,
        randaugment_layers=options.randaugment_layers,
        randaugment_magnitude=options.randaugment_magnitude,
    )


def _describe_run(options: Options, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """The columns that are the same in all rows of the run."""
    versions = {}
    for column in rows.PACKAGES:
        try:
            package = "nvidia-dali-cuda120" if column == "dali" else column
            versions[column] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[column] = ""
    # A training names its loader differently, and finds its number of classes in the data.
    own = {"loader": options.loader, "classes": options.classes}
    return {
        **results.describe_machine(device),
        **versions,
        "benchmark": rows.NAME,
        **{name: config.get(name) for name in rows.SETTINGS if name not in own},
        **own,
    }


if __name__ == "__main__":
    sys.exit(cli.run(main))
