"""python -m fastaug.train: train a classifier. Under torchrun, on many ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from fastaug import cli
from fastaug.config import TrainConfig
from fastaug.data.config import DataConfig
from fastaug.engine.trainer import Trainer
from fastaug.errors import ConfigError
from fastaug.recipes import RECIPES, first_line, get_recipe
from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runs.checkpoint_writer import find_checkpoint, newest_checkpoint, run_of
from fastaug.runs.config import RunConfig
from fastaug.runs.console import show_table
from fastaug.runs.folder import check_unused
from fastaug.runtime.distributed import Group
from fastaug.runtime.signals import TrainingInterruptedError
from fastaug.runtime.torchrun import (
    join_process_group,
    launch_name,
    launch_stamp,
    machines,
    was_restarted,
)


def main(args: Sequence[str]) -> int:
    if "--list-recipes" in args:
        show_recipes()
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
    named = cli.peek(args, "recipe", "resume", "out")
    checkpoint = _own_checkpoint(named["resume"], named["out"])
    if checkpoint is None and named["resume"]:
        checkpoint = find_checkpoint(named["resume"], named["out"], _say)
        if checkpoint is None:
            _say("--resume auto: no checkpoint yet, starting from the beginning")
    if checkpoint is not None:
        default = TrainConfig.from_flat(**load_checkpoint(checkpoint)["config"])
        # Only the last one goes on in its folder: from an older one that is asked for by name,
        # later work would be written over.
        # --max-steps ended the earlier invocation, not the run; --profile and --debug were its own.
        out = str(run_of(checkpoint))
        if Path(named["resume"]).expanduser() == checkpoint and checkpoint.name != "last.pt":
            out = ""
        default = default.replace(out=out, max_steps=0, profile=False, debug=False)
    else:
        default = get_recipe(named["recipe"] or RunConfig.recipe)
    config = cli.parse_training(TrainConfig, args, prog="python -m fastaug.train", default=default)
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
    folder = Path(config.run.out or _new_folder(config)).expanduser()
    if checkpoint is None:
        check_unused(folder)  # before a large data set is looked over
    data = config.data.data
    if data not in ("", "shapes"):
        # The checkpoint must find it from anywhere.
        data = str(Path(data).expanduser().absolute())
    return config.replace(data=data, out=str(folder)), checkpoint


def show_recipes() -> None:
    """What --recipe takes."""
    show_table("recipes (--recipe NAME --help shows all of one's settings)", recipe_rows())


def recipe_rows() -> list[tuple[str, str]]:
    """The name of each recipe, what it is, and the settings that set it apart."""
    rows = []
    for name in RECIPES:
        config = get_recipe(name)
        settings = f"{config.model.model}, K={config.view.views}, batch {config.optim.batch_size}, "
        settings += f"{config.optim.epochs} epochs, lr {_as_power(config.optim.lr)}"
        settings += " x unique images" if config.optim.lr_scaling == "unique-images" else ""
        rows.append((name, f"{first_line(name)}\n{settings}, {config.optim.schedule}"))
    return rows


def _as_power(rate: float) -> str:
    """The paper's rates are powers of two."""
    exponent = math.log2(rate)
    return f"2^{exponent:g}" if exponent == round(exponent) else f"{rate:g}"


def _own_checkpoint(resume: str, out: str) -> Path | None:
    """Where a run that torchrun has started anew goes on, without being asked to."""
    if not (was_restarted() or launch_name()):
        return None
    folder = Path(out or resume or _folder_of_this_launch()).expanduser()
    if not folder.is_dir():
        return None
    checkpoint = newest_checkpoint(folder, _say)
    if checkpoint is None:
        return None
    if was_restarted() or load_checkpoint(checkpoint)["launch"] == launch_name():
        _say(f"started anew by torchrun: going on from {checkpoint}")
        return checkpoint
    return None


def _new_folder(config: TrainConfig) -> str:
    """runs/WHAT-DATE-TIME-PROCESS; the default recipe on other data takes the name of the data."""
    if machines() > 1:
        raise ConfigError("on several machines give --out, a folder that all of them see")
    own = config.run.recipe != RunConfig.recipe or config.data.data == DataConfig.data
    what = config.run.recipe if own else Path(config.data.data).name.partition(".")[0]
    return f"runs/{what}-{launch_stamp()}"


def _folder_of_this_launch() -> str:
    """What _new_folder has named when torchrun started this run at first."""
    return next((str(path) for path in Path("runs").glob(f"*-{launch_stamp()}")), "no such folder")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(cli.run(main))
