"""Runs on disk: finished, stopped and running ones, and families of finished ones."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fastaug.config import TrainConfig, free_on_resume, setting_owners
from fastaug.errors import DataError
from fastaug.experiments.metrics_file import Metrics, read_metrics
from fastaug.experiments.report_format import number
from fastaug.experiments.run_files import read_run_config, read_summary, short_reason
from fastaug.kernels.config import Average
from fastaug.runs.lock import is_locked
from fastaug.settings import flag

Measures = dict[str, float]
State = Literal["finished", "stopped", "running", "diverged"]
AVERAGES: tuple[Average, ...] = get_args(Average)

_SWEPT = {"recipe", "views", "average", "kl_weight", "lr", "epochs", "seed", "augment"}
"""Settings that runs of one family may differ in, besides those that may change on resume."""


class Setting(NamedTuple):
    """A point of a figure's curve."""

    views: int
    average: Average
    kl_weight: float
    augmented: bool = True

    @property
    def label(self) -> str:
        """The setting in words: K=4, average losses, KL weight 1."""
        if not self.augmented:
            return "no augmentation"
        if self.views == 1:
            return "K=1"
        weight = f", KL weight {self.kl_weight:g}" if self.kl_weight else ""
        return f"K={self.views}, average {self.average}{weight}"


def setting_of(config: TrainConfig) -> Setting:
    """The setting of a run. With one view or without augmentation the objectives coincide and the
    regularizer is 0, so all such runs have the same setting."""
    if config.view.augment == "none":
        return Setting(1, "losses", 0.0, augmented=False)
    if config.view.views == 1:
        return Setting(1, "losses", 0.0)
    return Setting(config.view.views, config.loss.average, config.loss.kl_weight)


@dataclass(frozen=True)
class Run:
    """A training in any state."""

    folder: Path
    config: TrainConfig
    summary: dict[str, Any]
    """Fields of summary.json; empty if the run has none yet."""
    state: State

    @cached_property
    def metrics(self) -> Metrics:
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def records(self) -> list[dict[str, Any]]:
        """Records of metrics.jsonl; of a long run a share of them."""
        return self.metrics.records

    @property
    def step(self) -> int:
        """Last step that was logged."""
        logged = [self.summary] if self.summary else self.records
        return max((int(number(record.get("step")) or 0) for record in logged), default=0)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run; 0 if unknown."""
        if total := number(self.summary.get("total_steps")):
            return int(total)
        for record in reversed(self.records):
            step, epoch = number(record.get("step")), number(record.get("epoch"))
            if step and epoch:
                return round(number(self.config.optim.epochs * step / epoch) or 0)
        return 0

    @property
    def setting(self) -> Setting:
        return setting_of(self.config)

    @property
    def measures(self) -> Measures:
        """Measures of the final evaluation on the test images, as Evaluation.measure names them;
        empty before it."""
        return self.summary.get("measures", {})

    @property
    def validation(self) -> Measures | None:
        """The same measures on the held-out images."""
        return self.summary.get("validation")

    @property
    def progress(self) -> str:
        """The state in words: finished, or stopped at step 60 of 1,562."""
        if self.state == "finished":
            return "finished"
        of = f" of {self.total_steps:,}" if self.total_steps else ""
        at = ", step" if self.state == "running" else " at step"
        return f"{self.state}{at} {self.step:,}{of}"

    @property
    def short_progress(self) -> str:
        """The state for a column of a table: finished, or stopped 60/1,562."""
        if self.state == "finished" or not self.total_steps:
            return self.progress
        return f"{self.state} {self.step:,}/{self.total_steps:,}"


@dataclass(frozen=True)
class Skipped:
    """A run folder that is left out, and the reason."""

    folder: Path
    reason: str


@dataclass(frozen=True)
class Family:
    """Finished runs that differ only in what the paper varies: one set of figures."""

    title: str
    """Network and data: wrn-16-4 on cifar-100-python."""
    slug: str
    """The title as part of file names, unique among families."""
    runs: tuple[Run, ...]

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
    for folder in _run_folders(roots):
        try:
            runs.append(_read_run(folder))
        except (OSError, DataError) as error:
            skipped.append(Skipped(folder, short_reason(error)))
    finished = [run for run in runs if run.state == "finished"]
    return Results(tuple(runs), tuple(_families(finished)), tuple(skipped))


def _run_folders(roots: Sequence[str | Path]) -> list[Path]:
    """Folders with a config.json or a metrics.jsonl, each once."""
    found: dict[Path, Path] = {}
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
            if {"config.json", "metrics.jsonl"} & files:  # run folders are not nested
                found.setdefault(folder.resolve(), folder)
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
    summary = read_summary(folder)
    if summary.get("finished"):
        return Run(folder, config, summary, "finished")
    if is_running:
        return Run(folder, config, {}, "running")
    diverged = not summary and (folder / "bad-batch.pt").exists()
    run = Run(folder, config, {}, "diverged" if diverged else "stopped")
    # A resumed run may have been stopped again since the summary was written.
    is_current = run.step <= (number(summary.get("step")) or 0)
    return replace(run, summary=summary) if is_current else run


def _families(runs: Sequence[Run]) -> list[Family]:
    shared: defaultdict[tuple, list[Run]] = defaultdict(list)
    for run in runs:
        shared[_shared(run.config)].append(run)
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
            families.append(Family(title + differing, slug, tuple(members)))
    return sorted(families, key=lambda family: family.title)


def slug_of(text: str) -> str:
    """A text in the form of a file name."""
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")


def _shared(config: TrainConfig) -> tuple:
    """Values that all runs of a family have in common."""
    strong = config.view.augment == "randaugment"
    values = [("data", Path(config.data.data).name), ("randaugment", strong)]
    values += [
        (name, config.get(name))
        for name in setting_owners()
        if name not in _SWEPT | free_on_resume()
    ]
    return tuple(values)


def _title(config: TrainConfig) -> str:
    few = f" ({config.data.train_images:,} images)" if config.data.train_images else ""
    strong = " with RandAugment" if config.view.augment == "randaugment" else ""
    return f"{config.model.model} on {Path(config.data.data).name}{few}{strong}"


def _differing(keys: Sequence[tuple], own: tuple) -> str:
    """The settings in which a family differs from others of the same title."""
    parts = [
        f"{flag(name)} {value}"
        for place, (name, value) in enumerate(own)
        if len({key[place] for key in keys}) > 1
    ]
    return f", {' '.join(parts)}"
