"""The paper's part of the report: claims, settings, figures and tables of sweeps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from fastaug.config import setting_owners
from fastaug.experiments.claims import PaperSweep
from fastaug.experiments.comparison import NOT_COMPARED, config_text, differing_settings
from fastaug.experiments.paper_figures import draw_figures
from fastaug.experiments.plotting import Drawn
from fastaug.experiments.report_anchors import Anchors
from fastaug.experiments.report_format import mean_cell, measure_text
from fastaug.experiments.report_media import inline_svg
from fastaug.experiments.selection import Chosen, Selected
from fastaug.experiments.tables import paper_tables
from fastaug.settings import flag

Data = dict[str, Any]

_MAX_EVIDENCE, _FIRST_EVIDENCE = 8, 5
"""Lines of evidence that are shown, and how many of them if there are more: the rest is folded."""


def paper_data(sweeps: Sequence[PaperSweep], anchors: Anchors) -> Data | None:
    """Data for templates/paper.html.j2; None if no sweep was found."""
    if not sweeps:
        return None
    selected = [sweep.selected for sweep in sweeps]
    figures: defaultdict[str, list[Data]] = defaultdict(list)
    for drawn in draw_figures(selected):
        figures[drawn.family].append(_figure(drawn))
    return {
        "families": [
            _family(sweep, anchors, figures[sweep.selected.family.slug]) for sweep in sweeps
        ],
        "figures": figures[""],
        "tables": [{"table": one, "kinds": _kinds(one.rows)} for one in paper_tables(selected)],
    }


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


def _family(sweep: PaperSweep, anchors: Anchors, figures: list[Data]) -> Data:
    selected, family = sweep.selected, sweep.selected.family
    varied = {*differing_settings(family.runs), *NOT_COMPARED}
    shared = [name for name in setting_owners() if name not in varied]
    top1, best = max(
        ((chosen.mean("top1") or 0.0, chosen) for chosen in selected.chosen.values()),
        key=lambda pair: pair[0],
    )
    return {
        "anchor": anchors.family(family),
        "title": family.title,
        "runs": len(family.runs),
        "best": f"{measure_text('top1', top1)} ({best.setting.label})",
        "verdicts": Counter(claim.verdict for claim in sweep.claims),
        "claims": [
            {"verdict": claim.verdict, "text": claim.text, **_folded(claim.evidence)}
            for claim in sweep.claims
        ],
        "on": selected.on,
        "settings": [_setting(chosen, selected, anchors) for chosen in selected.chosen.values()],
        "shared": [f"{flag(name)} {config_text(family.runs[0], name)}" for name in shared],
        "figures": figures,
    }


def _folded(lines: Sequence[str]) -> Data:
    shown = len(lines) if len(lines) <= _MAX_EVIDENCE else _FIRST_EVIDENCE
    return {"evidence": lines[:shown], "more_evidence": lines[shown:]}


def _setting(chosen: Chosen, selected: Selected, anchors: Anchors) -> Data:
    """A row of the table of settings."""
    setting = chosen.setting
    several = setting.augmented and setting.views > 1  # else average and weight do not matter
    return {
        "anchor": anchors.setting(selected.family, setting),
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
    }
