"""The loss kernels against what a user would write: time and peak memory of the objective.

    python benchmarks/kernels.py [--quick] [--views 1 2 4 8 16] [--classes 10 100 1000 21841]

benchmarks/contenders.py says who takes part. forward is the value alone, without a gradient;
forward+backward is loss.backward(), for a kernel that of fastaug.objective; value_and_grad is the
kernel without autograd around it. memory is what tensors take at the peak of forward+backward
beyond the inputs, resident memory what the process does. Ratios are to cross_entropy's
forward+backward and to the copy, round by round.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import records
import timing
import torch
from contenders import (
    BOTH,
    COPY,
    FORMS,
    Case,
    Contender,
    Inputs,
    Unfit,
    check_result,
    check_size,
    contenders,
    exact,
)
from kernel_plot import draw
from kernel_report import MEMORY, PAPER_STEP, show, verdicts
from progress import progress_bar
from rich.progress import Progress
from torch import Tensor

from fastaug import cli
from fastaug.errors import ConfigError
from fastaug.kernels.config import Average
from fastaug.kernels.registry import load_kernel
from fastaug.runtime.device import resolve_device

NAME = "kernels"
COLUMNS = (
    *records.MACHINE,
    *("benchmark", "device", "contender", "quantity", "B", "K", "C", "dtype", "average"),
    *("median", "p20", "p80", "n", "unit", "to_cross_entropy", "to_copy", "status"),
)
RESIDENT = "resident memory"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Time and peak memory of the loss kernels, and of what a user would write, versus K and C."""

    kernels: tuple[str, ...] = ()
    """Kernels to measure, by name or package.module:attribute, and forms in plain torch: linear,
    compiled, literal, literal-loop; default: all that there are."""
    views: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of views K."""
    classes: tuple[int, ...] = (10, 100, 1000, 21841)
    """Numbers of classes C."""
    images: int = 0
    """B; 0: 128, and fewer above 3,125 classes (16 of 21,841), and besides them B=4 K=16 C=100, a
    step of the paper's CIFAR experiments."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the logits."""
    average: Average = "losses"
    """What the objective averages over the views."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    threads: int = 0
    """Threads of torch on the CPU; 0: as many as torch takes."""
    repeats: int = 20
    """Rounds; each contender is timed once in each."""
    quick: bool = False
    """Few cases and rounds; other flags change single values."""
    out: str = "benchmarks/results"
    """Folder of kernels.csv, to which rows are added, and of kernels.png."""
    plot_only: bool = False
    """Measure nothing: draw kernels.png from the latest run in kernels.csv."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        for flag, values, least in (
            ("--views", self.views, 1),
            ("--classes", self.classes, 1),
            ("--images", (self.images,), 0),
            ("--threads", (self.threads,), 0),
            ("--repeats", (self.repeats,), 1),
        ):
            if not values:
                raise ConfigError(f"{flag} needs at least one number")
            if wrong := [value for value in values if value < least]:
                raise ConfigError(f"{flag} must be at least {least}, got {wrong[0]}")
        for name in set(self.kernels) - set(FORMS):
            load_kernel(name)  # an unknown one is an error now, not a row later

    def cases(self) -> list[Case]:
        grid = [
            Case(self.images or _images(classes), views, classes)
            for classes in self.classes
            for views in self.views
        ]
        return list(dict.fromkeys(grid if self.images else [*grid, PAPER_STEP]))


QUICK = Options(views=(2, 8), classes=(1000,), repeats=7)
"""What --quick stands for."""


def _images(classes: int) -> int:
    """128, or the power of two that keeps one view of all images within 400,000 logits."""
    return min(128, 2 ** int(math.log2(max(1, 400_000 / classes))))


def parse(args: Sequence[str]) -> Options:
    default = QUICK if "--quick" in args else Options()
    return cli.parse(Options, args, prog="python benchmarks/kernels.py", default=default)


def main(args: Sequence[str]) -> int:
    options = parse(args)
    folder = Path(options.out).expanduser()
    if options.plot_only:
        conclude(folder)
        return 0
    device = resolve_device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    file = records.Records(folder / f"{NAME}.csv", COLUMNS)
    about = records.machine(device)
    try:
        measure(options, device, file, about)
    except KeyboardInterrupt:
        conclude(folder, about["date"])
        raise
    conclude(folder, about["date"])
    return 0


def conclude(folder: Path, date: str = "") -> None:
    """What the run of that date, or the latest one, says of the targets; its picture."""
    table, picture = folder / f"{NAME}.csv", folder / f"{NAME}.png"
    run = records.run(records.read(table, COLUMNS), date)
    for line in verdicts(run):
        print(line)
    print(f"rows: {table}, {len(run)} of this run")
    try:
        if draw(run, picture):
            print(f"picture: {picture}")
    except OSError as error:
        raise ConfigError(f"{picture}: cannot be written ({error.strerror})") from error


def measure(options: Options, device: torch.device, file: records.Records, about: Row) -> None:
    """Each case is measured, added to the file and shown before the next one."""
    about = about | {"benchmark": NAME, "device": str(device)}
    about |= {"dtype": options.dtype, "average": options.average}
    print(
        f"{records.machine_of(about)}; torch {about['torch']}; {options.dtype}, {options.average}"
    )
    said: set[str] = set()
    for number, case in enumerate(cases := options.cases(), start=1):
        rows: list[Row] = []
        bar = progress_bar(f"case {number} of {len(cases)}, {case}:")
        try:
            with bar, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.compile has many, none for us to mend
                measure_case(case, options, device, bar, rows)
        finally:
            size = dict(zip("BKC", case, strict=True))
            file.append(about | size | row for row in rows)
            show(case, rows, said)


def measure_case(
    case: Case, options: Options, device: torch.device, bar: Progress, rows: list[Row]
) -> None:
    """Adds rows as they are finished; what is interrupted has those of the whole rounds."""
    task = bar.add_task("inputs", total=options.repeats)
    try:
        inputs = Inputs.draw(case, options.average, DTYPES[options.dtype], device)
        right = exact(inputs)
    except (RuntimeError, MemoryError) as error:  # too large for this machine
        rows.append({"contender": "all", "quantity": "all", "status": timing.why(error)})
        return
    calls: dict[tuple[str, str], Callable[[], Tensor]] = {}
    baseline = {COPY: inputs.logits.nbytes}
    for name, build in contenders(options.kernels).items():
        bar.update(task, description=f"{name}: first call")
        try:
            if name.startswith("literal"):
                check_size(build, inputs, options.repeats)
            contender = build(inputs)
            check_result(name, contender, right)
            for quantity, values in peaks(contender, device).items():
                baseline.setdefault(quantity, values[0])  # cross_entropy comes first
                bases = [[baseline[key]] * len(values) for key in (quantity, COPY)]
                rows.append(_row(name, quantity, values, "bytes", bases))
            calls |= {(name, quantity): call for quantity, call in contender.calls.items()}
        except Exception as error:  # of whatever kind: a kernel may be anyone's
            status = str(error) if isinstance(error, Unfit) else timing.why(error)
            rows.append({"contender": name, "quantity": "all", "status": status})
    samples: dict[tuple[str, str], list[float]] = {}
    bar.update(task, description="how long each takes")

    def on_round(done: int) -> None:
        bar.update(task, description=f"round {done + 1}", completed=done)

    try:
        failed = timing.take_turns(
            calls, samples, rounds=options.repeats, device=device, on_round=on_round
        )
        for (name, quantity), raised in failed.items():
            status = timing.why(raised)
            rows.append({"contender": name, "quantity": quantity, "status": status})
    finally:
        pair = [samples.get(key, []) for key in (("cross_entropy", BOTH), (COPY, COPY))]
        rows += [
            _row(name, quantity, values, "ms", pair)
            for (name, quantity), values in samples.items()
            if values
        ]


def _row(
    name: str,
    quantity: str,
    values: Sequence[float],
    unit: Literal["ms", "bytes"],
    bases: Sequence[Sequence[float]],
) -> Row:
    """values in s or bytes, and those of the two baselines in the same rounds, where there are."""
    found = timing.quantiles(values)
    scale = {"ms": 1e3, "bytes": 1}[unit]
    row: Row = {"contender": name, "quantity": quantity, "unit": unit, "n": found.n, "status": "ok"}
    for column in ("median", "p20", "p80"):
        value = scale * getattr(found, column)
        row[column] = round(value) if unit == "bytes" else float(f"{value:.6g}")
    for column, base in zip(("to_cross_entropy", "to_copy"), bases, strict=True):
        if len(base) == len(values) and all(base):
            row[column] = float(f"{timing.median_ratio(values, base):.4g}")
    return row


def peaks(contender: Contender, device: torch.device) -> dict[str, list[int]]:
    """Of forward+backward, the gradient that it leaves included."""
    if (call := contender.calls.get(BOTH)) is None:
        return {}
    found: dict[str, list[int]] = {MEMORY: [], RESIDENT: []}
    contender.leaf.grad = None
    found[MEMORY].append(timing.peak_memory(call, device))
    for _ in range(3 if device.type == "cpu" else 0):
        contender.leaf.grad = None
        found[RESIDENT] += timing.peak_resident_memory(call)
    contender.leaf.grad = None
    return {quantity: values for quantity, values in found.items() if values}


if __name__ == "__main__":
    sys.exit(cli.run(main))
