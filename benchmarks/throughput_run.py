"""A run of benchmarks/throughput.py: everything is built first, then takes turns."""

from __future__ import annotations

import importlib.metadata
import math
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import records
import throughput_rows as table
import timing
import torch
from loader_contenders import LOADERS, OWN, TRAINED_WITH, decode_only
from loader_parts import check
from photos import cifar_like, photo_folder
from progress import progress_bar
from rich.progress import Progress
from stages import DECODE, LOADER, STEP, Stages
from throughput_rows import Key
from timing import Unfit
from turns import Memory, Stream, Turn, check_memory, first_batches, first_turn, repeat, turn

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.scan import scan_images
from fastaug.data.sources import open_split_or_flat
from fastaug.errors import ConfigError
from fastaug.runtime.cores import core_count
from fastaug.runtime.device import avoid_broken_cpu_arithmetic, keep_freed_memory, resolve_device

if TYPE_CHECKING:
    from throughput import Options


CHECKED = 3
"""Batches of a loader that are looked at before it is timed: that takes longer than small ones."""


class Benchmark:
    """What was measured is in rows(), also after an interrupt."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._device = resolve_device(options.device)
        self._base = _config(options, self._device)
        for views in options.views:
            self._base.replace(views=views)  # a K that does not divide the batch is an error now
        avoid_broken_cpu_arithmetic(self._device, self._base.run.precision)
        keep_freed_memory(self._device)
        self._images = self._open(options.data)
        self._about = {
            **records.machine(self._device),
            **{column: _version(package) for column, package in _PACKAGES.items()},
            "benchmark": table.NAME,
            **{name: getattr(options, name) for name in _AS_GIVEN},
            **{name: getattr(self._base, name) for name in table.SETTINGS if name not in _AS_GIVEN},
        }
        self._stages: Stages | None = None
        self._measures: dict[Key, Callable[[], Turn]] = {}
        self._memory: dict[Key, Memory] = {}
        self._samples: dict[Key, list[Turn]] = {}
        self._failures: list[table.Row] = []

    def _open(self, data: str) -> ImageSet:
        if not data:
            data = str(photo_folder())
        elif data == "cifar-like":
            data = str(cifar_like())
        images = scan_images(open_split_or_flat(data, "train"))
        if len(images.classes) > self._options.classes:
            raise ConfigError(
                f"--classes {self._options.classes}: {data} has {len(images.classes)} classes"
            )
        return images

    def rows(self) -> list[table.Row]:
        """Of what was measured so far."""
        samples = dict(self._samples)
        for k in self._options.views if self._stages else ():
            # The loader of the stages is one of the loaders, and is measured once.
            if (own := self._own_loader(k)) in samples:
                samples[own._replace(part=table.STAGES, contender=LOADER)] = samples[own]
        found = table.rows(samples, self._memory, self._base.optim.batch_size, core_count())
        return [self._about | row for row in (*found, *self._failures)]

    def run(self) -> None:
        with progress_bar("throughput:") as bar, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the other loaders: none for us to mend
            self._build(bar)
            self._take_turns(bar)

    # --- building ---

    def _build(self, bar: Progress) -> None:
        plans = self._plans()
        task = bar.add_task("", total=len(plans))
        for key, build in plans.items():
            bar.update(task, description=f"preparing {key}")
            try:
                build(key)
            except ConfigError:  # a model that does not exist
                raise
            except Exception as error:  # of whatever kind: one that cannot run is a row
                self._failures.append(table.failure(key, _status(error)))
            bar.advance(task)
        bar.remove_task(task)

    def _plans(self) -> dict[Key, Callable[[Key], None]]:
        """What there is to measure, with what builds it."""
        options = self._options
        plans: dict[Key, Callable[[Key], None]] = {}
        if table.STAGES in options.parts:
            plans[Key(table.STAGES, "network")] = self._build_network
        for policy in options.policies if table.LOADERS in options.parts else ():
            for name in options.loaders or LOADERS:
                keys = (Key(table.LOADERS, name, policy, k) for k in options.views)
                plans |= dict.fromkeys(keys, self._build_loader)
        if table.STAGES in options.parts:
            for k in options.views:
                plans[Key(table.STAGES, DECODE, "", k)] = self._build_decoder
                plans[self._own_loader(k)] = self._build_loader
                plans[Key(table.STAGES, STEP, options.policies[0], k)] = self._build_training
        return plans

    def _own_loader(self, views: int) -> Key:
        return Key(table.LOADERS, OWN[self._options.loader], self._options.policies[0], views)

    def _build_loader(self, key: Key) -> None:
        config = self._config(key)
        self._check_batches(config)
        contender = LOADERS[key.contender](self._images, config, self._device)
        stream = Stream(contender.batches, contender.ahead)
        for batch in first_batches(stream, CHECKED):
            check(batch, config)
        self._add_stream(key, stream)

    def _build_decoder(self, key: Key) -> None:
        config = self._config(key)
        contender = decode_only(self._images, config, self._device, config.data.loader)
        self._add_stream(key, Stream(contender.batches, contender.ahead))

    def _build_network(self, _key: Key) -> None:
        stages = Stages(self._base, self._options.classes, self._device)
        for name, call in stages.of_any_k().items():
            self._add_call(Key(table.STAGES, name), call)
        for k in self._options.views:
            for name, call in stages.of_k(k).items():
                self._add_call(Key(table.STAGES, name, "", k), call)
        self._stages = stages

    def _build_training(self, key: Key) -> None:
        if self._stages is None:
            raise Unfit("without the network there is no step")
        config = self._config(key)
        own = LOADERS[OWN[self._options.loader]](self._images, config, self._device)
        self._add_stream(key, self._stages.training(config, self._images, own.ahead))

    def _config(self, key: Key) -> TrainConfig:
        policy = key.policy or self._options.policies[0]
        return self._base.replace(views=key.K, augment=policy)

    def _check_batches(self, config: TrainConfig) -> None:
        batch = config.optim.batch_size * config.view.size**2 * 3 * 4
        ahead = 3 * config.data.prefetch + 2 * config.data.workers
        check_memory(batch * ahead, torch.device("cpu"), "batches that are made ahead take")

    def _add_stream(self, key: Key, stream: Stream) -> None:
        count, self._memory[key] = first_turn(stream, self._device, self._options.turn_seconds)
        seconds = self._options.turn_seconds
        self._measures[key] = partial(turn, stream, count, self._device, seconds)

    def _add_call(self, key: Key, call: Callable[[], object]) -> None:
        taken = repeat(call, 1, self._device).seconds
        count = max(1, math.ceil(self._options.turn_seconds / taken))
        self._measures[key] = partial(repeat, call, count, self._device)

    # --- measuring ---

    def _take_turns(self, bar: Progress) -> None:
        rounds = self._options.repeats
        task = bar.add_task("", total=rounds * len(self._measures))

        def on_round(done: int) -> None:
            if bar.disable:
                print(f"round {done + 1} of {rounds}", file=sys.stderr)
            self._round = done + 1

        def on_turn(key: Key) -> None:
            text = f"round {self._round} of {rounds}, {key}"
            bar.update(task, description=text, advance=1)

        failed = timing.interleave(
            self._measures, self._samples, rounds=rounds, on_round=on_round, on_turn=on_turn
        )
        self._failures += [table.failure(key, _status(error)) for key, error in failed.items()]


_AS_GIVEN = ("classes", "loader")
"""Settings that are the benchmark's own: those of a training say it otherwise, or not at all."""
_PACKAGES = {
    "dali": "nvidia-dali-cuda120",
    "torchvision": "torchvision",
    "timm": "timm",
    "ffcv": "ffcv",
}


def _config(options: Options, device: torch.device) -> TrainConfig:
    gpu = device.type == "cuda"
    precision = options.precision
    if precision == "auto":
        precision = "bf16" if gpu else "fp32"
    return TrainConfig.from_flat(
        data=options.data or "photos",
        **TRAINED_WITH[options.loader],
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


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _status(error: Exception) -> str:
    return str(error) if isinstance(error, Unfit) else timing.why(error)
