"""Loss kernels against plain torch: time and peak memory of the objective.

    python benchmarks/kernels.py [--quick] [--views 1 2 4 8 16] [--classes 10 100 1000 21841]

benchmarks/parts/losses.py lists the contenders. forward is the value without a gradient;
forward+backward is loss.backward(), for a kernel that of fastaug.objective; value_and_grad is the
kernel without autograd. memory is the peak of tensors in forward+backward beyond the inputs. Ratios
are to cross_entropy's forward+backward and to the copy, round by round.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from parts import command, losses, results, timing
from parts.losses import BOTH, COPY, DIRECT, FORMS, FORWARD, Case, Inputs
from parts.plotting import draw_kernels
from parts.results import Table
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from fastaug import cli
from fastaug.kernels.config import Average
from fastaug.kernels.registry import load_kernel
from fastaug.runtime.device import use_device

NAME = "kernels"
COLUMNS = (
    *results.MACHINE,
    *("benchmark", "device", "contender", "quantity", "B", "K", "C", "dtype", "average"),
    *("median", "p20", "p80", "n", "unit", "to_cross_entropy", "to_copy", "status"),
)
MEMORY = "memory"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PAPER_STEP = Case(4, 16, 100)
"""A step of the paper's CIFAR experiments at K = 16: so small that it is mostly overhead."""
DOCS_CASES = (Case(128, 8, 1000), Case(128, 16, 1000), Case(16, 8, 21841), PAPER_STEP)
DOCS_COLUMNS = {
    "cross_entropy": "cross_entropy",
    "native": "`native`",
    "linear": "linear form",
    "compiled": "torch.compile of it",
    "literal": "all pairs, literally",
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Time and peak memory of the loss kernels, and of plain torch, versus K and C."""

    kernels: tuple[str, ...] = ()
    """Kernels to measure, by name or package.module:attribute, and forms in plain torch: linear,
    compiled, literal, literal-loop; default: all."""
    views: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of views K."""
    classes: tuple[int, ...] = (10, 100, 1000, 21841)
    """Numbers of classes C."""
    images: int = 0
    """B; 0: 128, fewer above 3,125 classes (16 for 21,841), and in addition B=4 K=16 C=100, a step
    of the paper's CIFAR experiments."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of the logits."""
    average: Average = "losses"
    """What the objective averages over the views."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    threads: int = 0
    """Threads of torch on the CPU; 0: torch's default."""
    repeats: int = 20
    """Rounds; each contender is timed once per round."""
    quick: bool = False
    """Few cases and rounds; other flags change single values."""
    out: str = "benchmarks/results"
    """Folder of kernels.csv, to which rows are appended, and of kernels.png."""
    plot_only: bool = False
    """Measure nothing: draw kernels.png from the last run in kernels.csv."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        command.check_at_least(
            {
                "--views": (self.views, 1),
                "--classes": (self.classes, 1),
                "--images": ((self.images,), 0),
                "--threads": ((self.threads,), 0),
                "--repeats": ((self.repeats,), 1),
            }
        )
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
"""Defaults with --quick."""


def _images(classes: int) -> int:
    """128, or the power of two that keeps one view of all images within 400,000 logits."""
    return min(128, 2 ** int(math.log2(max(1, 400_000 / classes))))


def main(args: Sequence[str]) -> int:
    options = command.parse(QUICK, args, "kernels.py")
    path = Path(options.out).expanduser() / f"{NAME}.csv"
    if options.plot_only:
        conclude(path)
        return 0
    device = use_device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    file = results.ResultFile(path, COLUMNS)
    about = results.describe_machine(device)
    try:
        measure(options, device, file, about)
    finally:  # after an interrupt: what was measured so far
        conclude(path, about["date"])
    return 0


def conclude(path: Path, date: str = "") -> None:
    """Compare the run of that date, or the last one, with the targets, and draw it."""
    run = results.select_run(results.read(path, COLUMNS), date)
    for line in conclusions(run):
        print(line)
    print(f"results: {path}, {len(run)} rows of this run")
    draw_kernels(run, path.with_suffix(".png"))


def measure(options: Options, device: torch.device, file: results.ResultFile, about: Row) -> None:
    """Each case is measured, appended to the file and printed before the next one."""
    about = about | {"benchmark": NAME, "device": str(device)}
    about |= {"dtype": options.dtype, "average": options.average}
    machine = results.machine_name(about)
    print(f"{machine}; torch {about['torch']}; {options.dtype}, {options.average}")
    printed: set[str] = set()
    for number, case in enumerate(cases := options.cases(), start=1):
        rows: list[Row] = []
        bar = command.progress_bar(f"case {number} of {len(cases)}, {case}:")
        try:
            with bar, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.compile raises many
                measure_case(case, options, device, bar, rows)
        finally:
            size = dict(zip("BKC", case, strict=True))
            file.append(about | size | row for row in rows)
            show(case, rows, printed)


def measure_case(
    case: Case, options: Options, device: torch.device, bar: Progress, rows: list[Row]
) -> None:
    """Append rows as they are finished; after an interrupt those of whole rounds."""
    task = bar.add_task("inputs", total=options.repeats)
    try:
        inputs = Inputs.draw(case, options.average, DTYPES[options.dtype], device)
        right = losses.exact(inputs)
    except (RuntimeError, MemoryError) as error:  # too large for this machine
        rows.append({"contender": "all", "quantity": "all", "status": timing.status_of(error)})
        return
    calls: dict[tuple[str, str], Callable[[], Tensor]] = {}
    base = [0, inputs.logits.nbytes]
    for name, build in losses.contenders(options.kernels).items():
        bar.update(task, description=f"{name}: first call")
        try:
            if name.startswith("literal"):
                losses.check_size(build, inputs, options.repeats)
            contender = build(inputs)
            losses.check_result(name, contender, right)
            if BOTH in contender.calls:
                contender.leaf.grad = None
                peak = timing.peak_memory(contender.calls[BOTH], device)
                contender.leaf.grad = None
                base[0] = base[0] or peak  # cross_entropy comes first
                rows.append(_row(name, MEMORY, [peak], "bytes", [[value] for value in base]))
            calls |= {(name, quantity): call for quantity, call in contender.calls.items()}
        except Exception as error:  # any kind: a kernel may be anyone's
            status = timing.status_of(error)
            rows.append({"contender": name, "quantity": "all", "status": status})
    samples: dict[tuple[str, str], list[float]] = {}

    def on_round(done: int) -> None:
        bar.update(task, description=f"round {done + 1}", completed=done)

    try:
        failed = timing.time_calls(
            calls, samples, rounds=options.repeats, device=device, on_round=on_round
        )
        for (name, quantity), raised in failed.items():
            status = timing.status_of(raised)
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
    """values: in s or bytes. bases: those of the two baselines in the same rounds, or empty."""
    scale = {"ms": 1e3, "bytes": 1}[unit]
    summary = results.summarize([scale * value for value in values], unit)
    row: Row = {"contender": name, "quantity": quantity} | summary
    for column, base in zip(("to_cross_entropy", "to_copy"), bases, strict=True):
        if len(base) == len(values) and all(base):
            row[column] = float(f"{timing.median_ratio(values, base):.4g}")
    return row


def show(case: Case, rows: Sequence[Row], printed: set[str]) -> None:
    """Medians in ms, spread and ratios of forward+backward; new reasons for missing contenders."""
    console = Console(highlight=False)
    found = {(row["contender"], row["quantity"]): row for row in rows if row["status"] == "ok"}
    lines = []
    for name in dict.fromkeys(name for name, _ in found):
        cells = {quantity: row for (other, quantity), row in found.items() if other == name}
        main = cells.get(BOTH) or cells.get(COPY) or {}
        spread = (main["p80"] - main["p20"]) / 2 / main["median"] if main else 0
        memory = cells.get(MEMORY, {}).get("median")
        lines.append(
            [
                name,
                _three_digits(cells.get(FORWARD, {}).get("median")),
                _three_digits(main.get("median")),
                f"{100 * spread:.0f}%" if main else "",
                _three_digits(cells.get(DIRECT, {}).get("median")),
                _three_digits(main.get("to_cross_entropy")),
                _three_digits(main.get("to_copy")),
                "" if memory is None else f"{memory / 1e6:,.3f}",
            ]
        )
    heads = ("forward\nms", "forward+\nbackward", "±", "value_\nand_grad")
    if found:
        table = Table(["", *heads, "x cross_\nentropy", "x\ncopy", "memory\nMB"], lines)
        table.print(console, str(case))
    for row in rows:
        note = f"{row['contender']}: {row['status']}"
        if row["status"] != "ok" and note not in printed:
            console.print(f" {note}", markup=False, soft_wrap=True)
            printed.add(note)


def _three_digits(value: float | None) -> str:
    if not value:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{2 - math.floor(math.log10(value))}f}"


def docs_table(run: Sequence[Mapping[str, str]]) -> Table:
    """Medians of forward+backward for the cases and contenders that docs/guide/kernels.md shows."""
    found = {
        (row["contender"], *(row[size] for size in "BKC")): row["median"]
        for row in run
        if row["status"] == "ok" and row["quantity"] == BOTH
    }
    lines = []
    for case in DOCS_CASES:
        medians = [found.get((name, *map(str, case))) for name in DOCS_COLUMNS]
        lines.append([str(case), *(f"{_three_digits(float(m))} ms" if m else "" for m in medians)])
    return Table(["", *DOCS_COLUMNS.values()], lines)


def conclusions(run: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """The project's targets for which the run has the cases."""
    rows = {
        (row["contender"], row["quantity"], row["B"], row["K"], row["C"]): row
        for row in run
        if row["status"] == "ok" and row["dtype"] == "fp32" and row["device"] == "cpu"
    }

    def value(name: str, case: Case, quantity: str = BOTH, column: str = "median") -> float:
        images, views, classes = map(str, case)
        return float(rows.get((name, quantity, images, views, classes), {}).get(column) or math.nan)

    eight, sixteen = Case(128, 8, 1000), Case(128, 16, 1000)
    ours = value("native", eight)
    relative = partial(value, "native", column="to_cross_entropy")
    small = value("native", PAPER_STEP) / value("cross_entropy-views", PAPER_STEP)
    for what, found, target in (
        (f"native / cross_entropy, {eight}, {DIRECT}", relative(eight, DIRECT), "<= 1"),
        (f"native / cross_entropy, {eight}, {BOTH}", relative(eight), "<= 1"),
        (f"literal / native, {eight}, {BOTH}", value("literal", eight) / ours, ">= 25"),
        (f"literal-loop / native, {eight}, {BOTH}", value("literal-loop", eight) / ours, ""),
        (f"compiled / native, {eight}, {BOTH}", value("compiled", eight) / ours, ">= 2.5"),
        (f"native, K=16 / K=8, B=128 C=1000, {BOTH}", value("native", sixteen) / ours, "<= 2.2"),
        (f"native / cross_entropy, {PAPER_STEP}, {BOTH}", relative(PAPER_STEP), "<= 1"),
        (f"native / cross_entropy-views, {PAPER_STEP}, {BOTH}", small, ""),
    ):
        if not math.isnan(found):
            yield f"{what}: {found:.2f}{_verdict(found, target)}"


def _verdict(found: float, target: str) -> str:
    if not target:
        return ""
    sign, bound = target.split()
    met = found <= float(bound) if sign == "<=" else found >= float(bound)
    return f" (target {target}): {'met' if met else 'not met'}"


if __name__ == "__main__":
    sys.exit(cli.run(main))
