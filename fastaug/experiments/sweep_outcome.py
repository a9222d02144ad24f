"""The results of a sweep: the chosen runs of each setting as a table and as selection.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastaug.errors import ConfigError, printable
from fastaug.experiments.results import find_results, read_config
from fastaug.experiments.selection import Chosen, Selected, select_families
from fastaug.experiments.sweep_plan import Configs, Plan
from fastaug.runtime.atomic import write_json

_COLUMNS = ("K", "average", "KL", "lr", "epochs", "tried", "top-1 %", "TTA %", "invariance")


def check_folders(plan: Plan, configs: Configs) -> None:
    """Raise ConfigError if a run folder holds a run with other settings: the sweep would use its
    result or continue it."""
    for name, config in configs.items():
        folder = plan.run_folder(name)
        if (earlier := read_config(folder)) is None:
            continue
        differing = earlier.differences(config)
        if Path(earlier.data.data).name != Path(config.data.data).name:  # it may have moved
            differing.append(f"--data {earlier.data.data} (here: {config.data.data})")
        if differing:
            raise ConfigError(
                f"{folder}: holds a run with other settings, {differing[0]}; choose another --out, "
                "or give the settings of that run"
            )


def select_runs(plan: Plan, names: Iterable[str]) -> list[Selected]:
    """The chosen runs of each setting, from the runs with these names."""
    folders = [plan.run_folder(name) for name in names]
    found = find_results([folder for folder in folders if folder.is_dir()])
    with_epochs = plan.sweep.base.compares_epochs
    return select_families(found, plan.sweep.select_on, with_epochs=with_epochs)


def show_outcome(plan: Plan, selected: Sequence[Selected], failed: Iterable[str]) -> None:
    """Print the chosen and the failed runs, and write selection.json."""
    console = Console(highlight=False)
    for one in selected:
        # Fits 80 columns without a box.
        title = escape(printable(one.family.title))
        table = Table(title=title, title_justify="left", box=None, collapse_padding=True)
        for column in _COLUMNS:
            justify = "left" if column == "average" else "right"
            table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for chosen in one.chosen.values():
            views, average, kl_weight, augmented, _ = chosen.setting
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
        for line in (_selection_text(one, plan), *_edge_notes(one)):
            console.print(line, soft_wrap=True)
    for name in sorted(failed):
        output = plan.run_folder(name) / "output.txt"
        console.print(f"failed: {name}; see {output}", markup=False)
    write_json(
        plan.folder / "selection.json",
        {"families": [_family_json(one) for one in selected], "failed": sorted(failed)},
    )
    console.print(f"figures and tables: python -m fastaug.report {plan.folder}", markup=False)


def _spread(chosen: Chosen, measure: str, scale: float, digits: int) -> str:
    """The mean over the seeds ± half the range."""
    values = [scale * value for value in chosen.values(measure)]
    if not values:
        return "-"
    half = (max(values) - min(values)) / 2
    return f"{fmean(values):.{digits}f}" + (f" ±{half:.{digits}f}" if len(values) > 1 else "")


def _selection_text(selected: Selected, plan: Plan) -> str:
    what = "lr was" if plan.sweep.base.compares_epochs else "lr and epochs were"
    if selected.on == "validation":
        share = 100 * selected.family.config.data.validation
        return (
            f"{what} chosen (tried: number of candidates) by top-1 on held-out images, {share:g}% "
            "of the training images; the measures are on the test images, which were "
            "not used for choosing (mean over the seeds ± half the range)"
        )
    return (
        f"{what} chosen by top-1 on the test images (tried: number of candidates), as "
        "the paper appears to do; the measures (mean over the seeds ± half the range) are "
        "therefore optimistic"
    )


def _edge_notes(selected: Selected) -> Iterator[str]:
    """Notes on choices at the edge of the grid: a wider grid may find better ones."""
    settings: dict[str, list[str]] = {}
    for chosen in selected.chosen.values():
        for edge in chosen.edges:
            settings.setdefault(edge, []).append(chosen.setting.label)
    for edge, labels in settings.items():
        some = f"{'; '.join(labels[:3])}{'; ...' if len(labels) > 3 else ''}"
        yield (
            f"note: {len(labels)} of {len(selected.chosen)} settings are best with the {edge} "
            f"tried ({some}): a wider grid may be better; with the same --out only new runs are "
            "trained"
        )


def _family_json(selected: Selected) -> dict[str, Any]:
    return {
        "family": selected.family.title,
        "chosen_on": selected.on,
        "settings": [
            {
                **chosen.setting._asdict(),
                "lr": chosen.lr,
                "epochs": chosen.epochs,
                "score": chosen.score,
                "candidates": chosen.candidates,
                "edges": list(chosen.edges),
                "runs": {
                    str(run.config.run.seed): {
                        "folder": str(run.folder),
                        "measures": run.measures,
                        "validation": run.validation,
                    }
                    for run in chosen.runs
                },
            }
            for chosen in selected.chosen.values()
        ],
    }
