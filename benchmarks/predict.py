"""PREDICTION of training on GPUs that were not measured: images/s and the bottleneck, versus K.

    python benchmarks/predict.py [--quick] [--gpus A100 H100 L4 B200] [--count 1 8 64 512 4096]
    python benchmarks/predict.py --check [benchmarks/results/throughput.csv]
    python benchmarks/predict.py --check gpu-report.json
    python benchmarks/predict.py --paper [--experiments NAME ...] [--tune-one-seed]

Nothing here has run on a GPU. fastaug/diagnostics/step_model.py is the model and lists every input
with its source. The band goes from all assumptions at their slow end to all at their fast end.
--check applies the same model to this machine's CPU and compares it with the measurements of
benchmarks/throughput.py; given the JSON file of python -m fastaug.doctor --gpu-report, it sets the
prediction for that GPU beside what was measured there. --paper prints the GPU hours of the paper's
experiments.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from parts import command, cpu_check, results
from parts.paper_cost import PAPER, paper_table
from parts.plotting import draw_prediction
from parts.results import Table, number
from rich.console import Console

from fastaug import cli
from fastaug.diagnostics import step_model
from fastaug.diagnostics.gpu_report.plots import short
from fastaug.diagnostics.gpu_report.prediction import Compared, compare_prediction, why_not
from fastaug.diagnostics.gpu_report.results import read_report
from fastaug.diagnostics.step_model import Case, Rates, Value, Work, network_work
from fastaug.errors import ConfigError, suggest

NAME = "predict"
COLUMNS = (
    *results.MACHINE,
    *("benchmark", "device", "count", "model", "size", "batch_size", "precision", "augment"),
    *("decode", "storage", "image_bytes", "K", "quantity", "value", "low", "high", "unit"),
    *("limit", "measured", "error", "status"),
)
THROUGHPUT = "benchmarks/results/throughput.csv"
CASES: dict[str, Case] = {"value": "mid", "low": "low", "high": "high"}
"""Column -> case of the model."""
CALIBRATED = ", calibrated on forward"

Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """PREDICTION of images/s and the bottleneck of training, versus the number of GPUs and K."""

    gpus: tuple[str, ...] = ()
    """A100, H100, L4, B200; default: all, with --paper A100 and H100."""
    count: tuple[int, ...] = (1, 8, 64, 512, 4096)
    """Numbers of GPUs."""
    views: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of views K."""
    model: str = "nf_resnet50"
    """Model, as for fastaug.train."""
    classes: int = 1000
    """Number of classes."""
    size: int = 224
    """Side of a view in pixels."""
    batch_size: int = 256
    """Views in a step on each GPU."""
    precision: Literal["bf16", "fp16", "tf32", "fp32"] = "bf16"
    """Precision of the network."""
    augment: Literal["crop-flip", "randaugment"] = "crop-flip"
    """Augmentation of a view, by the fused kernel on the GPU."""
    decode: Literal["gpu", "cpu"] = "gpu"
    """Where JPEGs are decoded."""
    storage: float = step_model.STORAGE_RATE.value / 1e9
    """Read rate of the storage in GB/s, for all GPUs together."""
    image_bytes: int = int(step_model.IMAGE_BYTES.value)
    """Bytes of a JPEG; decode rates stay those for images of ImageNet's size."""
    assume: tuple[str, ...] = ()
    """Values that replace assumed ones, as NAME=NUMBER, for example compute=0.6; the names are
    printed with every prediction."""
    check: str = ""
    """Compare the model of this machine's CPU with the last run in this file of
    benchmarks/throughput.py; without a value: benchmarks/results/throughput.csv. With the .json of
    fastaug.doctor --gpu-report: the model of that GPU with its measurements."""
    paper: bool = False
    """Print the GPU hours of the paper's experiments."""
    experiments: tuple[str, ...] = PAPER
    """Experiments of --paper, as fastaug.sweep --list-experiments names them."""
    tune_one_seed: bool = False
    """With --paper: tune rate and epochs with one seed and run the other seeds only at the choice
    (fastaug.sweep --tune-seeds 1); the middle number of epochs stands for the choice."""
    quick: bool = False
    """Few GPUs, counts and K; other flags override single values."""
    out: str = "benchmarks/results"
    """Folder of predict.csv, to which rows are appended, and of predict.png."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        for name in self.gpus:
            if name.upper() not in step_model.GPUS:
                known = [gpu.lower() for gpu in step_model.GPUS]
                raise ConfigError(f"--gpus: unknown {name!r}: {suggest(name, known)}")
        for name in self.experiments:
            if name not in PAPER:
                raise ConfigError(f"--experiments: unknown {name!r}: {suggest(name, PAPER)}")
        command.check_at_least(
            {
                "--count": (self.count, 1),
                "--views": (self.views, 1),
                "--classes": ((self.classes,), 2),
                "--size": ((self.size,), 1),
                "--batch-size": ((self.batch_size,), 1),
                "--image-bytes": ((self.image_bytes,), 1),
            }
        )
        if wrong := [k for k in self.views if self.batch_size % k]:
            nearest = max(wrong[0], round(self.batch_size / wrong[0]) * wrong[0])
            raise ConfigError(
                f"--batch-size {self.batch_size} cannot be divided by --views {wrong[0]}; "
                f"nearest: {nearest}"
            )
        if not 0 < self.storage < math.inf:
            raise ConfigError(f"--storage must be above 0 GB/s, got {self.storage:g}")
        self.assumptions()

    def assumptions(self) -> dict[str, Value]:
        changed = dict(step_model.ASSUMED)
        for given in self.assume:
            name, _, text = given.partition("=")
            if name not in changed:
                raise ConfigError(f"--assume {given}: unknown: {suggest(name, changed)}")
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not 0 < value < math.inf:
                raise ConfigError(f"--assume {given}: must be NAME=NUMBER, above 0")
            changed[name] = Value(value, changed[name].unit, "assumed: given by --assume")
        return changed

    def gpu_names(self) -> tuple[str, ...]:
        default = ("A100", "H100") if self.paper else tuple(step_model.GPUS)
        return tuple(name.upper() for name in self.gpus) or default

    def title(self) -> str:
        return (
            f"{self.model}, {self.size} px, {self.precision}, {self.augment}, "
            f"{self.batch_size} views per GPU, storage {self.storage:g} GB/s in total"
        )


QUICK = Options(gpus=("A100", "H100"), count=(1, 64, 4096), views=(1, 8))
"""Defaults with --quick."""


def parse(args: Sequence[str]) -> Options:
    return command.parse(QUICK, cli.with_value(args, "--check", THROUGHPUT), "predict.py")


def main(args: Sequence[str]) -> int:
    options = parse(args)
    if options.paper:
        for line in paper_table(options.experiments, options.gpu_names(), options.tune_one_seed):
            print(line, flush=True)
        return 0
    console = Console(highlight=False)
    about = results.describe_machine(torch.device("cpu"))
    about |= {"benchmark": NAME, "status": "prediction"}
    path = Path(options.out).expanduser() / f"{NAME}.csv"
    if options.check.endswith(".json"):
        check_report(Path(options.check).expanduser(), console)
        return 0
    if options.check:
        rows = check(Path(options.check).expanduser(), console)
        results.ResultFile(path, COLUMNS).append(about | row for row in rows)
        return 0
    file = results.ResultFile(path, COLUMNS)
    console.print(f"PREDICTION, not a measurement: {options.title()}. Its inputs:", soft_wrap=True)
    for name, value in listed_inputs(options):
        band = "" if value.low is None else f" ({value.low:g} to {value.high:g})"
        line = f"  {name}: {value.value:g}{band} {value.unit} [{value.source}]"
        console.print(line, markup=False, soft_wrap=True)
    work = network_work(
        options.model, options.classes, options.size, options.batch_size, options.precision
    )
    rows = []
    for gpu in options.gpu_names():
        found = predict_gpu(gpu, work, options)
        gpu_table(found).print(console, f"PREDICTION: {gpu}, {options.title()}")
        rows += found
        for line in conclusions(gpu, work, options):
            console.print(line, soft_wrap=True)
    settings = ("model", "size", "batch_size", "precision", "augment", "decode", "storage")
    about |= {key: getattr(options, key) for key in (*settings, "image_bytes")}
    file.append(about | row for row in rows)
    print(f"prediction: {file.path}, {len(rows)} rows of this run")
    draw_prediction(rows, path.with_suffix(".png"), settings=options.title())
    return 0


def listed_inputs(options: Options) -> Iterator[tuple[str, Value]]:
    for gpu in options.gpu_names():
        for field, value in step_model.GPUS[gpu].items():
            yield f"{gpu} {field}", value
    for field, value in options.assumptions().items():
        yield f"all GPUs, {field}", value
    yield "storage", step_model.STORAGE_RATE._replace(value=options.storage * 1e9)
    yield "image", step_model.IMAGE_BYTES._replace(value=options.image_bytes)


def _rates(gpu: str, options: Options, case: Case) -> Rates:
    return step_model.gpu_rates(
        gpu,
        case,
        assumed=options.assumptions(),
        precision=options.precision,
        augment=options.augment,
        storage=options.storage * 1e9,
        decode_on_host=options.decode == "cpu",
    )


def predict_gpu(gpu: str, work: Work, options: Options) -> list[Row]:
    """Rows of images/s, views/s and the time on each resource, for all counts and K."""
    rates = {column: _rates(gpu, options, case) for column, case in CASES.items()}
    rows: list[Row] = []
    for devices in options.count:
        for k in options.views:
            steps = {
                column: step_model.predict(
                    work, own, k=k, devices=devices, image_bytes=options.image_bytes
                )
                for column, own in rates.items()
            }
            limit = steps["value"].limit
            quantities = {
                "images/s": ("1/s", {column: step.images for column, step in steps.items()}),
                "views/s": ("1/s", {column: step.views for column, step in steps.items()}),
            }
            for name in steps["value"].parts:
                times = {column: 1e3 * step.parts[name] for column, step in steps.items()}
                quantities[f"{name} time"] = ("ms", times)
            for quantity, (unit, values) in quantities.items():
                row: Row = {"device": gpu, "count": devices, "K": k, "limit": limit}
                row |= {"quantity": quantity, "unit": unit}
                rows.append(row | {column: f"{value:.6g}" for column, value in values.items()})
    return rows


def conclusions(gpu: str, work: Work, options: Options) -> Iterator[str]:
    """The K from which decoding is not the limit, and a comparison with published numbers."""
    size = options.image_bytes
    rates = [_rates(gpu, options, case) for case in CASES.values()]
    found = [step_model.crossover_k(work, own, options.views, image_bytes=size) for own in rates]
    limits = ["above all these K" if k is None else f"K = {k}" for k in found]
    yield (
        f"prediction, 1 {gpu}: decoding is not the limit from {limits[0]} on (slow end "
        f"{limits[1]}, fast end {limits[2]})"
    )
    if gpu in step_model.PUBLISHED and not options.quick:
        model, images, source = step_model.PUBLISHED[gpu]
        work = network_work(model, 1000, 224, options.batch_size, "bf16")
        other = replace(options, precision="bf16")
        mid, low, high = (
            step_model.predict(work, _rates(gpu, other, case), k=1, image_bytes=size).images
            for case in CASES.values()
        )
        yield (
            f"prediction, 1 {gpu}: {model} {mid:,.0f} images/s ({low:,.0f} to {high:,.0f}); "
            f"published, measured by others: {images:,.0f}, error {mid / images - 1:+.0%} "
            f"({source})"
        )


# --- the CPU of this machine ---


def check(path: Path, console: Console) -> list[Row]:
    """Compare the model of this CPU with the last run in a throughput.csv."""
    about, measured = cpu_check.read_stages(path)
    torch.set_num_threads(int(about["threads"]))
    probes = cpu_check.run_probes(about["precision"])
    classes, size, views = (int(about[name]) for name in ("classes", "size", "batch_size"))
    work = network_work(about["model"], classes, size, views, about["precision"])
    cores = cpu_check.Cores(int(about["threads"]), int(about["workers"]), os.cpu_count() or 1)
    found = cpu_check.compare(work, probes, measured, cores)
    rates = ", ".join(f"{rate / 1e9:.3g} at {size / 1e6:g} MB" for size, rate in probes.bandwidth)
    inputs = " and ".join(f"{stage.contender} at K={stage.k}" for stage in found.inputs)
    for text in (
        f"PREDICTION for this CPU: {about['cpu']}, {about['threads']} threads",
        f"inputs, probes run now: a 3x3 convolution {probes.flops / 1e9:.0f} GFLOP/s",
        f"  relu, GB/s: {rates}; launch of an operation {1e6 * probes.launch:.1f} us",
        f"inputs, rows of the run of {about['date']}: {inputs}",
        f"second prediction: forward is an input too; it reaches {found.share:.0%} of the probes",
    ):
        console.print(text, markup=False, soft_wrap=True)
    if probes.parallel > cpu_check.BUSY:
        console.print(
            f"warning: other programs keep the cores busy (a relu of 1 MB takes "
            f"{1e3 * probes.parallel:.1f} ms), so the probes are unreliable; run it again",
            soft_wrap=True,
        )
    settings: Row = {name: about[name] for name in ("model", "size", "batch_size", "precision")}
    settings |= {"device": "cpu", "count": 1, "decode": "cpu", "unit": "ms"}
    rows = []
    for line in found.lines:
        row = settings | {"augment": line.stage.policy, "K": line.stage.k or ""}
        row |= {"measured": f"{1e3 * line.measured:.6g}"}
        for suffix, seconds in (("", line.predicted), (CALIBRATED, line.calibrated)):
            error = f"{seconds / line.measured - 1:.3f}"
            row |= {"value": f"{1e3 * seconds:.6g}", "error": error}
            rows.append(row | {"quantity": f"{line.stage.contender} time{suffix}"})
    title = f"{about['model']}, {about['size']} px, {about['batch_size']} views"
    check_table(rows).print(console, f"PREDICTION and measurement, ms a batch: {title}")
    return rows


def check_report(path: Path, console: Console) -> None:
    """Print the prediction for a GPU beside the measurements of a GPU report."""
    report = read_report(path, "--check")
    if reason := why_not(report):
        raise ConfigError(f"--check {path}: {reason}")
    report_table(compare_prediction(report)).print(
        console, f"PREDICTION and measurement: {report.gpus[0]}, report of {report.made}"
    )


# --- tables; benchmarks/tables.py writes the last three into docs/performance.md ---


def gpu_table(rows: Sequence[Row]) -> Table:
    lines = []
    pairs = ([row for row in rows if row["quantity"] == name] for name in ("images/s", "views/s"))
    for pair in zip(*pairs, strict=True):
        cells = [f"{pair[0]['count']:,}", str(pair[0]["K"])]
        for row in pair:
            value, low, high = (_short(float(row[column])) for column in CASES)
            cells.append(f"{value} ({low}-{high})")
        lines.append([*cells, pair[0]["limit"]])
    return Table(["GPUs", "K", "images/s (low-high)", "views/s (low-high)", "limit"], lines)


def _short(value: float) -> str:
    for scale, letter in ((1e6, "M"), (1e3, "k")):
        if value >= 10 * scale or (letter == "M" and value >= scale):
            return f"{value / scale:.3g}{letter}"
    return f"{value:,.0f}"


def one_gpu_table(run: Sequence[Mapping[str, str]]) -> Table:
    """Views/s of one GPU, the band, and the limit."""
    found = {
        (row["device"], row["K"]): row
        for row in run
        if row["quantity"] == "views/s" and row["count"] == "1"
    }
    views = list(dict.fromkeys(k for _, k in found))
    lines = []
    for gpu in dict.fromkeys(gpu for gpu, _ in found):
        cells = []
        for row in (found[gpu, k] for k in views):
            value, low, high = (f"{float(row[column]):,.0f}" for column in CASES)
            cells.append(f"{value} ({low} to {high}), {row['limit']}")
        lines.append([gpu, *cells])
    return Table(["PREDICTION: views/s of one GPU", *(f"K={k}" for k in views)], lines)


def many_gpus_table(run: Sequence[Mapping[str, str]]) -> Table:
    """Images/s of all GPUs together at the smallest and the largest K."""
    views = sorted({int(row["K"]) for row in run})
    counts = sorted({int(row["count"]) for row in run})
    found = {
        (row["device"], int(row["K"]), int(row["count"])): row
        for row in run
        if row["quantity"] == "images/s"
    }
    lines = []
    for gpu in dict.fromkeys(row["device"] for row in run):
        for k in (views[0], views[-1]):
            rows = [found[gpu, k, count] for count in counts]
            cells = [f"{float(row['value']):,.0f}, {row['limit']}" for row in rows]
            lines.append([f"{gpu}, K={k}", *cells])
    return Table(["PREDICTION: images/s in all", *(f"{n:,} GPUs" for n in counts)], lines)


def report_table(found: Sequence[Compared]) -> Table:
    """Predicted and measured figures of a GPU."""
    lines = []
    for one in found:
        name = f"{one.quantity}, {one.unit}" + (f", K={one.k}" if one.k else "")
        values = (one.measured, one.predicted, *sorted((one.low, one.high)))
        inside = "yes" if one.inside else "no"
        lines.append([name, *map(short, values), f"{one.ratio:.2f}", inside])
    return Table(["figure", "measured", "predicted", "from", "to", "ratio", "in range"], lines)


def check_table(run: Sequence[Mapping[str, Any]]) -> Table:
    """Predicted and measured times of this CPU."""
    found = {(row["quantity"], row["K"]): row for row in run}
    lines = []
    for (quantity, k), row in found.items():
        if (other := found.get((quantity + CALIBRATED, k))) is None:
            continue
        name = quantity.removesuffix(" time") + (f", K={k}" if k else "")
        cells = [name, number(row["measured"])]
        for each in (row, other):
            cells += [number(each["value"]), f"{100 * float(each['error']):+.0f}%"]
        if name == "forward":
            cells[-1] = "(input)"
        lines.append(cells)
    head = ["CPU, ms", "measured", "predicted from probes", "error"]
    return Table([*head, "predicted, calibrated on forward", "error"], lines)


if __name__ == "__main__":
    sys.exit(cli.run(main))
