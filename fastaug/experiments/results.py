"""Finished runs on disk, grouped into families and settings for figures and tables."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from fastaug.config import TrainConfig, free_on_resume, setting_owners
from fastaug.errors import DataError, FastaugError
from fastaug.kernels.config import Average
from fastaug.settings import flag

Measures = dict[str, float]
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
        """For people: K=4, average losses, KL weight 1."""
        if not self.augmented:
            return "no augmentation"
        if self.views == 1:
            return "K=1"
        weight = f", KL weight {self.kl_weight:g}" if self.kl_weight else ""
        return f"K={self.views}, average {self.average}{weight}"


def setting_of(config: TrainConfig) -> Setting:
    """The setting of a run. With one view, or without augmentation, the objectives coincide and the
    regularizer is 0: that is one setting."""
    if config.view.augment == "none":
        return Setting(1, "losses", 0.0, augmented=False)
    if config.view.views == 1:
        return Setting(1, "losses", 0.0)
    return Setting(config.view.views, config.loss.average, config.loss.kl_weight)


@dataclass(frozen=True)
class Run:
    """One finished training."""

    folder: Path
    config: TrainConfig
    summary: dict[str, Any]

    @property
    def setting(self) -> Setting:
        return setting_of(self.config)

    @property
    def measures(self) -> Measures:
        """Measures on the test images, as Evaluation.measure names them."""
        return self.summary["measures"]

    @property
    def validation(self) -> Measures | None:
        """The same measures on the held-out images."""
        return self.summary.get("validation")


@dataclass(frozen=True)
class Unfinished:
    """A run folder without a result, and the reason."""

    folder: Path
    reason: str


@dataclass(frozen=True)
class Family:
    """Runs that differ only in what the paper varies: one set of figures."""

    title: str
    """For people: wrn-16-4 on cifar-100-python."""
    slug: str
    """For file names; each family has its own."""
    runs: tuple[Run, ...]

    @property
    def config(self) -> TrainConfig:
        """Config of the first run, for what all runs share."""
        return self.runs[0].config

    @property
    def recipes(self) -> set[str]:
        return {run.config.run.recipe for run in self.runs}


@dataclass(frozen=True)
class Results:
    families: tuple[Family, ...]
    unfinished: tuple[Unfinished, ...]


def find_results(roots: Sequence[str | Path]) -> Results:
    """All runs in and below some folders. Runs that cannot be read are listed as unfinished."""
    runs: list[Run] = []
    unfinished: list[Unfinished] = []
    for folder in _run_folders(roots):
        found = _read_run(folder)
        if isinstance(found, Run):
            runs.append(found)
        else:
            unfinished.append(found)
    return Results(tuple(_families(runs)), tuple(unfinished))


def _run_folders(roots: Sequence[str | Path]) -> list[Path]:
    """Folders with a config.json, each once."""
    found: dict[Path, Path] = {}
    for root in roots:
        top = Path(root).expanduser()
        if not top.is_dir():
            what = "is a file" if top.exists() else "no such folder"
            raise DataError(f"{root}: {what}; give a run folder or one that holds some")
        for folder, below, files in os.walk(top):
            if "config.json" in files:
                below.clear()  # nothing in a run folder is another one
                found.setdefault(Path(folder).resolve(), Path(folder))
            below.sort()
    return list(found.values())


def read_config(folder: Path) -> TrainConfig | None:
    """Config of a run folder, finished or not; None if it cannot be read."""
    try:
        return TrainConfig.from_saved(_read_json(folder / "config.json"))
    except (OSError, ValueError, TypeError, FastaugError):
        return None


def _read_run(folder: Path) -> Run | Unfinished:
    try:
        config = TrainConfig.from_saved(_read_json(folder / "config.json"))
        if not (folder / "summary.json").exists():
            ended = "diverged" if (folder / "bad-batch.pt").exists() else "not finished"
            return Unfinished(folder, f"{ended}: it has no summary.json")
        summary = _read_json(folder / "summary.json")
        _check_kinds(config, summary)
    except (OSError, ValueError, KeyError, TypeError, FastaugError) as error:
        return Unfinished(folder, f"cannot be read ({type(error).__name__}: {error})")
    if not summary.get("finished"):
        return Unfinished(folder, f"stopped at step {summary.get('step')}")
    return Run(folder, config, summary)


def _check_kinds(config: TrainConfig, summary: dict[str, Any]) -> None:
    """Raise TypeError for values of the wrong type: run folders may come from anyone."""
    components = get_type_hints(TrainConfig).values()
    hints = {name: kind for part in components for name, kind in get_type_hints(part).items()}
    for name, kind in hints.items():
        plain = kind if isinstance(kind, type) else str if get_origin(kind) is Literal else tuple
        wanted = (int, float) if plain is float else plain
        if not isinstance(config.get(name), wanted):
            raise TypeError(f"{name} must be a {plain.__name__}")
    for measures in (summary["measures"], summary.get("validation", {"top1": 0.0})):
        if not isinstance(measures["top1"], (int, float)):
            raise TypeError("top1 must be a number")


def _read_json(file: Path) -> dict[str, Any]:
    value = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} must be a JSON object")
    return value


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
    """A text as part of a file name."""
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
    """The settings that set a family apart from others of its title."""
    parts = [
        f"{flag(name)} {value}"
        for place, (name, value) in enumerate(own)
        if len({key[place] for key in keys}) > 1
    ]
    return f", {' '.join(parts)}"
