"""python -m fastaug.sweep EXPERIMENT: a grid of trainings, and the best of each setting."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from fastaug import cli
from fastaug.config import TrainConfig, setting_owners
from fastaug.errors import ConfigError
from fastaug.experiments.grids import EXPERIMENTS
from fastaug.experiments.sweep_options import GRID, SweepConfig
from fastaug.experiments.sweep_outcome import (
    check_folders,
    fetch_runs,
    selected_of,
    show_outcome,
    show_plan,
)
from fastaug.experiments.sweep_plan import Configs, Plan, make_plan
from fastaug.experiments.sweep_study import open_storage, shown
from fastaug.experiments.sweep_worker import run_stage
from fastaug.recipes import get_recipe
from fastaug.runs.console import show_table
from fastaug.runtime.signals import StopSignals, TrainingInterruptedError
from fastaug.settings import flag

PROG = "python -m fastaug.sweep"
_NOT_HERE = {
    "--recipe": "EXPERIMENT may be a recipe's name",
    "--seed": "--seeds N runs the seeds 0 to N-1",
    "--resume": "the same command goes on by itself",
    "--max-steps": "runs are compared when they have finished",
}
_LISTS = tuple(flag(name) for name in GRID)


def main(args: Sequence[str]) -> int:
    if "--list-experiments" in args:
        show_table("experiments", [(e.name, e.about) for e in EXPERIMENTS.values()])
        return 0
    plan = configure(args)
    show_plan(plan)
    if plan.options.dry_run:
        return 0
    try:
        with StopSignals() as interrupt:
            return sweep(plan, interrupt)
    except TrainingInterruptedError as interrupted:
        print(f"the same command goes on with it: {plan.folder}", file=sys.stderr)
        return interrupted.exit_code


def configure(args: Sequence[str]) -> Plan:
    """The plan that the flags mean: the sweep's own, and those of fastaug.train for every run."""
    own, training = split_flags(args)
    if not own or (all(word.startswith("-") for word in own) and not {"-h", "--help"} & {*own}):
        raise ConfigError("no EXPERIMENT given; --list-experiments says which there are")
    options = cli.parse(SweepConfig, own, prog=PROG)
    # One view goes with any batch size: what is run is checked when the grid is laid out.
    default = get_recipe(options.base.recipes[0]).replace(views=1)
    config = cli.parse_training(TrainConfig, training, prog=PROG, default=default)
    words = {word.partition("=")[0] for word in training}
    given = {name for name in setting_owners() if flag(name) in words}
    given |= {"loader"} if "--dali" in words else set()
    changes = {name: config.get(name) for name in given}
    if changes.get("data") not in (None, "", "shapes"):
        changes["data"] = str(Path(changes["data"]).expanduser().absolute())
    return make_plan(options, changes)


def split_flags(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The sweep's flags, and those that only fastaug.train has, with their values."""
    default, taken = TrainConfig(), {field.name for field in fields(SweepConfig)}
    values: dict[str, int] = {"--dali": 0}
    for name in setting_owners():
        if name not in taken:
            value = default.get(name)
            is_switch, is_pair = isinstance(value, bool), isinstance(value, tuple)
            values[flag(name)] = 0 if is_switch else 2 if is_pair else 1
    own: list[str] = []
    training: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        if name.startswith("--"):  # --batch_size is --batch-size, as in fastaug.train
            name = name.replace("_", "-")
            word = f"{name}{has_value}{value}"
        if name in _NOT_HERE:
            raise ConfigError(f"{name} is not for a sweep: {_NOT_HERE[name]}")
        if name not in values:
            if name in _LISTS and not has_value and (not rest or rest[0].startswith("--")):
                raise ConfigError(f"{name} needs at least one value")
            own.append(word)
            continue
        count = 0 if has_value else values[name]
        training += [word, *rest[:count]]
        del rest[:count]
    return own, training


def sweep(plan: Plan, interrupt: StopSignals) -> int:
    options = plan.options
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {plan.folder}: cannot be made ({error.strerror or error})"
        ) from error
    url = options.storage or f"sqlite:///{plan.folder.absolute() / 'sweep.db'}"
    storage = open_storage(url, options.heartbeat)
    print(f"storage {shown(url)}", flush=True)

    def stage(title: str, configs: Configs) -> frozenset[str]:
        check_folders(plan, configs)
        failed = run_stage(plan, title, configs, storage, interrupt)
        fetch_runs(plan, title, configs, storage)
        return failed

    tuning = plan.tuning
    failed = stage("tuning" if plan.further_seeds else "grid", tuning)
    names = [*tuning]
    if plan.further_seeds:
        chosen = [c for family in selected_of(plan, tuning) for c in family.chosen.values()]
        reruns = plan.reruns(chosen)
        failed |= stage("seeds", reruns)
        names += reruns
    show_outcome(plan, selected_of(plan, names), failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
