"""The report's page: plain data for templates/report.html.j2, from families and their choices."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

import fastaug
from fastaug.config import setting_owners
from fastaug.errors import first_line, printable
from fastaug.experiments.claims import check_claims
from fastaug.experiments.paper_figures import draw_figures
from fastaug.experiments.plotting import Drawn
from fastaug.experiments.report_format import (
    MISSING,
    counted,
    duration,
    mean_cell,
    measure_text,
    number,
    percent,
    short,
)
from fastaug.experiments.report_media import inline_svg, jpeg_url, run_plots
from fastaug.experiments.results import Family, Results, Run, Setting
from fastaug.experiments.selection import Chosen, Selected
from fastaug.experiments.tables import paper_tables
from fastaug.settings import flag

Data = dict[str, Any]

_MAX_EVIDENCE, _FIRST_EVIDENCE = 8, 5
"""Lines of evidence that are shown, and those that are if there are more: the rest is folded."""
_PLACES = {"out", "resume", "recipe", "debug"}
"""Settings that say where a run is and what it is called, not how it trains."""


def write_page(
    sources: Sequence[str], results: Results, selected: Sequence[Selected], made: datetime
) -> str:
    """One HTML page that needs nothing else. Text from runs is escaped by the template."""
    anchors = Anchors([one.family for one in selected])
    figures: defaultdict[str, list[Data]] = defaultdict(list)
    for drawn in draw_figures(selected):
        figures[drawn.family].append(_figure(drawn))
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
    return environment.get_template("report.html.j2").render(
        style=_resource("report.css"),
        script=script,
        digest=digest,
        version=fastaug.__version__,
        made=f"{made:%d %B %Y, %H:%M %Z}",
        sources=sources,
        unfinished=results.unfinished,
        families=[_family(one, anchors, figures[one.family.slug]) for one in selected],
        figures=figures[""],
        tables=[{"table": one, "kinds": _kinds(one.rows)} for one in paper_tables(selected)],
    )


def _resource(name: str) -> Markup:
    return Markup((files("fastaug.experiments") / "templates" / name).read_text(encoding="utf-8"))


class Anchors:
    """Ids of the page's parts, for both ends of every link. They are made of names, not of places
    in a list, so that a link into an older page of the same runs still works. What belongs to a
    family follows an underscore, which no slug has."""

    def __init__(self, families: Sequence[Family]) -> None:
        parents = [str(run.folder.absolute().parent) for f in families for run in f.runs]
        self._top = os.path.commonpath(parents) if parents else ""

    def family(self, family: Family) -> str:
        return f"family-{family.slug}"

    def setting(self, family: Family, setting: Setting) -> str:
        """A row of the family's table of settings."""
        name = "no-augmentation"
        if setting.augmented:
            # float: 1 and 1.0 are the same weight.
            name = f"k{setting.views:g}-{setting.average}-kl{float(setting.kl_weight)!r}"
        return f"{self.family(family)}_{name}"

    def views(self, family: Family, run: Run) -> str:
        """The picture of the views, shared by runs with the same number and kind of views."""
        return f"{self.family(family)}_views-{run.config.view.views}-{run.config.view.augment}"

    def run(self, run: Run) -> str:
        return f"run-{hashlib.sha256(os.fsencode(self._relative(run))).hexdigest()[:10]}"

    def name(self, run: Run) -> str:
        """A run's folder, without what all runs' folders begin with."""
        return printable(self._relative(run))

    def _relative(self, run: Run) -> str:
        return os.path.relpath(run.folder.absolute(), self._top)


def _figure(drawn: Drawn) -> Data:
    anchor, figure = f"figure-{drawn.name}", drawn.figure
    label = f"{drawn.title}. {drawn.caption}"
    return {
        "anchor": anchor,
        "title": drawn.title,
        "caption": drawn.caption,
        "notes": drawn.notes,
        "svg": figure and inline_svg(figure, anchor, label),
        "inches": figure and f"{figure.get_figwidth():g}",
    }


def _kinds(rows: Sequence[Sequence[str]]) -> list[str]:
    """The class of each column of a table."""
    texts = ("".join(column) for column in zip(*rows, strict=True))
    return ["word" if any(map(str.isalpha, text)) else "number" for text in texts]


def _family(selected: Selected, anchors: Anchors, figures: list[Data]) -> Data:
    family, claims = selected.family, check_claims(selected)
    pictures, notes = _pictures(family, anchors)
    varied = _varied_names(family)
    shared = [name for name in setting_owners() if name not in {*varied, *_PLACES}]
    by_setting: defaultdict[Setting, list[Data]] = defaultdict(list)
    for run in family.runs:
        by_setting[run.setting].append(_run(run, selected, anchors, varied, pictures))
    top1, best = max(
        ((chosen.mean("top1") or 0.0, chosen) for chosen in selected.chosen.values()),
        key=lambda pair: pair[0],
    )
    return {
        "anchor": anchors.family(family),
        "title": family.title,
        "best": f"{measure_text('top1', top1)} ({best.setting.label})",
        "verdicts": Counter(claim.verdict for claim in claims),
        "claims": [
            {"verdict": claim.verdict, "text": claim.text, **_folded(claim.evidence)}
            for claim in claims
        ],
        "on": selected.on,
        "settings": [_setting(chosen, selected, anchors) for chosen in selected.chosen.values()],
        "shared": [f"{flag(name)} {_config_text(family.runs[0], name)}" for name in shared],
        "figures": figures,
        "pictures": list(pictures.values()),
        "picture_notes": notes,
        "groups": [
            {"setting": anchors.setting(family, setting), "label": setting.label, "runs": runs}
            for setting, runs in by_setting.items()
        ],
        "runs": [run for runs in by_setting.values() for run in runs],
    }


def _folded(lines: Sequence[str]) -> Data:
    shown = len(lines) if len(lines) <= _MAX_EVIDENCE else _FIRST_EVIDENCE
    return {"evidence": lines[:shown], "more_evidence": lines[shown:]}


def _setting(chosen: Chosen, selected: Selected, anchors: Anchors) -> Data:
    """A row of the table of settings."""
    setting, family = chosen.setting, selected.family
    several = setting.augmented and setting.views > 1  # else average and weight do not matter
    everything = sum(run.setting == setting for run in family.runs)
    return {
        "anchor": anchors.setting(family, setting),
        "views": mean_cell([setting.views]),
        "average": (
            setting.average if several else "any" if setting.augmented else "no augmentation"
        ),
        "kl_weight": mean_cell([setting.kl_weight] if several else []),
        "lr": mean_cell([chosen.lr]),
        "epochs": mean_cell([chosen.epochs]),
        "seeds": mean_cell([len(chosen.runs)]),
        "measures": [
            mean_cell(chosen.values("top1"), accuracy=True),
            mean_cell(chosen.values("tta_top1"), accuracy=True),
            mean_cell(chosen.values("invariance")),
        ],
        "candidates": chosen.candidates,
        "seed_links": [(anchors.run(run), run.config.run.seed) for run in chosen.runs],
        "all_runs": everything if everything > len(chosen.runs) else 0,
    }


def _pictures(family: Family, anchors: Anchors) -> tuple[dict[str, Data], list[str]]:
    """The first readable views.png of each number and kind of views: others would look the same."""
    pictures: dict[str, Data] = {}
    notes = []
    for run in family.runs:
        anchor, file = anchors.views(family, run), run.folder / "views.png"
        if anchor in pictures or not file.is_file():
            continue
        try:
            source = jpeg_url(file)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            notes.append(f"{printable(str(file))}: no picture ({printable(first_line(error))})")
            continue
        views = counted(run.config.view.views, "view")
        text = f"Training images, each with {views} of it, augmentation {run.config.view.augment}"
        origin = {"run": anchors.run(run), "name": anchors.name(run)}
        pictures[anchor] = {"anchor": anchor, "source": source, "text": text, **origin}
    return pictures, notes


def _run(
    run: Run, selected: Selected, anchors: Anchors, varied: Sequence[str], pictures: dict[str, Data]
) -> Data:
    """A row of the table of all runs, and a section of its own."""
    config, measures, family = run.config, run.measures, selected.family
    views, top1 = anchors.views(family, run), number(measures.get("top1"))
    return {
        "anchor": anchors.run(run),
        "name": anchors.name(run),
        "setting": anchors.setting(family, run.setting),
        "label": run.setting.label,
        "title": (
            f"lr {config.optim.lr:g}, {config.optim.epochs} epochs, seed {config.run.seed}: "
            f"{MISSING if top1 is None else percent(top1)} %"
        ),
        "chosen": any(run is other for other in selected.chosen[run.setting].runs),
        "numbers": [
            *(mean_cell([config.get(name)]) for name in ("views", "lr", "epochs", "seed")),
            *(mean_cell([measures.get(name)], accuracy=True) for name in ("top1", "tta_top1")),
            *(mean_cell([measures.get(name)]) for name in ("invariance", "nll")),
        ],
        "training": duration(_mapping(run, "timing").get("train_seconds")),
        "views": views if views in pictures else "",
        "plots": run_plots(run),
        "facts": _facts(run, varied),
        "measures": _measures(run),
        "config": json.dumps(config.to_flat(), indent=1),
    }


def _facts(run: Run, varied: Sequence[str]) -> dict[str, list[tuple[Any, Any]]]:
    """Small tables of names and values, by title."""
    summary, parameters = run.summary, number(run.summary.get("parameters"))
    timing = [
        (name, duration(value).text if name == "train_seconds" else _number_text(value))
        for name, value in _mapping(run, "timing").items()
    ]
    facts = {
        "Run": [
            ("folder", run.folder),
            ("recipe", run.config.run.recipe),
            ("steps", f"{summary.get('step')} of {summary.get('total_steps')}"),
            ("skipped steps", summary.get("skipped_steps")),
            ("parameters", MISSING if parameters is None else f"{parameters:,.0f}"),
        ]
    }
    if varied:
        facts["Differs in its family"] = [(flag(n), _config_text(run, n)) for n in varied]
    return facts | {"Timing": timing, "Environment": list(_mapping(run, "environment").items())}


def _measures(run: Run) -> Data:
    """A row for each measure: on the test images, and on the held-out images if there are some."""
    validation = run.validation if isinstance(run.validation, dict) else {}
    names = dict.fromkeys([*run.measures, *validation])
    sources = [run.measures, validation] if validation else [run.measures]
    rows = [(n, [measure_text(str(n), source.get(n)) for source in sources]) for n in names]
    return {"held_out": bool(validation), "rows": rows}


def _varied_names(family: Family) -> list[str]:
    """Settings that differ between the runs of a family."""
    names = (name for name in setting_owners() if name not in _PLACES)
    return [name for name in names if len({_config_text(run, name) for run in family.runs}) > 1]


def _config_text(run: Run, name: str) -> str:
    value: Any = run.config.get(name)
    if isinstance(value, float):
        return short(value)
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value))
    return printable(str(value)) if value != "" else '""'


def _number_text(value: Any) -> str:
    known = number(value)
    return str(value) if known is None else short(known)


def _mapping(run: Run, name: str) -> dict[str, Any]:
    """A part of the summary, which other versions may not write."""
    found = run.summary.get(name)
    return found if isinstance(found, dict) else {}
