"""The flags of fastaug.sweep, as values, with every check of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from fastaug.errors import ConfigError
from fastaug.experiments.grids import Experiment, get_experiment
from fastaug.settings import Settings, flag, setting

GRID = ("views", "average", "kl_weight", "lr", "epochs")
"""What a grid varies, besides the seeds."""


@dataclass(frozen=True)
class SweepConfig(Settings):
    """Train a grid of runs and choose the best of each setting, as the paper does. Several machines
    share a sweep by the same command with one --storage; an interrupted one goes on by it. All
    other flags are those of fastaug.train (--data, --dali, --batch-size, ...), for every run."""

    experiment: Annotated[str, arg(metavar="EXPERIMENT")]
    """An experiment of the paper or a small version of one (--list-experiments), or a recipe, whose
    grid the next flags give."""
    views: tuple[int, ...] = ()
    """Numbers of views K; default: the experiment's, as for the following."""
    average: tuple[Literal["losses", "probs", "logits"], ...] = ()
    """What is averaged over the views of an image."""
    kl_weight: tuple[float, ...] = ()
    """Weights of the regularizer."""
    lr: tuple[float, ...] = ()
    """Learning rates."""
    epochs: tuple[int, ...] = ()
    """Epoch budgets."""
    seeds: int = setting(0, at_least=0)
    """Seeds 0, 1, ... of each run; 0: as many as the experiment has."""
    tune_seeds: int = setting(-1, at_least=-1)
    """Seeds that rate and epochs are chosen with; the other seeds are run at the choice alone. 0:
    all seeds at every point; -1: as the experiment says."""
    select_on: Literal["validation", "test"] = "validation"
    """What rate and epochs are chosen by. validation: a share of the training images is held out
    (--validation, 0.1 by default); test: the test images, as the paper apparently does."""
    storage: str = ""
    """Where the sweep is kept, a URL of Optuna's: postgresql://USER:PASSWORD@HOST/DATABASE,
    mysql+pymysql://..., sqlite:///FILE; default: sweep.db in --out."""
    study: str = ""
    """Name of the sweep in the storage; default: the experiment's."""
    out: str = ""
    """Folder of the sweep; default: sweeps/EXPERIMENT."""
    jobs: int = setting(0, at_least=0)
    """Runs at a time on this machine, each with its share of the GPUs or cores; 0: as many as there
    are GPUs / --ranks, or without a GPU as cores, at most 8."""
    ranks: int = setting(1, at_least=1)
    """Ranks of each run: above 1 it is started by torchrun."""
    retries: int = setting(2, at_least=0)
    """How often a run that fails is tried again; it goes on from its last checkpoint."""
    heartbeat: int = setting(30, at_least=1)
    """Seconds between two signs of life; a worker that gives none for four times as long is taken
    for dead, and another one goes on with its run."""
    dry_run: bool = False
    """Say how many runs and views it is, and end."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        get_experiment(self.experiment)
        for name in GRID:
            values = getattr(self, name)
            if repeated := sorted({v for v in values if values.count(v) > 1}):
                raise ConfigError(f"{flag(name)} has {repeated[0]} more than once")

    @property
    def base(self) -> Experiment:
        return get_experiment(self.experiment)

    @property
    def seed_count(self) -> int:
        return self.seeds or self.base.seeds

    @property
    def tune_seed_count(self) -> int:
        """Of all seeds; the same where all are run everywhere."""
        asked = self.base.tune_seeds if self.tune_seeds < 0 else self.tune_seeds
        return min(asked, self.seed_count) or self.seed_count
