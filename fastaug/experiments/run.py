"""A run: its settings, its state, and what it measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fastaug.config import TrainConfig
from fastaug.experiments.metrics_file import Metrics, read_metrics
from fastaug.experiments.report_format import number
from fastaug.kernels.config import Average

Measures = dict[str, float]
State = Literal["finished", "stopped", "running", "diverged"]
AVERAGES: tuple[Average, ...] = get_args(Average)


class Setting(NamedTuple):
    """A point of a figure's curve."""

    views: int
    average: Average
    kl_weight: float
    augmented: bool = True
    epochs: int = 0
    """0: any, of which the best is chosen."""

    @property
    def label(self) -> str:
        """The setting in words: K=4, average losses, KL weight 1."""
        words = [f"K={self.views}"] if self.augmented else ["no augmentation"]
        if self.augmented and self.views > 1:
            words.append(f"average {self.average}")
            words += [f"KL weight {self.kl_weight:g}"] if self.kl_weight else []
        words += [f"{self.epochs:,} epochs"] if self.epochs else []
        return ", ".join(words)


def setting_of(config: TrainConfig, *, with_epochs: bool = False) -> Setting:
    """The setting of a run. With one view or without augmentation the objectives coincide and the
    regularizer is 0, so all such runs have the same setting.

    with_epochs: runs with different numbers of epochs have different settings.
    """
    epochs = config.optim.epochs if with_epochs else 0
    if config.view.augment == "none":
        return Setting(1, "losses", 0.0, augmented=False, epochs=epochs)
    if config.view.views == 1:
        return Setting(1, "losses", 0.0, epochs=epochs)
    loss = config.loss
    return Setting(config.view.views, loss.average, loss.kl_weight, epochs=epochs)


@dataclass(frozen=True)
class Run:
    """A training in any state."""

    folder: Path
    config: TrainConfig
    summary: dict[str, Any]
    """Fields of summary.json; empty if the run has none yet."""
    state: State
    sweeps: tuple[str, ...] = ()
    """Names of the sweeps that it belongs to."""
    recorded: Metrics | None = None
    """Points of the training curve of a run without a folder (record.py)."""

    @cached_property
    def metrics(self) -> Metrics:
        return self.recorded or read_metrics(self.folder / "metrics.jsonl")

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
