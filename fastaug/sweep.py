"""python -m fastaug.sweep EXPERIMENT: train a grid of runs and choose the best of each setting."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fastaug import cli
from fastaug.config import TrainConfig, setting_owners
from fastaug.errors import ConfigError
from fastaug.experiments.grids import EXPERIMENTS
from fastaug.experiments.report_format import counted
from fastaug.experiments.sweep_config import SweepConfig, split_flags
from fastaug.experiments.sweep_outcome import check_folders, select_runs, show_outcome
from fastaug.experiments.sweep_plan import Configs, Plan, make_plan, show_plan
from fastaug.experiments.sweep_reuse import read_earlier, reuse_runs
from fastaug.experiments.sweep_study import open_storage, without_password
from fastaug.experiments.sweep_worker import run_stage
from fastaug.recipes import get_recipe
from fastaug.runs.console import show_table
from fastaug.runtime.folder_files import check_entries
from fastaug.runtime.signals import StopSignals, TrainingInterruptedError
from fastaug.settings import flag
from fastaug.urls import absolute_data

PROG = "python -m fastaug.sweep"


def main(args: Sequence[str]) -> int:
    if "--list-experiments" in args:
        show_table("experiments", [(e.name, e.about) for e in EXPERIMENTS.values()])
        return 0
    plan = configure(args)
    show_plan(plan)
    if plan.sweep.dry_run:
        return 0
    try:
        with StopSignals() as interrupt:
            return run_sweep(plan, interrupt)
    except TrainingInterruptedError as interrupted:
        print(f"interrupted; run the same command to continue {plan.folder}", file=sys.stderr)
        return interrupted.exit_code


def configure(args: Sequence[str]) -> Plan:
    """The plan of a sweep, from the flags of fastaug.sweep and those of fastaug.train."""
    own, training = split_flags(list(cli.without_short_forms(args)))
    if not own or (all(word.startswith("-") for word in own) and not {"-h", "--help"} & {*own}):
        raise ConfigError("no EXPERIMENT given; --list-experiments shows them")
    sweep = cli.parse(SweepConfig, own, prog=PROG)
    # Any batch size is a multiple of one view; the configs of the grid are checked later.
    default = get_recipe(sweep.base.recipes[0]).replace(views=1)
    config = cli.parse_training(TrainConfig, training, prog=PROG, default=default)
    words = {word.partition("=")[0] for word in training}
    given = {name for name in setting_owners() if flag(name) in words}
    given |= {"loader"} if "--dali" in words else set()
    changes = {name: config.get(name) for name in given}
    if changes.get("data") is not None:
        changes["data"] = absolute_data(changes["data"])
    if changes.get("weights"):
        changes |= {"weights": str(Path(changes["weights"]).expanduser().absolute())}
        changes |= {"pretrained": config.model.pretrained}  # a recipe's may have given way
    return make_plan(sweep, changes)


def run_sweep(plan: Plan, interrupt: StopSignals) -> int:
    """Run all stages, then choose and print the results; returns 1 if runs have failed."""
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--out {plan.folder}: cannot be created ({reason})") from error
    for folder in (plan.folder, plan.folder / "runs"):  # the folder may come from a stranger
        check_entries(folder, files={"sweep.db", "selection.json"})
    url = plan.sweep.storage or f"sqlite:///{plan.folder.absolute() / 'sweep.db'}"
    storage = open_storage(url, plan.sweep.heartbeat)
    print(f"storage {without_password(url)}", flush=True)

    earlier = read_earlier(plan.sweep.reuse)

    def stage(title: str, configs: Configs) -> frozenset[str]:
        check_folders(plan, configs)
        if reused := reuse_runs(plan, configs, earlier):
            print(f"{title}: {counted(reused, 'run')} of {len(configs):,} taken from --reuse")
        return run_stage(plan, title, configs, storage, interrupt)

    names = [*plan.tuning]
    failed = stage("tuning" if plan.further_seeds else "grid", plan.tuning)
    if plan.further_seeds:
        reruns = plan.reruns(select_runs(plan, names))
        failed |= stage("seeds", reruns)
        names += reruns
    show_outcome(plan, select_runs(plan, names), failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
