"""PREDICTION of training on GPUs that are not at hand: images/s, and what limits, versus K.

    python benchmarks/predict.py [--quick] [--gpus A100 H100 L4 B200] [--count 1 8 64 512 4096]
    python benchmarks/predict.py --check [benchmarks/results/throughput.csv]

Nothing of this has run on a GPU. benchmarks/hardware.py lists every input with its source,
benchmarks/step_model.py is the model. The band takes all assumptions at their slow, and all at
their fast end. --check puts this machine's CPU into the same model, and compares it with what
benchmarks/throughput.py measured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import hardware
import records
import torch
from cpu_instance import Cores, compare, cpu_inputs, read_stages
from hardware import ASSUMED, Assumptions, Gpu, Value
from predict_plot import draw, show, show_check, show_inputs
from rich.console import Console
from step_model import Rates, Step, Work, count, crossover_k, gpu_rates, predict

from fastaug import cli
from fastaug.errors import ConfigError
from fastaug.models.build import build_model

NAME = "predict"
COLUMNS = (
    *records.MACHINE,
    *("benchmark", "device", "count", "model", "size", "batch_size", "precision", "augment"),
    *("decode", "storage", "image_bytes", "K", "quantity", "value", "low", "high", "unit"),
    *("limit", "measured", "error", "status"),
)
THROUGHPUT = "benchmarks/results/throughput.csv"
CASES = ("mid", "low", "high")
Row = dict[str, Any]
Share = tuple[float, float, float]


def _share(value: Value) -> Share:
    return value.at("low"), value.value, value.at("high")


COMPUTE, MEMORY, LINK, OVERLAP = map(
    _share, (ASSUMED.compute, ASSUMED.memory, ASSUMED.link, ASSUMED.overlap)
)


@dataclass(frozen=True)
class Options:
    """PREDICTION of images/s and of what limits a training on GPUs, versus their number and K."""

    gpus: tuple[str, ...] = tuple(hardware.GPUS)
    """A100, H100, L4, B200."""
    count: tuple[int, ...] = (1, 8, 64, 512, 4096)
    """Numbers of GPUs."""
    views: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of views K."""
    model: str = "nf_resnet50"
    """As --model of fastaug.train."""
    classes: int = 1000
    """Number of classes."""
    size: int = 224
    """Side of a view in pixels."""
    batch_size: int = 256
    """Views in a step on each GPU."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of the network; fp32 is TF32, as torch computes convolutions."""
    augment: Literal["crop-flip", "randaugment"] = "crop-flip"
    """What makes a view, by the fused kernel on the GPU."""
    decode: Literal["gpu", "cpu"] = "gpu"
    """Where JPEGs are decoded."""
    storage: float = hardware.STORAGE.value / 1e9
    """GB/s that all GPUs together read."""
    image_bytes: int = int(hardware.IMAGE_BYTES.value)
    """Bytes of a JPEG; decode rates stay those of images of ImageNet's size."""
    compute_share: Share = COMPUTE
    """Share of the peak FLOP/s that convolutions reach: slow end, assumed, fast end."""
    memory_share: Share = MEMORY
    """Share of the memory bandwidth that kernels reach: slow end, assumed, fast end."""
    link_share: Share = LINK
    """Share of NVLink and network that NCCL reaches: slow end, assumed, fast end."""
    overlap: Share = OVERLAP
    """Share of the backward pass that hides the all-reduce: slow end, assumed, fast end."""
    check: str = ""
    """Compare the model of this machine's CPU with the last run in this file of
    benchmarks/throughput.py; without a value: benchmarks/results/throughput.csv."""
    quick: bool = False
    """Few GPUs, counts and K; other flags change single values."""
    out: str = "benchmarks/results"
    """Folder of predict.csv, to which rows are added, and of predict.png."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        for name in self.gpus:
            hardware.get_gpu(name)
        for flag, values in (
            ("--gpus", self.gpus),
            ("--count", self.count),
            ("--views", self.views),
        ):
            if not values:
                raise ConfigError(f"{flag} needs at least one value")
        for flag, numbers, least in (
            ("--count", self.count, 1),
            ("--views", self.views, 1),
            ("--classes", (self.classes,), 2),
            ("--size", (self.size,), 1),
            ("--batch-size", (self.batch_size,), 1),
            ("--image-bytes", (self.image_bytes,), 1),
        ):
            if wrong := [number for number in numbers if number < least]:
                raise ConfigError(f"{flag} must be at least {least}, got {wrong[0]}")
        if wrong := [k for k in self.views if self.batch_size % k]:
            nearest = max(wrong[0], round(self.batch_size / wrong[0]) * wrong[0])
            raise ConfigError(
                f"--batch-size {self.batch_size} cannot be divided by --views {wrong[0]}; "
                f"nearest: {nearest}"
            )
        if not 0 < self.storage < float("inf"):
            raise ConfigError(f"--storage must be above 0 GB/s, got {self.storage:g}")
        for flag in ("compute_share", "memory_share", "link_share", "overlap"):
            low, mid, high = getattr(self, flag)
            if not 0 < low <= mid <= high <= 1:
                given = f"{low:g} {mid:g} {high:g}"
                name = flag.replace("_", "-")
                raise ConfigError(f"--{name} must rise from above 0 to at most 1, got {given}")

    def assumptions(self) -> Assumptions:
        changed = {
            "compute": self.compute_share,
            "memory": self.memory_share,
            "link": self.link_share,
            "overlap": self.overlap,
        }
        found: dict[str, Value] = {}
        for name, (low, mid, high) in changed.items():
            if (low, mid, high) != _share(old := getattr(ASSUMED, name)):
                found[name] = Value(mid, old.unit, "assumed: given by a flag", low, high)
        return replace(ASSUMED, **found)


QUICK = Options(gpus=("A100", "H100"), count=(1, 64, 4096), views=(1, 8))
"""What --quick stands for."""


def parse(args: Sequence[str]) -> Options:
    args = list(args)
    for place, arg in enumerate(args):
        if arg == "--check" and (place + 1 == len(args) or args[place + 1].startswith("--")):
            args.insert(place + 1, THROUGHPUT)
    default = QUICK if "--quick" in args else Options()
    return cli.parse(Options, args, prog="python benchmarks/predict.py", default=default)


def main(args: Sequence[str]) -> int:
    options = parse(args)
    console = Console(highlight=False)
    folder = Path(options.out).expanduser()
    about = records.machine(torch.device("cpu")) | {"benchmark": NAME, "status": "prediction"}
    if options.check:
        rows = check(Path(options.check).expanduser(), console)
        records.Records(folder / f"{NAME}.csv", COLUMNS).append(about | row for row in rows)
        return 0
    file = records.Records(folder / f"{NAME}.csv", COLUMNS)
    show_inputs(title(options), listed_inputs(options), console)
    work = count_work(options, options.model)
    rows = []
    for name in options.gpus:
        found = predict_gpu(hardware.get_gpu(name), work, options)
        show(f"{name}, {title(options)}", found, console)
        rows += found
        for line in conclusions(hardware.get_gpu(name), work, options):
            console.print(line, soft_wrap=True)
    settings = ("model", "size", "batch_size", "precision", "augment", "decode", "storage")
    about |= {key: getattr(options, key) for key in (*settings, "image_bytes")}
    file.append(about | row for row in rows)
    print(f"prediction, rows: {file.path}, {len(rows)} of this run")
    picture = folder / f"{NAME}.png"
    try:
        if draw(rows, picture, settings=title(options)):
            print(f"prediction, picture: {picture}")
    except OSError as error:
        raise ConfigError(f"{picture}: cannot be written ({error.strerror})") from error
    return 0


def title(options: Options) -> str:
    return (
        f"{options.model}, {options.size} px, {options.precision}, {options.augment}, "
        f"{options.batch_size} views on each GPU, storage {options.storage:g} GB/s in all"
    )


def listed_inputs(options: Options) -> Iterator[tuple[str, Value]]:
    for name in options.gpus:
        for field, value in hardware.inputs(hardware.get_gpu(name)):
            yield f"{name} {field}", value
    for field, value in options.assumptions().listed():
        yield f"all GPUs, {field}", value
    yield "storage", replace(hardware.STORAGE, value=options.storage * 1e9)
    yield "image", replace(hardware.IMAGE_BYTES, value=options.image_bytes)


def count_work(options: Options, model: str) -> Work:
    build = partial(build_model, model, options.classes, image_size=options.size)
    return count(build, views=options.batch_size, size=options.size, precision=options.precision)


def rates(gpu: Gpu, options: Options, case: hardware.Case) -> Rates:
    return gpu_rates(
        gpu,
        options.assumptions(),
        case,
        precision=options.precision,
        augment=options.augment,
        storage=options.storage * 1e9,
        decode_on_host=options.decode == "cpu",
    )


def predict_gpu(gpu: Gpu, work: Work, options: Options) -> list[Row]:
    """Rows of images/s, views/s and the seconds on each resource, for all counts and K."""
    rows: list[Row] = []
    for devices in options.count:
        for k in options.views:
            steps: dict[str, Step] = {
                case: predict(
                    work,
                    rates(gpu, options, case),
                    k=k,
                    devices=devices,
                    image_bytes=options.image_bytes,
                )
                for case in CASES
            }
            about = {"device": gpu.name, "count": devices, "K": k, "limit": steps["mid"].limit}
            quantities = {
                "images/s": ("1/s", {case: step.images for case, step in steps.items()}),
                "views/s": ("1/s", {case: step.views for case, step in steps.items()}),
            }
            for name in steps["mid"].parts:
                of = {case: 1e3 * step.parts[name] for case, step in steps.items()}
                quantities[f"{name} time"] = ("ms", of)
            for quantity, (unit, of) in quantities.items():
                values = {column: f"{of[case]:.6g}" for column, case in _COLUMN_OF.items()}
                rows.append(about | values | {"quantity": quantity, "unit": unit})
    return rows


_COLUMN_OF: dict[str, hardware.Case] = {"value": "mid", "low": "low", "high": "high"}


def conclusions(gpu: Gpu, work: Work, options: Options) -> Iterator[str]:
    """Where decoding stops to be the limit, and what others measured."""
    size = {"image_bytes": options.image_bytes}
    found = [crossover_k(work, rates(gpu, options, c), options.views, **size) for c in CASES]
    mid, low, high = ("above all these K" if k is None else f"K = {k}" for k in found)
    line = f"prediction, 1 {gpu.name}: decoding is not the limit from {mid} on "
    line += f"(slow end {low}, fast end {high})"
    if not (of := rates(gpu, options, "mid")).decode_on_device:
        line += f"; it would be, at K, of a network that makes over {of.decode:,.0f} x K views/s"
    yield line
    if gpu.name in hardware.PUBLISHED and not options.quick:
        model, images, source = hardware.PUBLISHED[gpu.name]
        other = replace(options, model=model, size=224, classes=1000, precision="bf16")
        work = count_work(other, model)
        steps = [predict(work, rates(gpu, other, case), k=1, **size) for case in CASES]
        mid, low, high = (step.images for step in steps)
        yield (
            f"prediction, 1 {gpu.name}: {model} {mid:,.0f} images/s ({low:,.0f} to {high:,.0f}); "
            f"published, measured by others: {images:,.0f}, error {mid / images - 1:+.0%} "
            f"({source})"
        )


def check(path: Path, console: Console) -> list[Row]:
    """The model with this CPU's numbers beside what was measured; inputs are no checks."""
    about, measured = read_stages(path)
    torch.set_num_threads(int(about["threads"]))
    cpu = cpu_inputs(about["precision"])
    views, size = int(about["batch_size"]), int(about["size"])
    build = partial(build_model, about["model"], int(about["classes"]), image_size=size)
    work = count(build, views=views, size=size, precision=about["precision"])
    cores = Cores(int(about["threads"]), int(about["workers"]), os.cpu_count() or 1)
    found = compare(work, cpu, measured, cores)
    show_check(about, cpu, found, console)
    settings = {name: about[name] for name in ("model", "size", "batch_size", "precision")}
    settings |= {"device": "cpu", "count": 1, "decode": "cpu", "unit": "ms"}
    rows = []
    for line in found.lines:
        row = settings | {"augment": line.stage.policy, "K": line.stage.k or ""}
        row |= {"measured": f"{1e3 * line.measured:.6g}"}
        pair = {"": line.predicted, ", calibrated on forward": line.calibrated}
        for suffix, seconds in pair.items():
            values = {
                "value": f"{1e3 * seconds:.6g}",
                "error": f"{seconds / line.measured - 1:.3f}",
            }
            rows.append(row | values | {"quantity": f"{line.stage.contender} time{suffix}"})
    return rows


if __name__ == "__main__":
    sys.exit(cli.run(main))
