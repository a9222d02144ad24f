"""The report's page: data for templates/report.html.j2."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any, get_args

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import fastaug
from fastaug.config import free_on_resume
from fastaug.errors import printable
from fastaug.experiments.claims import PaperSweep
from fastaug.experiments.comparison import ComparedRun, Comparison
from fastaug.experiments.report_anchors import Anchors
from fastaug.experiments.report_format import (
    MISSING,
    Cell,
    counted,
    duration,
    mean_cell,
    measure_text,
    number,
    short,
)
from fastaug.experiments.report_media import jpeg_url
from fastaug.experiments.report_paper import paper_data
from fastaug.experiments.report_plots import Series, overlaid_plots, run_plots
from fastaug.experiments.results import Results
from fastaug.experiments.run import Run, State
from fastaug.experiments.run_files import short_reason
from fastaug.settings import flag

Data = dict[str, Any]

MAX_COLORS = 8
"""Colors of the curves in report.css."""
_MAX_SETTINGS = 8
"""Differing settings that have a column of the comparison."""
_MAX_PICTURES = 6
_MEASURES = ("top1", "tta_top1", "invariance", "nll")


def write_page(
    sources: Sequence[str],
    results: Results,
    comparison: Comparison,
    sweeps: Sequence[PaperSweep],
    made: datetime,
) -> str:
    """One HTML page that needs no other file. The template escapes all text from runs."""
    anchors = Anchors(results.runs)
    pictures, picture_notes = _pictures(comparison, anchors)
    names = _column_settings(comparison)
    script = _resource("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=PackageLoader("fastaug.experiments"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"printable": lambda text: printable(str(text)), "counted": counted}
    environment.globals["zip"] = zip
    states = Counter(run.state for run in results.runs)
    return environment.get_template("report.html.j2").render(
        style=_resource("report.css"),
        script=script,
        digest=digest,
        version=fastaug.__version__,
        made=f"{made:%d %B %Y, %H:%M %Z}",
        sources=sources,
        states=[f"{states[state]:,} {state}" for state in get_args(State) if states[state]],
        skipped=results.skipped,
        metrics_notes=comparison.metrics_notes,
        effect=comparison.effect(),
        columns=[(flag(name), _column_class(comparison, name)) for name in names],
        more_settings=[flag(name) for name in comparison.differing if name not in names],
        runs=[_run(one, comparison, names, anchors, pictures) for one in comparison.runs],
        curves=_curves(comparison, anchors),
        pictures=list(pictures.values())[:_MAX_PICTURES],
        picture_notes=picture_notes,
        paper=paper_data(sweeps, anchors),
    )


def _resource(name: str) -> Markup:
    return Markup((files("fastaug.experiments") / "templates" / name).read_text(encoding="utf-8"))


# --- the comparison ---


def _column_settings(comparison: Comparison) -> list[str]:
    """Differing settings that have a column: those that change the result, if there are any."""
    changing = [name for name in comparison.differing if name not in free_on_resume()]
    return [*(changing or comparison.differing)][:_MAX_SETTINGS]


def _column_class(comparison: Comparison, name: str) -> str:
    values = [one.run.config.get(name) for one in comparison.runs]
    return "number" if all(number(value) is not None for value in values) else "word"


def _run(
    one: ComparedRun,
    comparison: Comparison,
    names: Sequence[str],
    anchors: Anchors,
    pictures: dict[str, Data],
) -> Data:
    """A row of the comparison, and the run's section. names: settings that have a column."""
    run, views, top1 = one.run, anchors.views(one.run), one.measures.get("top1")
    title = one.name if top1 is None else f"{one.name}: top-1 {measure_text('top1', top1)}"
    return {
        "anchor": anchors.run(run),
        "name": one.name,
        "title": title,
        "state": run.state,
        "progress": run.progress,
        "short_progress": run.short_progress,
        "settings": [Cell(one.settings[name], number(run.config.get(name))) for name in names],
        "flags": one.flags,
        "measured": one.measured,
        "measures": [
            {
                "cell": mean_cell([one.measures.get(name)], accuracy=name.endswith("top1")),
                "best": comparison.is_best(one, name),
            }
            for name in _MEASURES
        ],
        "loss": mean_cell([one.training_loss]),
        "speed": _speed(one.views_per_s),
        "training": duration(one.train_seconds),
        "views": views if views in pictures else "",
        "plots": run_plots(run) if len(comparison.runs) > 1 else [],
        "has_records": bool(run.records),
        "facts": _facts(one),
        "measure_table": _measure_table(run),
        "config": json.dumps(run.config.to_flat(), indent=1),
    }


def _speed(value: Any) -> Cell:
    known = number(value)
    return Cell(MISSING) if known is None else Cell(f"{known:,.0f}", known)


def _curves(comparison: Comparison, anchors: Anchors) -> Data:
    """Plots with a line for each run, and their legend: (style, text).

    Up to MAX_COLORS runs have a color each. More runs are colored by the value of a setting, or, if
    no setting has few enough values, only the best runs have a color.
    """
    runs, labels = comparison.runs, comparison.labels()
    styles = [place if place <= MAX_COLORS else 0 for place in range(1, len(runs) + 1)]
    legend = list(zip(styles[:MAX_COLORS], labels, strict=False)) if len(runs) > 1 else []
    if len(runs) > MAX_COLORS:
        legend.append((0, counted(len(runs) - MAX_COLORS, "other run")))
        if name := _color_setting(comparison):
            values = Counter(one.settings[name] for one in runs)
            style_of = {value: style for style, value in enumerate(sorted(values), 1)}
            styles = [style_of[one.settings[name]] for one in runs]
            legend = [
                (style, f"{flag(name)} {value} ({counted(values[value], 'run')})")
                for value, style in style_of.items()
            ]
    lines = [
        (one.run, Series(label, [], style, anchors.run(one.run)))
        for one, label, style in zip(runs, labels, styles, strict=True)
    ]
    return {"plots": overlaid_plots(lines), "legend": legend}


def _color_setting(comparison: Comparison) -> str:
    """A setting with few enough values that changes the result; "" if there is none. The weight of
    the regularizer comes first: it separates the curves most."""
    for name in sorted(comparison.differing, key=lambda name: name != "kl_weight"):
        values = {one.settings[name] for one in comparison.runs}
        if name != "seed" and name not in free_on_resume() and len(values) <= MAX_COLORS:
            return name
    return ""


# --- views ---


def _pictures(comparison: Comparison, anchors: Anchors) -> tuple[dict[str, Data], list[str]]:
    """The first readable views.png for each number and kind of views: others look the same."""
    pictures: dict[str, Data] = {}
    notes = []
    for one in comparison.runs:
        run, anchor, file = one.run, anchors.views(one.run), one.run.folder / "views.png"
        if anchor in pictures or len(pictures) == _MAX_PICTURES:
            continue
        try:
            source = jpeg_url(file)
        except FileNotFoundError:
            continue
        except Exception as error:  # a decoder raises almost anything for damaged files
            notes.append(f"{printable(str(file))}: no picture ({printable(short_reason(error))})")
            continue
        views = counted(run.config.view.views, "view")
        how = f"with {views} each, --augment {run.config.view.augment}"
        text = f"Training images, one per row, {how}"
        origin = {"run": anchors.run(run), "name": one.name}
        pictures[anchor] = {"anchor": anchor, "source": source, "text": text, **origin}
    return pictures, notes


# --- run by run ---


def _facts(one: ComparedRun) -> dict[str, list[tuple[Any, Any]]]:
    """Small tables of names and values, by title."""
    run, parameters = one.run, number(one.run.summary.get("parameters"))
    timing = [
        (name, duration(value).text if name == "train_seconds" else _number_text(value))
        for name, value in _mapping(run, "timing").items()
    ]
    total = f"{run.total_steps:,}" if run.total_steps else "unknown"
    facts = {
        "Run": [
            ("folder", run.folder),
            ("recipe", run.config.run.recipe),
            ("steps", f"{run.step:,} of {total}"),
            ("skipped steps", run.summary.get("skipped_steps", MISSING)),
            ("parameters", MISSING if parameters is None else f"{parameters:,.0f}"),
        ],
        "Settings that differ": [(flag(name), text) for name, text in one.settings.items()],
        "Timing": timing,
        "Environment": list(_mapping(run, "environment").items()),
    }
    return {title: pairs for title, pairs in facts.items() if pairs}


def _measure_table(run: Run) -> Data:
    """A row for each final measure, on the test images and on held-out images if there are any."""
    validation = run.validation if isinstance(run.validation, dict) else {}
    names = dict.fromkeys([*run.measures, *validation])
    sources = [run.measures, validation] if validation else [run.measures]
    rows = [(n, [measure_text(str(n), source.get(n)) for source in sources]) for n in names]
    return {"held_out": bool(validation), "rows": rows}


def _number_text(value: Any) -> str:
    known = number(value)
    return str(value) if known is None else short(known)


def _mapping(run: Run, name: str) -> dict[str, Any]:
    """A part of the summary, which other versions may not write."""
    found = run.summary.get(name)
    return found if isinstance(found, dict) else {}
