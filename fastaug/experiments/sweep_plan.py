"""The plan of a sweep: its runs by name, in one stage or two."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fastaug.config import TrainConfig, free_on_resume
from fastaug.data.sources import DataSource
from fastaug.errors import ConfigError
from fastaug.experiments.grids import Grid, expand, run_name
from fastaug.experiments.run import Setting, setting_of
from fastaug.experiments.selection import Selected
from fastaug.experiments.sweep_config import GRID, SweepConfig

VALIDATION = 0.1
"""Default share of the training images that is held out for choosing."""

Configs = dict[str, TrainConfig]


@dataclass(frozen=True)
class Plan:
    """The runs of a sweep. Runs of the second stage depend on the results of the first."""

    sweep: SweepConfig
    grids: tuple[Grid, ...]
    changes: Mapping[str, Any]
    """Settings of every run that were given as flags."""
    images: int
    """Number of training images of a run; 0: unknown."""

    @property
    def folder(self) -> Path:
        return Path(self.sweep.out or f"sweeps/{self.sweep.experiment}").expanduser()

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / name

    @property
    def tuning(self) -> Configs:
        """Runs of the first stage: every point of the grid."""
        return expand(self.grids, range(self.sweep.tune_seed_count), self.changes)

    @property
    def further_seeds(self) -> range:
        """Seeds of the second stage; empty if there is no second stage."""
        return range(self.sweep.tune_seed_count, self.sweep.seed_count)

    def further_seeds_of(self, config: TrainConfig) -> range:
        """Seeds of the second stage of a run's setting: a grid may have fewer."""
        name, seed = run_name(config), config.run.seed
        limits = [g.most_seeds for g in self.grids if name in expand([g], [seed], self.changes)]
        most = 0 if 0 in limits else max(limits, default=0)
        seeds = self.further_seeds
        return range(seeds.start, min(seeds.stop, most)) if most else seeds

    def reruns(self, selected: Iterable[Selected]) -> Configs:
        """Runs of the second stage: the chosen point of each setting with the remaining seeds."""
        configs: Configs = {}
        for chosen in (chosen for one in selected for chosen in one.chosen.values()):
            first = chosen.runs[0].config
            grid = Grid(
                first.run.recipe,
                views=(first.view.views,),
                average=(first.loss.average,),
                kl_weight=(first.loss.kl_weight,),
                lr=(first.optim.lr,),
                epochs=(first.optim.epochs,),
            )
            configs |= expand([grid], self.further_seeds_of(first), self.changes)
        return configs

    def views(self, configs: Iterable[TrainConfig]) -> int:
        """Number of views that these runs train on."""
        return sum(self.steps(config) * config.optim.batch_size for config in configs)

    def steps(self, config: TrainConfig) -> int:
        """Steps of a run; 0 if the number of images is unknown."""
        unique = config.images_per_step
        dropped = config.data.last_batch == "drop"
        steps = self.images // unique if dropped else -(-self.images // unique)
        return config.optim.epochs * steps

    def study_name(self, stage: str, configs: Configs) -> str:
        """Name of a stage in the storage. An Optuna study cannot change, so another grid or other
        settings get another study. Runs that an earlier study has finished are found by their
        folders."""
        digest = hashlib.sha256()
        for name in sorted(configs):
            config = configs[name].to_flat()
            kept = {k: v for k, v in sorted(config.items()) if k not in free_on_resume()}
            digest.update(f"{name} {kept} {Path(config['data']).name}\n".encode())
        return f"{self.sweep.study or self.sweep.experiment} {stage} {digest.hexdigest()[:8]}"


def make_plan(sweep: SweepConfig, changes: Mapping[str, Any]) -> Plan:
    """changes: settings of fastaug.train that were given as flags."""
    overridden = {name: values for name in GRID if (values := getattr(sweep, name))}
    grids = tuple(replace(grid, **overridden) for grid in sweep.base.grids)
    changes = dict(changes)
    first = next(iter(expand(grids[:1], [0], changes).values()))
    if sweep.select_on == "validation" and not first.data.validation:
        if "validation" in changes:
            raise ConfigError(
                "--select-on validation needs a --validation above 0; or use --select-on test"
            )
        changes["validation"] = VALIDATION
    elif sweep.select_on == "test":
        changes.setdefault("validation", 0.0)
    config = first.replace(**{k: v for k, v in changes.items() if k == "validation"})
    plan = Plan(sweep, grids, changes, _image_count(sweep, config))
    for config in plan.tuning.values():
        if plan.images and not plan.steps(config):
            raise ConfigError(
                f"{plan.images:,} training images are fewer than a step's {config.images_per_step} "
                f"(--batch-size {config.optim.batch_size} / --views {config.view.views}); "
                "lower --batch-size, hold out fewer, or use more data"
            )
    return plan


def _image_count(sweep: SweepConfig, config: TrainConfig) -> int:
    """Number of training images of each run, from the data if it is given."""
    if config.data.data:
        source = DataSource(config.data)
        if sweep.select_on == "validation" and not source.has_test:
            raise ConfigError(
                f"--select-on validation: {config.data.data} has no test split, so the held-out "
                "images would both choose the settings and measure them; add a test split, or use "
                "--select-on test"
            )
        return len(source.training()[0])
    if not sweep.dry_run:
        raise ConfigError(
            f"{sweep.experiment}: no --data given; give --data PATH, or --dry-run to see the plan"
        )
    return config.data.train_images or int(sweep.base.images * (1 - config.data.validation))


def show_plan(plan: Plan) -> None:
    """Print the number of runs and views of a sweep."""
    console = Console(highlight=False)
    tuning, sweep = plan.tuning, plan.sweep
    table = Table(title=f"{sweep.experiment}: {sweep.base.about}", title_justify="left")
    table.add_column("recipe", no_wrap=True)
    for column in ("K", "settings", "points", "seeds", "runs", "views"):
        table.add_column(column, justify="right", no_wrap=True)
    groups: dict[tuple[str, int], list[TrainConfig]] = {}
    for config in tuning.values():
        groups.setdefault((config.run.recipe, config.view.views), []).append(config)
    for (recipe, views), configs in groups.items():
        settings = {(config.loss.average, config.loss.kl_weight) for config in configs}
        points = {(config.optim.lr, config.optim.epochs) for config in configs}
        seeds = {config.run.seed for config in configs}
        counts = (views, len(settings), len(points), len(seeds), len(configs))
        table.add_row(recipe, *(f"{n:,}" for n in counts), _short(plan.views(configs)))
    console.print(table)
    total = f"{_runs(len(tuning))}, {_short(plan.views(tuning.values()))} views"
    if plan.further_seeds:
        longest: dict[tuple[str, Setting], TrainConfig] = {}
        for config in tuning.values():
            key = (config.run.recipe, setting_of(config, with_epochs=sweep.base.compares_epochs))
            longest[key] = max(longest.get(key, config), config, key=lambda c: c.optim.epochs)
        repeats = [(config, len(plan.further_seeds_of(config))) for config in longest.values()]
        views = sum(times * plan.views([config]) for config, times in repeats)
        chosen = "lr" if sweep.base.compares_epochs else "lr and epochs"
        low, high = min(n for _, n in repeats), max(n for _, n in repeats)
        times = f"{high}" if low == high else f"{low} to {high}"
        total += (
            f" to choose {chosen}; then {_runs(sum(n for _, n in repeats))}, at most "
            f"{_short(views)} views, to repeat the chosen ones with {times} more "
            f"{'seed' if high == 1 else 'seeds'}"
        )
    images = f"{plan.images:,}" if plan.images else "an unknown number of"
    where = "" if next(iter(tuning.values())).data.data else ", no --data given"
    each = f"{images} training images per run{where}"
    console.print(f"{total} ({each}); folder {plan.folder}", soft_wrap=True)


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count:,} runs"


def _short(count: int) -> str:
    """A number as 12,345, 1.2 million or 1.2 billion."""
    for unit, size in (("billion", 10**9), ("million", 10**6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,}"
