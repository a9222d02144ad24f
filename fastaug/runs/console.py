"""What a run shows in the terminal: its start, a progress bar, a line per epoch, a final table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.errors import printable
from fastaug.runtime.distributed import Group


class RunConsole:
    """The terminal of a run. The bar is drawn in a terminal only; lines and tables go anywhere."""

    def __init__(self, total_steps: int, done: int, *, quiet: bool = False) -> None:
        """quiet: show nothing."""
        self._console = Console(highlight=False, quiet=quiet)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._training = self._progress.add_task(
            "train", total=total_steps, completed=done, status=""
        )
        self._last_status = ""
        self._evaluation = self._progress.add_task("evaluate", status="", visible=False)

    def __enter__(self) -> RunConsole:
        self._progress.start()
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

    def advance(self, steps: int = 1) -> None:
        self._progress.advance(self._training, steps)

    def status(self, values: dict[str, float], views_per_s: float) -> None:
        terms = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
        self._last_status = f"{terms}  {views_per_s:,.0f} views/s"
        short = f"loss {values['loss']:.3f} kl {values['kl']:.3f} {views_per_s:,.0f} views/s"
        self._progress.update(self._training, status=short)

    def epoch(self, epoch: int, epochs: int, measures: dict[str, float]) -> None:
        text = f"epoch {epoch}/{epochs}  top-1 {100 * measures['top1']:.1f}%"
        if "invariance" in measures:
            text += f"  invariance {measures['invariance']:.4f}"
        # A run that is resumed between an epoch and its evaluation has no status yet.
        self.line(f"{text}  {self._last_status}".rstrip())

    def saved(self, step: int, total_steps: int, folder: Path) -> None:
        self.line(f"step {step:,} of {total_steps:,} is saved; continue with --resume {folder}")

    def evaluating(self, done: int, total: int) -> None:
        visible = done < total
        self._progress.update(self._evaluation, completed=done, total=total, visible=visible)

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
    device: torch.device,
    group: Group,
) -> Iterator[str]:
    """Line by line: what is trained on what and where, and what one might not expect of it.

    measured: the held-out images, if there are any, and the test images.
    """
    good, *held_out, tested = (len(images) - len(images.bad) for images in (train, *measured))
    held = f", {held_out[0]:,} held-out" if held_out else ""
    yield (
        f"{config.model.model} on {config.data.data}: {good:,} training{held} and {tested:,} test "
        f"images, {len(train.classes)} classes, {config.view.size} px"
    )
    if train.bad:
        yield (
            f"{len(train.bad)} unreadable training images are replaced by random others each epoch"
        )
    where = f"{group.ranks} ranks, each on {device}" if group.ranks > 1 else f"{device}"
    yield (
        f"{config.optim.epochs * steps_per_epoch:,} steps of {config.images_per_step} images x "
        f"{config.view.views} views on {where}, {config.run.precision}, "
        f"{config.data.loader} loader; run folder {config.run.out}"
    )
    left_over = len(train) - steps_per_epoch * config.images_per_step
    if left_over > 0:
        yield f"an epoch has whole steps: it leaves out {left_over} images, others each time"
    if left_over < 0:
        yield f"an epoch has whole steps: the last one repeats {-left_over} of its images"
    if config.view.augment == "none" and config.view.views > 1:
        yield "all views of an image are the same with --augment none; --views 1 costs less"
    if config.view.randaugment_policy != "nfnet" and config.view.augment != "randaugment":
        yield "--randaugment-policy has no effect without --augment randaugment"
