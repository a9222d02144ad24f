"""Runs on disk: finished, stopped and running ones, and families of finished ones."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from fastaug.config import TrainConfig, free_on_resume, setting_owners
from fastaug.errors import DataError
from fastaug.experiments.record import is_record, portable, read_record
from fastaug.experiments.report_format import number
from fastaug.experiments.run import Run
from fastaug.experiments.run_files import read_run_config, read_summary, short_reason
from fastaug.runs.lock import is_locked
from fastaug.settings import flag

_SWEPT = {"recipe", "views", "average", "kl_weight", "lr", "epochs", "seed", "augment"}
"""Settings that runs of one family may differ in, besides those that may change on resume."""


@dataclass(frozen=True)
class Skipped:
    """A run folder that is left out, and the reason."""

    folder: Path
    reason: str


@dataclass(frozen=True)
class Family:
    """Finished runs of a sweep, or of no sweep, that differ only in what the paper varies: one set
    of figures. Sweeps are kept apart, because each chooses among candidates of its own."""

    title: str
    """Network and data: wrn-16-4 on cifar-100-python."""
    slug: str
    """The title as part of file names, unique among families."""
    runs: tuple[Run, ...]
    sweep: str = ""
    """Name of the sweep; empty for runs of none."""

    @property
    def config(self) -> TrainConfig:
        """Config of the first run, for the settings that all runs share."""
        return self.runs[0].config

    @property
    def recipes(self) -> set[str]:
        return {run.config.run.recipe for run in self.runs}


@dataclass(frozen=True)
class Results:
    """All runs below some folders."""

    runs: tuple[Run, ...]
    families: tuple[Family, ...]
    """The finished runs."""
    skipped: tuple[Skipped, ...]
    """Folders that cannot be read."""

    @property
    def without_result(self) -> list[Skipped]:
        """All folders that are in no family."""
        unfinished = [Skipped(r.folder, r.progress) for r in self.runs if r.state != "finished"]
        return [*unfinished, *self.skipped]


def find_results(roots: Sequence[str | Path]) -> Results:
    """All runs in and below some folders. A folder that cannot be read does not affect others."""
    runs: list[Run] = []
    skipped: list[Skipped] = []
    for folder, files in _run_folders(roots):
        try:
            runs += read_record(folder) if is_record(files) else [_read_run(folder)]
        except (OSError, DataError) as error:
            skipped.append(Skipped(folder, short_reason(error)))
    finished = [run for run in runs if run.state == "finished"]
    return Results(tuple(runs), tuple(_families(finished)), tuple(skipped))


def _run_folders(roots: Sequence[str | Path]) -> list[tuple[Path, set[str]]]:
    """Folders of runs and of records, each once, with the names of their files."""
    found: dict[Path, tuple[Path, set[str]]] = {}
    for root in roots:
        top = Path(root).expanduser()
        if not top.is_dir():
            what = "is a file" if top.exists() else "no such folder"
            raise DataError(f"{root}: {what}; give a run folder or a folder above run folders")
        # Not os.walk, which recurses: a stranger's folders may be nested a thousand deep.
        waiting = [top]
        while waiting:
            folder = waiting.pop()
            below, files = _entries(folder)
            # Neither is nested.
            if {"config.json", "metrics.jsonl"} & files or is_record(files):
                found.setdefault(folder.resolve(), (folder, files))
            else:
                waiting += [folder / name for name in sorted(below, reverse=True)]
    return list(found.values())


def _entries(folder: Path) -> tuple[set[str], set[str]]:
    """Names of the folders in a folder, and of all else, links included; empty if unreadable."""
    try:
        with os.scandir(folder) as found:
            entries = {entry.name: entry.is_dir(follow_symlinks=False) for entry in found}
    except OSError:
        return set(), set()
    below = {name for name, is_folder in entries.items() if is_folder}
    return below, entries.keys() - below


def read_config(folder: Path) -> TrainConfig | None:
    """Config of a run folder, finished or not; None if it cannot be read."""
    try:
        return read_run_config(folder)
    except DataError:
        return None


def _read_run(folder: Path) -> Run:
    """A run in any state; DataError if its files cannot be read or have values of wrong kinds."""
    config = read_run_config(folder)
    is_running = is_locked(folder)  # checked first: a run that ends after this has its summary
    summary, sweeps = read_summary(folder), _sweeps(folder)
    if summary.get("finished"):
        return Run(folder, config, summary, "finished", sweeps)
    if is_running:
        return Run(folder, config, {}, "running", sweeps)
    diverged = not summary and (folder / "bad-batch.pt").exists()
    run = Run(folder, config, {}, "diverged" if diverged else "stopped", sweeps)
    # A resumed run may have been stopped again since the summary was written.
    is_current = run.step <= (number(summary.get("step")) or 0)
    return replace(run, summary=summary) if is_current else run


def _sweeps(folder: Path) -> tuple[str, ...]:
    """The name of the sweep that a run folder is in, SWEEP/runs/NAME; () if it is in none."""
    sweep = folder.absolute().parent.parent
    is_sweep = any(os.path.lexists(sweep / name) for name in ("sweep.db", "selection.json"))
    return (sweep.name,) if is_sweep and folder.absolute().parent.name == "runs" else ()


def _families(runs: Sequence[Run]) -> list[Family]:
    shared: defaultdict[tuple, list[Run]] = defaultdict(list)
    for run in runs:
        for sweep in run.sweeps or ("",):
            shared[_shared(run.config, sweep)].append(run)
    titles = defaultdict(list)
    for key, members in shared.items():
        titles[_title(members[0].config)].append(key)
    families = []
    slugs: set[str] = set()
    for title, keys in titles.items():
        for key in keys:
            differing = _differing(keys, key) if len(keys) > 1 else ""
            numbered = (f"{slug_of(title)}-{number}" for number in count(2))
            slug = next(s for s in chain([slug_of(title)], numbered) if s not in slugs)
            slugs.add(slug)
            members = sorted(shared[key], key=lambda run: (run.setting, run.config.run.seed))
            sweep = dict(key)["sweep"]
            families.append(Family(title + differing, slug, tuple(members), sweep))
    return sorted(families, key=lambda family: family.title)


def slug_of(text: str) -> str:
    """A text in the form of a file name."""
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")


def _shared(config: TrainConfig, sweep: str) -> tuple:
    """Values that all runs of a family have in common."""
    own = portable(config)
    values: list[tuple[str, Any]] = [("sweep", sweep), ("data", own.data.data)]
    values.append(("randaugment", own.view.augment == "randaugment"))
    values += [
        (name, own.get(name)) for name in setting_owners() if name not in _SWEPT | free_on_resume()
    ]
    return tuple(values)


def _title(config: TrainConfig) -> str:
    few = f" ({config.data.train_images:,} images)" if config.data.train_images else ""
    strong = " with RandAugment" if config.view.augment == "randaugment" else ""
    return f"{config.model.model} on {Path(config.data.data).name}{few}{strong}"


def _differing(keys: Sequence[tuple], own: tuple) -> str:
    """The settings in which a family differs from others of the same title."""
    parts = [
        f"{flag(name)} {value}" if name != "sweep" else f"sweep {value}" if value else "in no sweep"
        for place, (name, value) in enumerate(own)
        if len({key[place] for key in keys}) > 1
    ]
    return f", {' '.join(parts)}"
