"""What a run shows in the terminal: a progress bar, a line for each epoch, a table at the end."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fastaug.config import TrainConfig
from fastaug.errors import printable


class RunConsole:
    """The bar is drawn in a terminal alone; lines and tables go anywhere."""

    def __init__(self, total_steps: int, done: int, *, quiet: bool = False) -> None:
        """quiet: nothing is shown."""
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

    def summary(self, config: TrainConfig, summary: dict[str, Any]) -> None:
        """The table at the end of a run."""
        self._progress.stop()
        timing = summary["timing"]
        ended = "finished" if summary["finished"] else f"stopped at step {summary['step']:,}"
        held_out, of = [], ""
        if validation := summary.get("validation"):
            top1 = _percent(validation, "top1", "top5")
            held_out, of = [("held-out images, top-1 / top-5", top1)], " of the held-out images"
        rows = [
            ("run", f"{config.run.out} ({ended})"),
            ("model", f"{config.model.model}, {summary['parameters']:,} parameters"),
            (
                "objective",
                f"average {config.loss.average}, {config.view.views} views, "
                f"KL weight {config.loss.kl_weight:g}",
            ),
            *measure_rows(summary["measures"], config.eval.tta),
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


def measure_rows(measures: dict[str, float], tta: int) -> list[tuple[str, str]]:
    """The measures of evaluation.evaluate, as a person reads them."""
    rows = [("central crop, top-1 / top-5", _percent(measures, "top1", "top5"))]
    rows.append(("central crop, nll", f"{measures['nll']:.3f} nats"))
    for prefix, averaged in (("tta_", "probabilities"), ("tta_logits_", "logits")):
        if f"{prefix}top1" in measures:
            percent = _percent(measures, f"{prefix}top1", f"{prefix}top5")
            rows.append((f"{tta} views, averaged {averaged}", percent))
    if (invariance := measures.get("invariance")) is not None:
        rows.append((f"invariance (pairwise KL of {tta} views)", f"{invariance:.4f} nats"))
    return rows


def _percent(measures: dict[str, float], *names: str) -> str:
    return " / ".join(f"{100 * measures[name]:.1f}%" for name in names)
