"""Where the defaults of train's flags come from: a recipe, a checkpoint, a config file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, suggest
from fastaug.recipes import RECIPES, default_recipe, get_recipe
from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runs.resume import find_checkpoint, restarted_checkpoint, run_of
from fastaug.runs.weights import check_network
from fastaug.settings import flag

if TYPE_CHECKING:
    from fastaug.runs.config_file import ConfigFile


def defaults(
    *, recipe: str, resume: str, out: str, data: str, config: str
) -> tuple[TrainConfig, Path | None, ConfigFile | None]:
    """The defaults below those of --config, the checkpoint to continue from, and the config file.

    The arguments are the values of the flags, "" if absent.
    """
    file = None
    if config:
        from fastaug.runs.config_file import ConfigFile  # PyYAML takes 10 ms of every start

        file = ConfigFile(config)
        resume, out = resume or file.text("resume"), out or file.text("out")
        data = data or file.text("data")
        if file.ignored:
            names = ", ".join(map(flag, file.ignored))
            print_line(f"--config {file.path}: {names} of that run not taken over")
    checkpoint = restarted_checkpoint(resume, out, print_line)
    if checkpoint is None and resume:
        checkpoint = find_checkpoint(resume, out, print_line)
        if checkpoint is None:
            print_line("--resume auto: no checkpoint yet, starting from the beginning")
    if checkpoint is not None:
        return _defaults_of(checkpoint, resume), checkpoint, file
    return get_recipe(_recipe_name(recipe, data, file)), None, file


def _defaults_of(checkpoint: Path, resume: str) -> TrainConfig:
    state = load_checkpoint(checkpoint)
    check_network(state, str(checkpoint))
    default = TrainConfig.from_saved(state["config"])
    # Only the last checkpoint continues in its folder: resuming from an older one there would
    # overwrite later work. --max-steps, --profile and --debug are not inherited.
    out = str(run_of(checkpoint))
    if Path(resume).expanduser() == checkpoint and checkpoint.name != "last.pt":
        out = ""
    return default.replace(out=out, max_steps=0, profile=False, debug=False)


def _recipe_name(recipe: str, data: str, file: ConfigFile | None) -> str:
    if file is None:
        return recipe or default_recipe(data)
    named = file.text("recipe")
    if file.has_all_settings and recipe:
        raise file.error(f"has all settings of its run; omit --recipe {recipe}")
    if recipe and named and recipe != named:
        raise file.error(f"has the recipe {named}, and --recipe is {recipe}; omit one of them")
    if file.has_all_settings:
        return ""
    if named and named not in RECIPES:
        raise file.error(f"no recipe {named[:50]!r}: {suggest(named[:50], RECIPES)}")
    return recipe or named or default_recipe(data)


def check_code(config: TrainConfig, given: Mapping[str, str], source: Path | None) -> None:
    """Refuse to import what a checkpoint or a config file names: it must be given as a flag.

    given: the flags --kernel and --log, "" if absent. source: the checkpoint or the file.
    """
    if source is None:
        return
    names = {"kernel": [config.loss.kernel], "log": list(config.run.log)}
    for name, values in names.items():
        if code := [value for value in values if ":" in value and not given[name]]:
            raise ConfigError(
                f"{source}: has your own {flag(name)} {' '.join(code)}, which is code: to run it, "
                f"give {flag(name)} {' '.join(values)}; or choose another"
            )


def print_line(text: str) -> None:
    print(text, file=sys.stderr)
