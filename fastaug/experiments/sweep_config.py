"""The flags of fastaug.sweep, and how they are separated from those of fastaug.train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from tyro.conf import arg

from fastaug.config import TrainConfig, setting_owners
from fastaug.errors import ConfigError
from fastaug.experiments.grids import Experiment, get_experiment
from fastaug.kernels.config import Average
from fastaug.normalization import NORMALIZATION
from fastaug.settings import Settings, flag, setting, switch

GRID = ("views", "average", "kl_weight", "lr", "epochs")
"""Settings that a grid varies, besides the seed."""
_NOT_IN_A_SWEEP = {
    "--recipe": "EXPERIMENT may be a recipe's name",
    "--seed": "--seeds N runs the seeds 0 to N-1",
    "--resume": "run the same command again to continue",
    "--max-steps": "only finished runs are compared",
}


@dataclass(frozen=True)
class SweepConfig(Settings):
    """Train a grid of runs and choose the best of each setting, as the paper does. To continue an
    interrupted sweep, run the same command again; to share a sweep between machines, run it on each
    of them with the same --storage. All other flags are those of fastaug.train (--data, --dali,
    --batch-size, ...) and apply to every run."""

    experiment: Annotated[str, arg(metavar="EXPERIMENT")]
    """An experiment of the paper or a small version of one (--list-experiments), or a recipe with a
    grid from the next flags."""
    views: tuple[int, ...] = ()
    """Numbers of views K; default, as for the next flags: those of the experiment."""
    average: tuple[Average, ...] = ()
    """What is averaged over the views of an image."""
    kl_weight: tuple[float, ...] = ()
    """Weights of the regularizer."""
    lr: tuple[float, ...] = ()
    """Learning rates."""
    epochs: tuple[int, ...] = ()
    """Epoch budgets."""
    seeds: int = setting(0, at_least=0)
    """Number of seeds of each run: 0, 1, ...; 0: the experiment's number."""
    tune_seeds: int = setting(-1, at_least=-1)
    """Number of seeds for choosing learning rate and epochs; the other seeds run only with the
    chosen ones. 0: all seeds at every point of the grid; -1: the experiment's number."""
    select_on: Literal["validation", "test"] = "validation"
    """Images for choosing learning rate and epochs by top-1. validation: held-out training images
    (--validation, 0.1 by default); test: the test images, as the paper appears to do."""
    storage: str = ""
    """Database of the sweep, an Optuna URL: postgresql://USER:PASSWORD@HOST/DATABASE,
    mysql+pymysql://..., sqlite:///FILE; default: sweep.db in --out."""
    study: str = ""
    """Name of the sweep in the storage; default: the experiment's."""
    out: str = ""
    """Folder of the sweep; default: sweeps/EXPERIMENT."""
    reuse: tuple[str, ...] = ()
    """Folders with earlier runs, or records of them (fastaug.report --record): a run of this sweep
    that is among them, with all settings equal, is not trained again."""
    jobs: int = setting(0, at_least=0)
    """Concurrent runs on this machine, each with its share of the GPUs or cores; 0: number of GPUs
    / --ranks, or without a GPU the number of cores / --ranks, at most 8."""
    ranks: int = setting(1, at_least=1)
    """Ranks of each run; more than 1 are started with torchrun."""
    retries: int = setting(2, at_least=0)
    """Retries of a run that fails; it continues from its last checkpoint."""
    heartbeat: int = setting(30, at_least=1)
    """Seconds between heartbeats; after four missed ones a worker counts as lost, and another
    one continues its run."""
    dry_run: bool = False
    """Print the number of runs and views, and exit."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        get_experiment(self.experiment)
        for name in GRID:
            values = getattr(self, name)
            if repeated := sorted({v for v in values if values.count(v) > 1}):
                raise ConfigError(
                    f"{flag(name)} has {repeated[0]} more than once; give each value once"
                )

    @property
    def base(self) -> Experiment:
        return get_experiment(self.experiment)

    @property
    def seed_count(self) -> int:
        return self.seeds or self.base.seeds

    @property
    def tune_seed_count(self) -> int:
        """Seeds of the first stage; all seeds if there is no second stage."""
        asked = self.base.tune_seeds if self.tune_seeds < 0 else self.tune_seeds
        return min(asked, self.seed_count) or self.seed_count


def split_flags(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The sweep's flags, and those that only fastaug.train has, with their values."""
    taken = {field.name for field in fields(SweepConfig)}
    value_counts: dict[str, int] = {"--dali": 0}
    for name, value in ((name, TrainConfig().get(name)) for name in setting_owners()):
        if name not in taken:
            if isinstance(value, bool):
                value_counts |= {switch(name, True): 0, switch(name, False): 0}
            else:
                value_counts[flag(name)] = 2 if isinstance(value, tuple) else 1
    own: list[str] = []
    training: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name.startswith("--"):  # --batch_size is --batch-size, as in fastaug.train
            name = name.replace("_", "-")
            word = f"{name}{equals}{value}"
        if name in _NOT_IN_A_SWEEP:
            raise ConfigError(f"{name} cannot be used with a sweep: {_NOT_IN_A_SWEEP[name]}")
        if name in value_counts:
            count = 0 if equals else value_counts[name]
            if name == flag("normalize") and rest and rest[0] not in NORMALIZATION:
                count = 2  # MEAN STD
            training += [word, *rest[:count]]
            del rest[:count]
            continue
        if name in map(flag, GRID) and not equals and (not rest or rest[0].startswith("--")):
            raise ConfigError(f"{name} needs at least one value")
        own.append(word)
    return own, training
