"""What a run prints: a banner, a progress bar or lines, a line per epoch, and a final table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.errors import printable
from fastaug.runtime.arithmetic import arithmetic_in_force
from fastaug.runtime.distributed import Group

SMALL_VIEWS = 6
"""An image whose shorter side is this many times that of a view deserves larger views."""


class RunConsole:
    """Console output of a run: a progress bar in a terminal, progress lines in a log file."""

    def __init__(
        self, total_steps: int, done: int, *, progress_every: float = 0.0, quiet: bool = False
    ) -> None:
        """progress_every: seconds between two progress lines outside a terminal, 0 for none;
        quiet: print nothing."""
        self._console = Console(highlight=False, quiet=quiet)
        self._total, self._first, self._done = total_steps, done, done
        # Not rich's is_terminal: notebooks and CI services set FORCE_COLOR, and write to a file.
        is_terminal = self._console.file.isatty()
        self._line_every = 0.0 if is_terminal or quiet else progress_every
        self._started = self._last_line = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            disable=quiet or not is_terminal,
        )
        self._training = self._progress.add_task(
            "train", total=total_steps, completed=done, status=""
        )
        self._values: dict[str, float] = {}
        self._timing: dict[str, float] = {}
        self._evaluation = self._progress.add_task("evaluate", status="", visible=False)

    def __enter__(self) -> RunConsole:
        self._progress.start()
        self._started = self._last_line = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        self._console.print(printable(text), markup=False, soft_wrap=True)

    def advance(self) -> None:
        """Call after each step."""
        self._done += 1
        self._progress.advance(self._training)
        if self._is_line_due():
            self.line(
                "  ".join([f"step {self._done:,}/{self._total:,}", *self._eta(), *self._rates()])
            )

    def status(self, values: dict[str, float], timing: dict[str, float]) -> None:
        """The latest training metrics, for the bar and the lines."""
        self._values, self._timing = values, timing
        short = f"loss {values['loss']:.3f} kl {values['kl']:.3f} {self._views_per_s()}"
        self._progress.update(self._training, status=short)

    def _is_line_due(self) -> bool:
        now = time.monotonic()
        if not self._line_every or now - self._last_line < self._line_every:
            return False
        self._last_line = now
        return True

    def _eta(self) -> list[str]:
        """By the mean pace of this process so far, evaluations included."""
        pace = (time.monotonic() - self._started) / (self._done - self._first)
        left = timedelta(seconds=round(pace * (self._total - self._done)))
        return [f"eta {left}"]

    def _rates(self) -> list[str]:
        """Loss, KL and speed, once they have been read from the device."""
        if not self._timing:
            return []
        terms = [f"{name} {self._values[name]:.3f}" for name in ("loss", "kl")]
        waiting = f"{100 * self._timing['wait_for_data']:.0f}% waiting for data"
        return [*terms, self._views_per_s(), waiting]

    def _views_per_s(self) -> str:
        return f"{self._timing['views_per_s']:,.0f} views/s"

    def epoch(self, epoch: int, epochs: int, measures: dict[str, float]) -> None:
        parts = [f"epoch {epoch}/{epochs}", f"top-1 {100 * measures['top1']:.1f}%"]
        if "invariance" in measures:
            parts.append(f"invariance {measures['invariance']:.4f}")
        # A run that is resumed between an epoch and its evaluation has no training metrics yet.
        if self._timing:
            parts += [f"{name} {value:.3f}" for name, value in self._values.items()]
            parts.append(self._views_per_s())
        self.line("  ".join(parts))

    def saved(self, step: int, total_steps: int, folder: Path) -> None:
        self.line(f"saved step {step:,} of {total_steps:,}; continue with --resume {folder}")

    def evaluating(self, done: int, total: int) -> None:
        visible = done < total
        self._progress.update(self._evaluation, completed=done, total=total, visible=visible)
        if self._is_line_due():
            self.line(f"evaluating: batch {done:,}/{total:,}")

    def summary(
        self,
        config: TrainConfig,
        summary: dict[str, Any],
        metric_rows: Callable[[dict[str, float], int], list[tuple[str, str]]],
    ) -> None:
        """The table at the end of a run. metric_rows: engine.metrics.metric_rows."""
        self._progress.stop()
        timing = summary["timing"]
        ended = "finished" if summary["finished"] else f"stopped at step {summary['step']:,}"
        held_out, of = [], ""
        if validation := summary.get("validation"):
            (_, top1), *_ = metric_rows(validation, config.eval.tta)
            held_out, of = [("held-out images, top-1 / top-5", top1)], " of the held-out images"
        rows = [
            ("run", f"{config.run.out} ({ended})"),
            ("model", f"{config.model.model}, {summary['parameters']:,} parameters"),
            (
                "objective",
                f"average {config.loss.average}, {config.view.views} views, "
                f"KL weight {config.loss.kl_weight:g}",
            ),
            *metric_rows(summary["measures"], config.eval.tta),
            *held_out,
            ("best epoch, top-1", f"{100 * summary['best_top1']:.1f}%{of}"),
            (
                "training",
                f"{timing['train_seconds']:.0f} s, {timing['images_per_s']:,.0f} images/s, "
                f"{timing['views_per_s']:,.0f} views/s, "
                f"{100 * timing['wait_for_data']:.0f}% waiting for data",
            ),
        ]
        show_table("fastaug", rows, self._console)


def show_table(title: str, rows: list[tuple[str, str]], console: Console | None = None) -> None:
    # Names of files and what libraries say may hold brackets, which would be markup.
    table = Table(title=escape(printable(title)), show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        lines = [printable(line) for line in value.split("\n")]
        table.add_row(escape(printable(name)), escape("\n".join(lines)))
    (console or Console(highlight=False)).print(table)


def announcement(
    config: TrainConfig,
    train: ImageSet,
    measured: Sequence[ImageSet],
    *,
    steps_per_epoch: int,
    last_step: int,
    device: torch.device,
    group: Group,
) -> Iterator[str]:
    """The banner, line by line: model, data, steps and device, then what may surprise.

    measured: the held-out images, if there are any, and the test images.
    """
    good, *held_out, tested = (len(images) - len(images.bad) for images in (train, *measured))
    held = f", {held_out[0]:,} held-out" if held_out else ""
    first = f"{config.view.initial_size} to " if config.view.initial_size else ""
    yield (
        f"{config.model.model} on {config.data.data}: {good:,} training{held} and {tested:,} test "
        f"images, {len(train.classes)} classes, {first}{config.view.size} px"
    )
    if train.bad:
        yield (
            f"{len(train.bad)} unreadable training images are replaced by random others each epoch"
        )
    where = f"{group.ranks} ranks, each on {device}" if group.ranks > 1 else f"{device}"
    total = config.optim.epochs * steps_per_epoch
    steps = f"{total:,} steps" if last_step == total else f"{last_step:,} of {total:,} steps"
    yield (
        f"{steps} of {config.images_per_step} images x {config.view.views} views on {where}, "
        f"{arithmetic_in_force(device, config.run.precision)}, {config.data.loader} loader; "
        f"run folder {config.run.out}"
    )
    left_over = len(train) - steps_per_epoch * config.images_per_step
    if left_over > 0:
        yield f"each epoch leaves out {left_over} random images, which do not fill a step"
    if left_over < 0:
        yield f"the last step of each epoch repeats {-left_over} of its images to be full"
    if train.manifest is not None:
        height, width = np.median(train.manifest.sizes, axis=0).astype(int).tolist()
        if min(height, width) >= SMALL_VIEWS * config.view.size:
            yield (
                f"views of {config.view.size} px keep little of images of {width} x {height} px "
                "(median); for photos try --size 128 --model nf_resnet26"
            )
    if config.view.augment == "none" and config.view.views > 1:
        yield "all views of an image are identical with --augment none; --views 1 costs less"
    if config.view.randaugment_policy != "nfnet" and config.view.augment != "randaugment":
        yield "--randaugment-policy has no effect without --augment randaugment"
