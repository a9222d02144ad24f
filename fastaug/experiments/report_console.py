"""The report in a terminal: a table of the runs, the effect of a setting, the paper's claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from fastaug.errors import few, printable
from fastaug.experiments.claims import PaperSweep
from fastaug.experiments.comparison import ComparedRun, Comparison
from fastaug.experiments.report_format import MISSING, counted
from fastaug.experiments.results import Skipped
from fastaug.settings import flag

MAX_ROWS = 20
_MIN_NAME = 32
"""Characters that a long name keeps beside the settings."""
_GAP = 2
_MAX_EVIDENCE = 5
_MAX_NOTES = 3
"""Lines about folders that cannot be read, and about their files."""
_NOT_FINAL = "*"
_MEASURES = (("top1", "top-1"), ("tta_top1", "TTA top-1"), ("invariance", "invariance"))


def show_comparison(comparison: Comparison, skipped: Sequence[Skipped]) -> None:
    """Print a row for each run, the most recent ones if there are many."""
    console = Console(highlight=False)
    shown = _most_recent(comparison.runs)
    measures = {title: [_measure(comparison, one, n) for one in shown] for n, title in _MEASURES}
    if not all(one.measures for one in shown):
        measures["loss"] = [_loss(one) for one in shown]
    states = {"state": [Text(one.run.short_progress) for one in shown]}
    names = {"run": [Text(one.name) for one in shown]}
    settings: dict[str, list[Text]] = {}
    room = console.width - min(_width(names), _MIN_NAME + _GAP) - _width(measures) - _width(states)
    for name in comparison.differing:
        column = {flag(name): [Text(one.settings[name]) for one in shown]}
        if _width(column) <= room:
            settings |= column
            room -= _width(column)
    left = console.width - _width(settings) - _width(measures) - _width(states) - _GAP
    names = {"run": [_end_of(one.name, max(left, _MIN_NAME)) for one in shown]}
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    columns = names | settings | measures | states
    for title in columns:
        justify: JustifyMethod = "left" if title in ("run", "state") else "right"
        table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)
    hidden = [name for name in comparison.differing if flag(name) not in settings]
    for line in _notes(comparison, shown, hidden, skipped):
        console.print(line, markup=False, soft_wrap=True)
    if effect := comparison.effect():
        console.print(f"\n{effect}\n", markup=False)


def _end_of(name: str, length: int) -> Text:
    """A name, without its beginning if it is too long: runs of a sweep differ at the end."""
    return Text(name if len(name) <= length else "…" + name[1 - length :])


def _width(columns: Mapping[str, Sequence[Text]]) -> int:
    """Characters that some columns of the table take."""
    return sum(
        max(len(title), *(text.cell_len for text in texts)) + _GAP
        for title, texts in columns.items()
    )


def _most_recent(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """At most MAX_ROWS runs, in the order of the comparison."""
    newest = sorted(runs, key=lambda one: _last_write(one.run.folder), reverse=True)
    kept = {one.run.folder for one in newest[:MAX_ROWS]}
    return [one for one in runs if one.run.folder in kept]


def _last_write(folder: Path) -> float:
    newest = 0.0
    for name in ("config.json", "metrics.jsonl", "summary.json"):
        with suppress(OSError):
            newest = max(newest, (folder / name).lstat().st_mtime)
    return newest


def _measure(comparison: Comparison, one: ComparedRun, name: str) -> Text:
    value = one.measures.get(name)
    if value is None:
        return Text(MISSING)
    text = f"{value:.3f}" if name == "invariance" else f"{100 * value:.1f}%"
    style = "bold" if comparison.is_best(one, name) else ""
    return Text(text if one.is_final else text + _NOT_FINAL, style)


def _loss(one: ComparedRun) -> Text:
    return Text(MISSING if one.training_loss is None else f"{one.training_loss:.3f}")


def _notes(
    comparison: Comparison,
    shown: Sequence[ComparedRun],
    hidden: Sequence[str],
    skipped: Sequence[Skipped],
) -> Iterator[str]:
    if len(shown) < len(comparison.runs):
        yield f"the {len(shown)} most recent of {len(comparison.runs)} runs; the page has all"
    if hidden:
        also = "also " if len(hidden) < len(comparison.differing) else ""
        yield f"the runs {also}differ in {few(hidden, 5, flag)}"
    if any(one.measures and not one.is_final for one in shown):
        yield f"{_NOT_FINAL} last evaluation during training"
    yield from comparison.metrics_notes[:_MAX_NOTES]
    if (more := len(comparison.metrics_notes) - _MAX_NOTES) > 0:
        yield f"and {counted(more, 'more run')} whose metrics.jsonl is wrong; the page lists them"
    for one in skipped[:_MAX_NOTES]:
        yield printable(f"skipped {one.folder}: {one.reason}")
    if (more := len(skipped) - _MAX_NOTES) > 0:
        yield f"and {counted(more, 'more skipped folder')}; the page lists them"


def show_claims(sweeps: Sequence[PaperSweep]) -> None:
    """Print the paper's claims and their verdicts for each sweep."""
    for sweep in sweeps:
        title = sweep.selected.family.title
        print()
        print(printable(f"{title}: the paper's claims (mean ± standard error [range over seeds])"))
        for claim in sweep.claims:
            print(f"  {claim.verdict.upper():8} {claim.text}")
            for line in claim.evidence[:_MAX_EVIDENCE]:
                print(f"           {line}")
