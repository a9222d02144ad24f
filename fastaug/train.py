"""python -m fastaug.train: train a classifier."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fastaug import cli
from fastaug.checkpoint import find_checkpoint, load_checkpoint
from fastaug.config import TrainConfig
from fastaug.interrupt import Interrupted
from fastaug.recipes import get_recipe
from fastaug.trainer import Trainer


def main(args: Sequence[str]) -> int:
    config, checkpoint = configure(args)
    try:
        Trainer(config, checkpoint).fit()
    except Interrupted as interrupted:
        return interrupted.exit_code
    return 0


def configure(args: Sequence[str]) -> tuple[TrainConfig, Path | None]:
    """The config that the flags mean, and the checkpoint to continue from.

    The defaults of the flags are those of the recipe, or of the checkpoint's own config.
    """
    named = cli.peek(args, "recipe", "resume", "out")
    checkpoint = find_checkpoint(named["resume"], named["out"]) if named["resume"] else None
    if checkpoint is not None:
        default = TrainConfig.from_dict(load_checkpoint(checkpoint)["config"])
        # Only last.pt goes on in its folder: from an older one, later work would be written over.
        # --max-steps ended the earlier invocation, not the run; --profile and --debug were its own.
        out = str(checkpoint.parent) if checkpoint.name == "last.pt" else ""
        default = replace(default, out=out, max_steps=0, profile=False, debug=False)
    else:
        default = get_recipe(named["recipe"] or TrainConfig.recipe)
    config = cli.parse(TrainConfig, args, prog="python -m fastaug.train", default=default)
    if named["resume"] and checkpoint is None:
        print("--resume auto: no checkpoint yet, starting from the beginning", file=sys.stderr)
    data = config.data
    if data not in ("", "shapes"):
        # The checkpoint must find it from anywhere.
        data = str(Path(data).expanduser().absolute())
    return replace(config, data=data, out=config.out or _new_folder(config)), checkpoint


def _new_folder(config: TrainConfig) -> str:
    """runs/WHAT-DATE-TIME-PROCESS; the default recipe on other data takes the name of the data."""
    own = config.recipe != TrainConfig.recipe or config.data == TrainConfig.data
    what = config.recipe if own else Path(config.data).name.partition(".")[0]
    return f"runs/{what}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


if __name__ == "__main__":
    sys.exit(cli.run(main))
