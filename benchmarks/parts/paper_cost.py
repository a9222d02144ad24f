"""PREDICTION of the GPU hours of the paper's experiments, for benchmarks/predict.py --paper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from fastaug.config import TrainConfig
from fastaug.diagnostics.step_model import Case, gpu_rates, network_work, predict
from fastaug.experiments.grids import EXPERIMENTS
from fastaug.experiments.sweep_plan import Plan
from fastaug.sweep import configure
from parts.results import Table

PAPER = tuple(name for name in EXPERIMENTS if not name.startswith(("mini-", "small-")))


def paper_table(
    experiments: Sequence[str], gpus: Sequence[str], tune_one_seed: bool
) -> Iterator[str]:
    """Lines of a Markdown table of GPU hours."""
    hours = (f"{gpu} hours (fast to slow end)" for gpu in gpus)
    header = ["experiment", "runs", "views", *hours]
    yield from Table(header, []).markdown()
    for name in experiments:
        plan = configure([name, "--select-on", "test", "--dry-run"])
        configs = planned(plan, tune_one_seed)
        cells = [name, f"{len(configs):,}", f"{plan.views(configs) / 1e9:,.0f} billion"]
        cells += [_hours(plan, configs, gpu) for gpu in gpus]
        yield "| " + " | ".join(cells) + " |"


def planned(plan: Plan, tune_one_seed: bool) -> list[TrainConfig]:
    """The runs of an experiment."""
    configs = list(plan.tuning.values())
    if not tune_one_seed:
        return configs
    budgets = sorted({config.optim.epochs for config in configs})
    choice = budgets[len(budgets) // 2], configs[0].optim.lr
    return [c for c in configs if c.run.seed == 0 or (c.optim.epochs, c.optim.lr) == choice]


def _hours(plan: Plan, configs: Iterable[TrainConfig], gpu: str) -> str:
    mid, fast, slow = (
        sum(plan.steps(c) * step_gpu_seconds(*_cost_key(c), gpu, case) for c in configs) / 3600
        for case in ("mid", "high", "low")
    )
    return f"{mid:,.0f} ({fast:,.0f} to {slow:,.0f})"


def _cost_key(config: TrainConfig) -> tuple[str, int, int, int, str, str]:
    """What the time of a step depends on."""
    view, augment = config.view, config.view.augment
    augment = "randaugment" if augment == "randaugment" else "crop-flip"
    batch, precision = config.optim.batch_size, config.run.precision
    return config.model.model, view.size, batch, view.views, precision, augment


@cache
def step_gpu_seconds(
    model: str, size: int, batch: int, k: int, precision: str, augment: str, gpu: str, case: Case
) -> float:
    """GPU seconds of a step: one GPU for CIFAR; eight for ImageNet, whose 1,024 views need them."""
    small = size == 32
    devices, classes = (1, 100) if small else (8, 1000)
    rates = gpu_rates(gpu, case, precision=precision, augment=augment)
    if small:  # the images are in memory, decoded
        rates = replace(rates, decode=math.inf, storage=math.inf, decode_on_device=False)
    work = network_work(model, classes, size, batch // devices, precision)
    return devices * batch / predict(work, rates, k=k, devices=devices).views
