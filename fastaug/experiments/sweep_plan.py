"""What a sweep is going to run: by name, in one stage or two."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastaug.config import TrainConfig, free_on_resume
from fastaug.data.sources import open_split
from fastaug.data.split import split_training
from fastaug.errors import ConfigError
from fastaug.experiments.grids import Grid, expand
from fastaug.experiments.selection import Chosen
from fastaug.experiments.sweep_options import GRID, SweepConfig

VALIDATION = 0.1
"""Share of the training images that is held out to choose by, if nothing else is said."""

Configs = dict[str, TrainConfig]


@dataclass(frozen=True)
class Plan:
    """The runs of a sweep. Those of the second stage depend on what the first one finds."""

    options: SweepConfig
    grids: tuple[Grid, ...]
    changes: Mapping[str, Any]
    """Settings that the flags give to every run."""
    images: int
    """Training images of a run; 0: not known."""

    @property
    def folder(self) -> Path:
        return Path(self.options.out or f"sweeps/{self.options.experiment}").expanduser()

    @property
    def tuning(self) -> Configs:
        """The first stage: every point of the grid."""
        return expand(self.grids, range(self.options.tune_seed_count), self.changes)

    @property
    def further_seeds(self) -> range:
        """Of the second stage, which runs what was chosen; empty if there is none."""
        return range(self.options.tune_seed_count, self.options.seed_count)

    def reruns(self, chosen: Iterable[Chosen]) -> Configs:
        """The second stage: the choice of each setting with the seeds that are left."""
        configs: Configs = {}
        for choice in chosen:
            first = choice.runs[0].config
            grid = Grid(
                first.run.recipe,
                views=(first.view.views,),
                average=(first.loss.average,),
                kl_weight=(first.loss.kl_weight,),
                lr=(first.optim.lr,),
                epochs=(first.optim.epochs,),
            )
            configs |= expand([grid], self.further_seeds, self.changes)
        return configs

    def views(self, configs: Iterable[TrainConfig]) -> int:
        """That are trained on in all, as whole steps."""
        return sum(self.steps(config) * config.optim.batch_size for config in configs)

    def steps(self, config: TrainConfig) -> int:
        """Of a whole run; 0 where the images are not known."""
        unique = config.images_per_step
        left_out = config.data.last_batch == "drop"
        return config.optim.epochs * (
            self.images // unique if left_out else -(-self.images // unique)
        )


def make_plan(options: SweepConfig, changes: Mapping[str, Any]) -> Plan:
    """changes: settings of fastaug.train that the flags gave."""
    overridden = {name: values for name in GRID if (values := getattr(options, name))}
    grids = tuple(replace(grid, **overridden) for grid in options.base.grids)
    changes = dict(changes)
    first = next(iter(expand(grids[:1], [0], changes).values()))
    if options.select_on == "validation" and not first.data.validation:
        if "validation" in changes:
            raise ConfigError(
                "--select-on validation needs a --validation above 0; or use --select-on test"
            )
        changes["validation"] = VALIDATION
    elif options.select_on == "test":
        changes.setdefault("validation", 0.0)
    plan = Plan(options, grids, changes, images=0)
    config = first.replace(**{k: v for k, v in changes.items() if k == "validation"})
    plan = replace(plan, images=_images(options, config))
    for config in plan.tuning.values():
        if plan.images and not plan.steps(config):
            raise ConfigError(
                f"{plan.images:,} training images are less than a step of {config.images_per_step} "
                f"(--batch-size {config.optim.batch_size} / --views {config.view.views}); "
                "lower --batch-size, hold out fewer, or use more data"
            )
    return plan


def _images(options: SweepConfig, config: TrainConfig) -> int:
    """Training images of each run, from the data if it is at hand."""
    if config.data.data:
        train, _ = split_training(
            open_split(config.data.data, "train"),
            validation=config.data.validation,
            train_images=config.data.train_images,
        )
        return len(train)
    if not options.dry_run:
        raise ConfigError(
            f"{options.experiment}: give --data PATH (or --dry-run, which needs no data)"
        )
    return config.data.train_images or int(options.base.images * (1 - config.data.validation))


def study_name(options: SweepConfig, stage: str, configs: Configs) -> str:
    """Of a stage in the storage. Another grid is another study, as Optuna's are fixed when they are
    made; so are other settings, whose results are no results of these. What an earlier one has
    finished is found in the run folders."""
    digest = hashlib.sha256()
    for name in sorted(configs):
        config = configs[name].to_flat()
        kept = {k: v for k, v in sorted(config.items()) if k not in free_on_resume()}
        digest.update(f"{name} {kept} {Path(config['data']).name}\n".encode())
    return f"{options.study or options.experiment} {stage} {digest.hexdigest()[:8]}"
