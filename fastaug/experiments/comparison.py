"""Runs side by side: the settings in which they differ, and their measures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fastaug.config import free_on_resume, setting_owners
from fastaug.errors import printable
from fastaug.experiments.report_format import number, short
from fastaug.experiments.run import Measures, Run
from fastaug.settings import flag

NOT_COMPARED = {"out", "resume", "recipe", "debug"}
"""Settings that name a run and its folder; they do not change how it trains."""
_COMPONENTS = ("model", "loss", "view", "optim", "data", "eval", "run")
"""Components of the config by how much they tell about a run."""
_LOWER_IS_BETTER = {"top1": False, "tta_top1": False, "invariance": True, "nll": True}


@dataclass(frozen=True)
class ComparedRun:
    """A run with the measures that it has so far."""

    run: Run
    name: str
    """Folder below the folder that all compared runs share."""
    settings: dict[str, str]
    """Settings in which the compared runs differ, as text by name."""

    @property
    def is_final(self) -> bool:
        """True if the measures are those of the final evaluation on the test images."""
        return bool(self.run.measures)

    @cached_property
    def measures(self) -> Measures:
        """Measures of the final evaluation, or else of the last one during training."""
        found = self.run.measures or self._last_evaluation
        return {name: v for name, value in found.items() if (v := number(value)) is not None}

    @property
    def measured(self) -> str:
        """When and on which images, unless it is the final evaluation: "epoch 3, test images"."""
        if self.is_final or not self.measures:
            return ""
        return f"epoch {short(self.measures.get('epoch', 0))}, {evaluation_images(self.run)}"

    @property
    def training_loss(self) -> float | None:
        """The last one that was logged."""
        losses = (number(r.get("loss")) for r in reversed(self.run.records))
        return next((loss for loss in losses if loss is not None), None)

    @property
    def train_seconds(self) -> Any:
        return _mapping(self.run.summary.get("timing")).get("train_seconds")

    @property
    def views_per_s(self) -> Any:
        """Mean of the run, or the last one that was logged."""
        timings = [self.run.summary.get("timing")]
        timings += [record.get("timing") for record in reversed(self.run.records)]
        speeds = (_mapping(timing).get("views_per_s") for timing in timings)
        return next((speed for speed in speeds if speed is not None), None)

    @property
    def flags(self) -> str:
        """The settings that change the result, as on the command line: --kl-weight 1 --lr 0.1."""
        shown = {n: value for n, value in self.settings.items() if n not in free_on_resume()}
        return " ".join(f"{flag(name)} {value}" for name, value in shown.items())

    @property
    def _last_evaluation(self) -> dict[str, Any]:
        evaluations = (r for r in reversed(self.run.records) if r.get("kind") == "eval")
        return next(evaluations, {})


@dataclass(frozen=True)
class Comparison:
    """Runs, best top-1 first; runs without an evaluation come last."""

    runs: tuple[ComparedRun, ...]
    differing: tuple[str, ...]
    """Settings in which they differ, the most telling ones first. Those that only decide where and
    how fast a run trains, such as --workers, come last."""

    @property
    def metrics_notes(self) -> list[str]:
        """What is wrong with the metrics.jsonl of some runs: "run-3: metrics.jsonl: a pipe ..."."""
        problems = ((one.name, one.run.metrics.problem) for one in self.runs)
        return [f"{name}: {printable(problem)}" for name, problem in problems if problem]

    def best(self, measure: str) -> float | None:
        """Best value of a measure; None if all runs that have it are equal. An evaluation during
        training counts only if no run has a final one."""
        found = [one for one in self.runs if measure in one.measures]
        final = [one for one in found if one.is_final]
        values = [one.measures[measure] for one in final or found]
        if len(set(values)) < 2:
            return None
        return min(values) if _LOWER_IS_BETTER[measure] else max(values)

    def is_best(self, one: ComparedRun, measure: str) -> bool:
        best = self.best(measure)
        comparable = one.is_final or not any(other.is_final for other in self.runs)
        return best is not None and comparable and one.measures.get(measure) == best

    def labels(self) -> list[str]:
        """A label for each run: its differing settings, and its name if that is not enough."""
        flags = [one.flags for one in self.runs]
        if len(set(flags)) == len(flags) > 1:
            return flags
        return [f"{one.name} ({one.flags})" if one.flags else one.name for one in self.runs]

    def effect(self) -> str:
        """The effect of a setting in a sentence, if these are two runs that differ only in it."""
        changed = [name for name in self.differing if name not in free_on_resume()]
        if len(self.runs) != 2 or len(changed) != 1:
            return ""
        (name,) = changed
        one, other = self.runs
        if _is_number(one, name) and one.run.config.get(name) < other.run.config.get(name):
            one, other = other, one
        parts = [_accuracy_change(one, other), _invariance_change(one, other)]
        if not any(parts):
            return ""
        change = f"{flag(name)} {one.settings[name]} instead of {other.settings[name]}"
        sentences = [f"{change}: {', '.join(filter(None, parts))}.", "One seed each."]
        unfinished = [run for run in (one, other) if run.run.state != "finished"]
        sentences += [f"Not finished: {run.name} ({run.run.progress})." for run in unfinished]
        return " ".join(sentences)


def compare(runs: Sequence[Run]) -> Comparison:
    differing = differing_settings(runs)
    parents = [str(run.folder.absolute().parent) for run in runs]
    top = os.path.commonpath(parents) if parents else ""
    compared = [
        ComparedRun(
            run,
            printable(os.path.relpath(run.folder.absolute(), top)),
            {name: config_text(run, name) for name in differing},
        )
        for run in runs
    ]
    compared.sort(key=lambda one: (-one.measures.get("top1", -1.0), one.name))
    return Comparison(tuple(compared), tuple(differing))


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Names of the settings that not all runs share, in the order of Comparison.differing."""
    names = [name for name in setting_owners() if name not in NOT_COMPARED]
    found = [name for name in names if len({config_text(run, name) for run in runs}) > 1]
    return sorted(found, key=_order)


def _order(name: str) -> tuple[bool, bool, int]:
    return name in free_on_resume(), name != "data", _COMPONENTS.index(setting_owners()[name])


def config_text(run: Run, name: str) -> str:
    """A setting as text. Data is named without the folders above it: it may have moved."""
    value: Any = run.config.get(name)
    if name == "data":
        value = Path(value).name
    if isinstance(value, float):
        return short(value)
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value))
    return printable(str(value)) if value != "" else '""'


def evaluation_images(run: Run) -> str:
    """The images that a run is evaluated on during training."""
    return "held-out images" if run.config.data.validation else "test images"


def _is_number(one: ComparedRun, name: str) -> bool:
    return isinstance(one.run.config.get(name), (int, float))


def _accuracy_change(one: ComparedRun, other: ComparedRun) -> str:
    values = [run.measures.get("top1") for run in (one, other)]
    if values[0] is None or values[1] is None:
        return ""
    percents = [100 * value for value in values if value is not None]
    change = round(percents[0], 1) - round(percents[1], 1)
    return f"top-1 {percents[0]:.1f}% vs {percents[1]:.1f}% ({change:+.1f} points)"


def _invariance_change(one: ComparedRun, other: ComparedRun) -> str:
    value, other_value = (run.measures.get("invariance") for run in (one, other))
    if value is None or other_value is None:
        return ""
    texts = f"invariance {value:.3f} vs {other_value:.3f} nats"
    return f"{texts} (lower is more invariant)"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
