"""PREDICTION of what the paper's experiments cost in GPU hours: the plans of fastaug.sweep, and the
model of benchmarks/predict.py.

    python benchmarks/paper_cost.py [--gpus A100 H100] [--experiments NAME ...] [--seeds-of-choice]

Prints a Markdown table, which docs/paper.md holds. Nothing of this has run on a GPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import hardware
from hardware import ASSUMED
from step_model import Work, count, gpu_rates, predict

from fastaug import cli
from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, suggest
from fastaug.experiments.grids import EXPERIMENTS
from fastaug.experiments.sweep_plan import Plan
from fastaug.models.build import build_model
from fastaug.sweep import configure

PAPER = tuple(name for name in EXPERIMENTS if not name.startswith("mini-"))


@dataclass(frozen=True)
class Options:
    """PREDICTION of the GPU hours of the paper's experiments."""

    gpus: tuple[str, ...] = ("A100", "H100")
    """A100, H100, L4, B200."""
    experiments: tuple[str, ...] = PAPER
    """As fastaug.sweep --list-experiments names them."""
    seeds_of_choice: bool = False
    """Rate and epochs are tuned with one seed, and the others are run at the choice alone
    (fastaug.sweep --tune-seeds 1); the middle number of epochs stands for the choice."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        for name in self.gpus:
            hardware.get_gpu(name)
        for name in self.experiments:
            if name not in PAPER:
                raise ConfigError(f"--experiments {name}: {suggest(name, PAPER)}")


def main(args: Sequence[str]) -> int:
    options = cli.parse(Options, args, prog="python benchmarks/paper_cost.py")
    hours = (f"{gpu} hours (fast to slow end)" for gpu in options.gpus)
    header = ["experiment", "runs", "views", *hours]
    print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header))
    for name in options.experiments:
        plan = configure([name, "--select-on", "test", "--dry-run"])
        configs = list(planned(plan, options.seeds_of_choice))
        cells = [name, f"{len(configs):,}", f"{plan.views(configs) / 1e9:,.0f} billion"]
        cells += [_hours(plan, configs, gpu) for gpu in options.gpus]
        print("| " + " | ".join(cells) + " |", flush=True)
    return 0


def planned(plan: Plan, seeds_of_choice: bool) -> Iterable[TrainConfig]:
    """The runs of an experiment."""
    configs = list(plan.tuning.values())
    if not seeds_of_choice:
        return configs
    budgets = sorted({config.optim.epochs for config in configs})
    epochs, rate = budgets[len(budgets) // 2], configs[0].optim.lr
    return [
        c for c in configs if c.run.seed == 0 or (c.optim.epochs == epochs and c.optim.lr == rate)
    ]


def _hours(plan: Plan, configs: Iterable[TrainConfig], gpu: str) -> str:
    mid, fast, slow = (
        sum(plan.steps(c) * _gpu_seconds_of_a_step(_cost_key(c), gpu, case) for c in configs) / 3600
        for case in ("mid", "high", "low")
    )
    return f"{mid:,.0f} ({fast:,.0f} to {slow:,.0f})"


Key = tuple[str, int, int, int, str, str]


def _cost_key(config: TrainConfig) -> Key:
    """What the time of a step depends on."""
    strong = "randaugment" if config.view.augment == "randaugment" else "crop-flip"
    return (
        config.model.model,
        config.view.size,
        config.optim.batch_size,
        config.view.views,
        config.run.precision,
        strong,
    )


@cache
def _gpu_seconds_of_a_step(key: Key, name: str, case: hardware.Case) -> float:
    """On one GPU for CIFAR, on eight for ImageNet, whose 1,024 views may not fit into fewer."""
    model, size, batch, k, precision, augment = key
    small = size == 32
    devices = 1 if small else 8
    gpu = hardware.get_gpu(name)
    rates = gpu_rates(
        gpu, ASSUMED, case, precision=precision, augment=augment, storage=hardware.STORAGE.value
    )
    if small:  # the images lie in memory, decoded
        rates = replace(rates, decode=math.inf, storage=math.inf, decode_on_device=False)
    work = _work(model, size, batch // devices, precision)
    step = predict(work, rates, k=k, devices=devices, image_bytes=int(hardware.IMAGE_BYTES.value))
    return devices * batch / step.views


@cache
def _work(model: str, size: int, views: int, precision: str) -> Work:
    classes = 100 if size == 32 else 1000
    build = partial(build_model, model, classes, image_size=size)
    return count(build, views=views, size=size, precision=precision)


if __name__ == "__main__":
    sys.exit(cli.run(main))
