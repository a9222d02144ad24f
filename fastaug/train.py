"""python -m fastaug.train: train a classifier. Under torchrun, on many ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fastaug import cli
from fastaug.config import TrainConfig
from fastaug.engine.dry_run import dry_run
from fastaug.engine.preflight import check_before_start
from fastaug.engine.rank_check import join_ranks
from fastaug.engine.trainer import Trainer
from fastaug.errors import ConfigError
from fastaug.recipes import recipe_rows
from fastaug.runs.console import show_table
from fastaug.runs.defaults import check_code, defaults
from fastaug.runs.resume import new_run_folder
from fastaug.runtime.distributed import Group
from fastaug.runtime.signals import TrainingInterruptedError
from fastaug.urls import absolute_data

PROG = "python -m fastaug.train"
SWITCHES = {
    "list_recipes": "list the recipes that --recipe takes, and exit",
    "print_config": "print all settings as YAML, which --config reads, and exit",
    "dry_run": "check the whole setup: two training steps and one evaluation batch; writes nothing",
}
VALUES = {"config": "defaults of the other flags: a run folder, its config.json, or a YAML file"}


def main(args: Sequence[str]) -> int:
    if "--list-recipes" in args:
        show_table("recipes (--recipe NAME --help shows all of one's settings)", recipe_rows())
        return 0
    with join_ranks(args) as group:
        if "--print-config" in args:
            print_config(args, group)
            return 0
        config, checkpoint = group.from_first(lambda: configure(args, group))
        if "--dry-run" in args:
            dry_run(config, checkpoint, group)
            return 0
        try:
            Trainer(config, checkpoint, group).fit()
        except TrainingInterruptedError as interrupted:
            return interrupted.exit_code
    return 0


def print_config(args: Sequence[str], group: Group) -> None:
    from fastaug.runs.config_file import as_yaml  # PyYAML takes 10 ms of every start

    config, _ = group.from_first(lambda: read_settings(args))
    print(as_yaml(config) if group.is_first else "", end="")


def read_settings(args: Sequence[str]) -> tuple[TrainConfig, Path | None]:
    """The settings that the flags mean, and the checkpoint to continue from.

    The defaults of the flags are those of the recipe or of the checkpoint's own config, and those
    of --config.
    """
    named = cli.peek(args, "recipe", "resume", "out", "data", "config")
    default, checkpoint, file = defaults(**named)
    if file is not None:
        words = file.flags()
        try:
            default = cli.parse_training(TrainConfig, words, prog=PROG, default=default)
        except ConfigError as error:
            raise file.error(str(error)) from error
    config = cli.parse_training(
        TrainConfig,
        args,
        prog=PROG,
        default=default,
        switches=SWITCHES,
        values=VALUES,
        follow_weights=checkpoint is None,
        fixed=file.settings if file else (),
    )
    source = checkpoint or (None if file is None else file.path)
    check_code(config, cli.peek(args, "kernel", "log"), source)
    return config, checkpoint


def configure(args: Sequence[str], group: Group | None = None) -> tuple[TrainConfig, Path | None]:
    """The config of a run, checked and with its run folder, and the checkpoint to continue from."""
    config, checkpoint = read_settings(args)
    config.images_per_part(1 if group is None else group.ranks)
    folder = Path(config.run.out or new_run_folder(config)).expanduser()
    check_before_start(config, folder, is_new=checkpoint is None)
    data = absolute_data(config.data.data)
    weights = config.model.weights and str(Path(config.model.weights).expanduser().absolute())
    return config.replace(data=data, weights=weights, out=str(folder)), checkpoint


if __name__ == "__main__":
    sys.exit(cli.run(main))
