"""What a sweep has found: runs of other machines fetched, settings chosen, tables shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, printable
from fastaug.experiments.results import Run, find_results, read_config
from fastaug.experiments.selection import Chosen, Selected, select_families
from fastaug.experiments.sweep_plan import Configs, Plan, study_name
from fastaug.experiments.sweep_worker import run_folder
from fastaug.runtime.atomic import write_json

if TYPE_CHECKING:
    from optuna.storages import RDBStorage


def check_folders(plan: Plan, configs: Configs) -> None:
    """Runs that are there already must be of these settings: their results are taken, or they are
    gone on with."""
    for name, config in configs.items():
        folder = run_folder(plan, name)
        if (earlier := read_config(folder)) is None:
            continue
        differing = earlier.differences(config)
        if Path(earlier.data.data).name != Path(config.data.data).name:  # it may have moved
            differing.append(f"--data {earlier.data.data} (here: {config.data.data})")
        if differing:
            raise ConfigError(
                f"{folder}: was run with other settings, {differing[0]}; choose another --out, or "
                "give the settings that it was run with"
            )


def fetch_runs(plan: Plan, stage: str, configs: Configs, storage: RDBStorage) -> None:
    """Runs that another machine has finished, and whose folders are not seen here, as far as the
    storage knows them: config.json and summary.json."""
    import optuna

    name = study_name(plan.options, stage, configs)
    study = optuna.load_study(study_name=name, storage=storage)
    for trial in study.get_trials(deepcopy=False):
        run = trial.params.get("run")
        if run not in configs or "summary" not in trial.user_attrs:
            continue
        folder = run_folder(plan, run)
        if (folder / "summary.json").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", trial.user_attrs["config"])
        write_json(folder / "summary.json", trial.user_attrs["summary"])


def selected_of(plan: Plan, configs: Iterable[str]) -> list[Selected]:
    """What is chosen from the runs of some names."""
    folders = [run_folder(plan, name) for name in configs]
    found = find_results([folder for folder in folders if folder.is_dir()])
    return select_families(found, plan.options.select_on)


def show_outcome(plan: Plan, selected: Sequence[Selected], failed: Iterable[str]) -> None:
    console = Console(highlight=False)
    for family in selected:
        title = escape(printable(family.family.title))
        # Without rules it fits 80 columns.
        table = Table(title=title, title_justify="left", box=None, collapse_padding=True)
        columns = ("K", "average", "KL", "lr", "epochs", "tried", "top-1 %", "TTA %", "invariance")
        for column in columns:
            table.add_column(
                column, justify="left" if column == "average" else "right", no_wrap=True
            )
        for chosen in family.chosen.values():
            views, average, kl_weight, augmented = chosen.setting
            objective = (average, f"{kl_weight:g}") if views > 1 else ("", "")
            table.add_row(
                *(str(views), *objective) if augmented else ("no DA", "", ""),
                f"{chosen.lr:.3g}",
                str(chosen.epochs),
                str(chosen.candidates),
                *(_spread(chosen, name, 100, 1) for name in ("top1", "tta_top1")),
                _spread(chosen, "invariance", 1, 3),
            )
        console.print(table)
        console.print(_chosen_by(family), soft_wrap=True)
        for line in _at_the_edge(family):
            console.print(line, soft_wrap=True)
    for name in sorted(failed):
        console.print(f"failed: {name}; see {run_folder(plan, name) / 'output.txt'}", markup=False)
    write_json(
        plan.folder / "selection.json",
        {"families": [_family_record(family) for family in selected], "failed": sorted(failed)},
    )
    console.print(f"figures and tables: python -m fastaug.report {plan.folder}", markup=False)


def _spread(chosen: Chosen, measure: str, scale: float, digits: int) -> str:
    """The mean over the seeds, and half of what lies between the least and the most of them."""
    values = [scale * value for value in chosen.values(measure)]
    if not values:
        return "-"
    half = (max(values) - min(values)) / 2
    return f"{fmean(values):.{digits}f}" + (f" ±{half:.{digits}f}" if len(values) > 1 else "")


def _chosen_by(family: Selected) -> str:
    if family.on == "validation":
        share = 100 * family.family.config.data.validation
        return (
            f"lr and epochs were chosen, of so many tried, by top-1 on the {share:g}% of the "
            "training images that were held out; the measures are of the test images, which had no "
            "part in it (mean over the seeds ± half of their range)"
        )
    return (
        "lr and epochs were chosen, of so many tried, by top-1 on the test images themselves, "
        "as the paper apparently did: the measures (mean over the seeds ± half of their range) are "
        "optimiztic"
    )


def _at_the_edge(family: Selected) -> Iterator[str]:
    """Which settings have chosen the end of a grid: a wider one may find better."""
    settings: dict[str, list[str]] = {}
    for chosen in family.chosen.values():
        for edge in chosen.edges:
            settings.setdefault(edge, []).append(chosen.setting.label)
    for edge, labels in settings.items():
        yield (
            f"note: {len(labels)} of {len(family.chosen)} settings have chosen the {edge} "
            f"tried ({'; '.join(labels[:3])}{'; ...' if len(labels) > 3 else ''}): a wider grid in "
            "the same --out may find better, and trains only what is new"
        )


def _family_record(family: Selected) -> dict[str, Any]:
    return {
        "family": family.family.title,
        "chosen_on": family.on,
        "settings": [
            {
                **chosen.setting._asdict(),
                "lr": chosen.lr,
                "epochs": chosen.epochs,
                "score": chosen.score,
                "candidates": chosen.candidates,
                "edges": list(chosen.edges),
                "runs": {str(run.config.run.seed): _run_record(run) for run in chosen.runs},
            }
            for chosen in family.chosen.values()
        ],
    }


def _run_record(run: Run) -> dict[str, Any]:
    return {"folder": str(run.folder), "measures": run.measures, "validation": run.validation}


def show_plan(plan: Plan) -> None:
    """How many runs and views it is."""
    console = Console(highlight=False)
    tuning, options = plan.tuning, plan.options
    table = Table(title=f"{options.experiment}: {options.base.about}", title_justify="left")
    table.add_column("recipe", no_wrap=True)
    for column in ("K", "settings", "points", "seeds", "runs", "views"):
        table.add_column(column, justify="right", no_wrap=True)
    groups: dict[tuple[str, int], list[TrainConfig]] = {}
    for config in tuning.values():
        groups.setdefault((config.run.recipe, config.view.views), []).append(config)
    for (recipe, views), configs in groups.items():
        points = {(config.optim.lr, config.optim.epochs) for config in configs}
        seeds = {config.run.seed for config in configs}
        settings = len({(config.loss.average, config.loss.kl_weight) for config in configs})
        counts = (views, settings, len(points), len(seeds), len(configs))
        table.add_row(recipe, *(f"{n:,}" for n in counts), _short(plan.views(configs)))
    console.print(table)
    total = f"{_runs(len(tuning))}, {_short(plan.views(tuning.values()))} views"
    if plan.further_seeds:
        longest: dict[tuple, TrainConfig] = {}
        for config in tuning.values():
            key = (config.run.recipe, config.view.views, config.loss.average, config.loss.kl_weight)
            longest[key] = max(longest.get(key, config), config, key=lambda c: c.optim.epochs)
        times = len(plan.further_seeds)
        total += (
            f" to choose rate and epochs; then {_runs(len(longest) * times)}, at most "
            f"{_short(plan.views(longest.values()) * times)} views, of the choices with {times} "
            f"more {'seed' if times == 1 else 'seeds'}"
        )
    images = f"{plan.images:,} training images" if plan.images else "training images not known"
    where = "" if next(iter(tuning.values())).data else ", as no --data is given"
    console.print(f"{total} ({images} a run{where}); folder {plan.folder}", soft_wrap=True)


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count:,} runs"


def _short(count: int) -> str:
    """12,345 as it is, larger numbers in millions and billions."""
    for unit, size in (("billion", 10**9), ("million", 10**6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,}"
