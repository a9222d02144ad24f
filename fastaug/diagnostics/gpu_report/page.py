"""The HTML page of a GPU report: one file that refers to no other."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fastaug.diagnostics.gpu_report import plots
from fastaug.diagnostics.gpu_report.plots import Bar, Plot, bar_plot, line_plot, stacked_plot
from fastaug.diagnostics.gpu_report.prediction import Compared, compare_prediction, why_not
from fastaug.diagnostics.gpu_report.results import GpuReport, TableResult
from fastaug.errors import describe_error, printable

BADGES = {"passed": "good", "failed": "bad", "skipped": "none"}
MISSING = "–"  # noqa: RUF001
_STAGES = ("forward", "loss", "backward", "update")
_HIDDEN = "losses"
"""Column that is drawn as a plot."""


def write_page(report: GpuReport) -> str:
    """The template escapes all text of the report."""
    environment = Environment(
        loader=PackageLoader("fastaug.diagnostics.gpu_report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = lambda text: printable(str(text))
    compared, reason = _compared(report)
    style = (files("fastaug.diagnostics.gpu_report") / "templates/gpu_report.css").read_text()
    return environment.get_template("gpu_report.html.j2").render(
        style=Markup(style),
        report=report,
        badges=BADGES,
        sizes=plots,
        summary=list(_summary(report)),
        parts=[(part, [_table(table) for table in part.tables]) for part in report.parts],
        plots=[plot for plot in _plots(report, compared) if plot],
        compared=[_compared_row(each) for each in compared],
        why_not_compared=reason,
    )


def _compared(report: GpuReport) -> tuple[list[Compared], str]:
    """The comparison with the prediction, or why there is none."""
    if reason := why_not(report):
        return [], reason
    try:
        return compare_prediction(report), ""
    except Exception as error:  # the report itself must not depend on the model
        return [], f"the step model failed ({describe_error(error)})"


def _summary(report: GpuReport) -> Iterator[tuple[str, str]]:
    """The most important figures, by name."""
    count = {outcome: sum(p.outcome == outcome for p in report.parts) for outcome in BADGES}
    yield "parts", ", ".join(f"{number} {outcome}" for outcome, number in count.items() if number)
    checks = [check for part in report.parts for check in part.checks]
    passed = sum(check.outcome == "passed" for check in checks)
    yield "checks", f"{passed} of {len(checks)} passed"
    yield "time", f"{sum(part.seconds for part in report.parts):.0f} s"
    if rows := _records(report, "throughput", "throughput"):
        best = max(rows, key=lambda row: row["views/s"])
        text = f"{best['images/s']:,.0f} images/s, {best['views/s']:,.0f} views/s at K={best['K']}"
        yield "training", text
    if rows := _records(report, "throughput", "decode"):
        yield "decoding", f"{rows[0]['images/s']:,.0f} images/s"


def _records(report: GpuReport, part: str, table: str) -> list[dict[str, Any]]:
    owner = report.part(part)
    found = None if owner is None else owner.table(table)
    return [] if found is None else found.records()


def _plots(report: GpuReport, compared: list[Compared]) -> Iterator[Plot | None]:
    rows = _records(report, "throughput", "throughput")
    predicted = {each.k: each for each in compared if each.quantity == "images/s"}
    bars = []
    for row in rows:
        bar = Bar(f"K={row['K']}", row["images/s"])
        if each := predicted.get(row["K"]):
            bar = bar._replace(predicted=each.predicted, low=each.low, high=each.high)
        bars.append(bar)
    yield bar_plot("images/s of training", bars)
    stages = {f"K={row['K']}": {name: row[name] for name in _STAGES} for row in rows}
    yield stacked_plot("stages of a step on the GPU", stages, "ms")
    curves = _records(report, "training", "curves")
    lines = {row["precision"]: [float(loss) for loss in row[_HIDDEN].split()] for row in curves}
    yield line_plot("training loss, each precision", "step", lines)


def _table(table: TableResult) -> dict[str, Any]:
    shown = [place for place, (name, _) in enumerate(table.columns) if name != _HIDDEN]
    rows = [[row[place] for place in shown] for row in table.rows]
    return {
        "title": table.title,
        "columns": [table.columns[place] for place in shown],
        "rows": [[_cell(cell) for cell in row] for row in rows],
        "tall": len(rows) > 12,
    }


def _cell(value: Any) -> tuple[str, bool]:
    """Text of a cell, and whether it is a number."""
    if value is None:
        return MISSING, True
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (f"{value:,}" if isinstance(value, int) else plots.short(value)), True
    return str(value), False


def _compared_row(each: Compared) -> dict[str, Any]:
    band = sorted((each.low, each.high))
    return {
        "quantity": each.quantity + (f", K={each.k}" if each.k else ""),
        "unit": each.unit,
        "measured": plots.short(each.measured),
        "predicted": plots.short(each.predicted),
        "band": " to ".join(map(plots.short, band)),
        "ratio": f"{each.ratio:.2f}",
        "inside": each.inside,
    }
