"""python -m fastaug.train: train a classifier. Under torchrun, on many ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fastaug import cli
from fastaug.config import TrainConfig
from fastaug.engine.parameter_groups import freeze
from fastaug.engine.trainer import Trainer
from fastaug.errors import ConfigError
from fastaug.models.build import check_configured_model
from fastaug.recipes import default_recipe, get_recipe, recipe_rows
from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runs.console import show_table
from fastaug.runs.folder import check_unused, check_writable
from fastaug.runs.resume import find_checkpoint, new_run_folder, restarted_checkpoint, run_of
from fastaug.runtime.distributed import Group
from fastaug.runtime.signals import TrainingInterruptedError
from fastaug.runtime.torchrun import join_process_group
from fastaug.urls import absolute_data
from fastaug.views.resizing import sizes_of_training


def main(args: Sequence[str]) -> int:
    if "--list-recipes" in args:
        show_table("recipes (--recipe NAME --help shows all of one's settings)", recipe_rows())
        return 0
    with join_process_group() as group:
        config, checkpoint = group.from_first(lambda: configure(args, group))
        try:
            Trainer(config, checkpoint, group).fit()
        except TrainingInterruptedError as interrupted:
            return interrupted.exit_code
    return 0


def configure(args: Sequence[str], group: Group | None = None) -> tuple[TrainConfig, Path | None]:
    """The config that the flags mean, and the checkpoint to continue from.

    The defaults of the flags are those of the recipe, or of the checkpoint's own config.
    """
    named = cli.peek(args, "recipe", "resume", "out", "data")
    checkpoint = restarted_checkpoint(named["resume"], named["out"], _say)
    if checkpoint is None and named["resume"]:
        checkpoint = find_checkpoint(named["resume"], named["out"], _say)
        if checkpoint is None:
            _say("--resume auto: no checkpoint yet, starting from the beginning")
    if checkpoint is not None:
        default = TrainConfig.from_saved(load_checkpoint(checkpoint)["config"])
        # Only the last checkpoint continues in its folder: resuming from an older one there would
        # overwrite later work. --max-steps, --profile and --debug are not inherited.
        out = str(run_of(checkpoint))
        if Path(named["resume"]).expanduser() == checkpoint and checkpoint.name != "last.pt":
            out = ""
        default = default.replace(out=out, max_steps=0, profile=False, debug=False)
    else:
        default = get_recipe(named["recipe"] or default_recipe(named["data"]))
    config = cli.parse_training(
        TrainConfig,
        args,
        prog="python -m fastaug.train",
        default=default,
        switches={"list_recipes": "list the recipes that --recipe takes, and exit"},
        follow_weights=checkpoint is None,
    )
    if (
        checkpoint is not None
        and ":" in config.loss.kernel
        and not cli.peek(args, "kernel")["kernel"]
    ):
        raise ConfigError(
            f"{checkpoint} was trained with your own kernel, {config.loss.kernel}, which is code: "
            f"to run it again, give --kernel {config.loss.kernel}; or choose another"
        )
    config.images_per_part(1 if group is None else group.ranks)
    folder = Path(config.run.out or new_run_folder(config)).expanduser()
    # Before a large data set is scanned and kernels are compiled.
    check_writable(folder)
    if checkpoint is None:
        check_unused(folder)
    model = check_configured_model(
        config.model, sizes_of_training(config.view, config.optim.epochs)
    )
    freeze(model, config.optim.freeze)  # checks the names
    data = absolute_data(config.data.data)
    weights = config.model.weights and str(Path(config.model.weights).expanduser().absolute())
    return config.replace(data=data, weights=weights, out=str(folder)), checkpoint


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(cli.run(main))
