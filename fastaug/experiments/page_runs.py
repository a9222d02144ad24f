"""The runs one by one: a table of all, and a section for each that unfolds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastaug.errors import printable
from fastaug.experiments.page_anchors import Anchors
from fastaug.experiments.page_curves import curves
from fastaug.experiments.page_family import varied_names, varied_values
from fastaug.experiments.page_html import (
    Cell,
    Column,
    Markup,
    element,
    join,
    link,
    pairs,
    table,
)
from fastaug.experiments.page_values import (
    NOTHING,
    duration,
    measure_text,
    number,
    one,
    percent,
    short,
)
from fastaug.experiments.results import Run, Setting
from fastaug.experiments.selection import Selected

_RUN_COLUMNS = (
    Column("run", "text"),
    Column("family", "text"),
    Column("setting", "text"),
    Column("K", "number"),
    Column("lr", "number"),
    Column("epochs", "number"),
    Column("seed", "number"),
    Column("top-1 %", "number"),
    Column("TTA top-1 %", "number"),
    Column("invariance", "number"),
    Column("NLL", "number"),
    Column("chosen"),
    Column("training", "number"),
)


def runs_table(selected: Sequence[Selected], anchors: Anchors, id: str) -> Markup:
    """Every finished run in a row."""
    rows = [
        (None, _run_cells(run, one_of, anchors))
        for one_of in selected
        for run in one_of.family.runs
    ]
    return table(_RUN_COLUMNS, rows, label="All runs", id=id)


def _run_cells(run: Run, selected: Selected, anchors: Anchors) -> list[Cell]:
    config, measures, family = run.config, run.measures, selected.family
    return [
        Cell(link(anchors.run(run), anchors.name(run))),
        Cell(link(anchors.family(family), family.title)),
        Cell(link(anchors.setting(family, run.setting), run.setting.label)),
        one(config.view.views),
        one(config.optim.lr),
        one(config.optim.epochs),
        one(config.run.seed),
        one(measures.get("top1"), accuracy=True),
        one(measures.get("tta_top1"), accuracy=True),
        one(measures.get("invariance")),
        one(measures.get("nll")),
        Cell("chosen" if is_chosen(run, selected) else NOTHING),
        duration(_part(run, "timing").get("train_seconds")),
    ]


def is_chosen(run: Run, selected: Selected) -> bool:
    """Whether the run is one of those that figures and tables show."""
    return any(run is other for other in selected.chosen[run.setting].runs)


def family_runs(selected: Selected, anchors: Anchors, pictures: Collection[str]) -> Markup:
    """The sections of a family's runs, by setting; pictures: anchors of views that are shown."""
    family = selected.family
    by_setting: defaultdict[Setting, list[Run]] = defaultdict(list)
    for run in family.runs:
        by_setting[run.setting].append(run)
    varied = varied_names(family)
    groups = []
    for setting, runs in by_setting.items():
        heading = element("h4", link(anchors.setting(family, setting), setting.label))
        sections = [
            _run_section(run, selected, anchors, varied=varied, pictures=pictures) for run in runs
        ]
        groups.append(element("section", heading, *sections, id=anchors.runs_of(family, setting)))
    return join(groups)


def _run_section(
    run: Run,
    selected: Selected,
    anchors: Anchors,
    *,
    varied: Sequence[str],
    pictures: Collection[str],
) -> Markup:
    family, config = selected.family, run.config
    top1 = number(run.measures.get("top1"))
    title = (
        f"lr {config.optim.lr:g}, {config.optim.epochs} epochs, seed {config.run.seed}: "
        f"{NOTHING if top1 is None else percent(top1)} %"
    )
    links = [
        link(anchors.setting(family, run.setting), f"setting {run.setting.label}"),
        link(anchors.family(family), family.title),
    ]
    if (views := anchors.views(family, run)) in pictures:
        links.append(link(views, "its views"))
    chosen = "" if is_chosen(run, selected) else " (not chosen)"
    return element(
        "details",
        element(
            "summary",
            element("strong", title),
            chosen,
            " ",
            element("span", anchors.name(run), class_="path"),
        ),
        element("p", join(links, " · "), class_="links"),
        curves(run),
        element("div", *_facts(run, varied), class_="facts"),
        element(
            "details",
            element("summary", "Full configuration"),
            element("pre", json.dumps(config.to_flat(), indent=1)),
            class_="full",
        ),
        id=anchors.run(run),
        class_="run",
    )


def _facts(run: Run, varied: Sequence[str]) -> list[Markup]:
    """Small tables beside each other."""
    summary = run.summary
    course = [
        ("folder", printable(str(run.folder))),
        ("recipe", printable(str(run.config.run.recipe))),
        ("steps", f"{summary.get('step')} of {summary.get('total_steps')}"),
        ("skipped steps", str(summary.get("skipped_steps"))),
        ("parameters", _thousands(summary.get("parameters"))),
    ]
    found = [
        ("Run", pairs(course)),
        ("Measures", _measures_table(run)),
        ("Differs in its family", pairs(varied_values(run, varied))) if varied else None,
        ("Timing", pairs(_timing(_part(run, "timing")))),
        ("Environment", pairs(_plain(_part(run, "environment")))),
    ]
    return [element("div", element("h5", title), body) for title, body in filter(None, found)]


def _measures_table(run: Run) -> Markup:
    validation = run.validation if isinstance(run.validation, dict) else {}
    names = list(dict.fromkeys([*run.measures, *validation]))
    columns = [Column("measure"), Column("test", "number")]
    columns += [Column("held out", "number")] if validation else []
    sources = [run.measures, validation][: len(columns) - 1]
    rows = [
        (
            None,
            [
                Cell(printable(str(name))),
                *(Cell(measure_text(str(name), source.get(name))) for source in sources),
            ],
        )
        for name in names
    ]
    return table(columns, rows, label="Measures", sortable=False)


def _timing(timing: Mapping[str, Any]) -> list[tuple[str, str]]:
    shown = {"train_seconds": lambda value: duration(value).content}
    return [
        (printable(str(name)), shown.get(name, _number_text)(value))
        for name, value in timing.items()
    ]


def _plain(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(printable(str(name)), printable(str(value))) for name, value in values.items()]


def _number_text(value: Any) -> str:
    known = number(value)
    return printable(str(value)) if known is None else short(known)


def _thousands(value: Any) -> str:
    known = number(value)
    return NOTHING if known is None else f"{known:,.0f}"


def _part(run: Run, name: str) -> Mapping[str, Any]:
    """A part of the summary, which other versions may not write."""
    found = run.summary.get(name)
    return found if isinstance(found, dict) else {}
