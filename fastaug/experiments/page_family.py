"""What the page says of a family: the paper's claims, the settings, and what its runs share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fastaug.config import setting_owners
from fastaug.errors import printable
from fastaug.experiments.claims import Claim, Verdict
from fastaug.experiments.page_anchors import Anchors
from fastaug.experiments.page_html import (
    Cell,
    Column,
    Markup,
    bullets,
    element,
    join,
    link,
    table,
)
from fastaug.experiments.page_values import NOTHING, measure_text, one, short, spread
from fastaug.experiments.results import Family, Run
from fastaug.experiments.selection import Chosen, Selected
from fastaug.settings import flag

_BADGES: dict[Verdict, str] = {
    "seen": "good",
    "in part": "part",
    "not seen": "bad",
    "not run": "none",
}
_MOST_EVIDENCE, _FIRST_EVIDENCE = 8, 5
_PLACES = {"out", "resume", "recipe", "debug"}
"""Settings that say where a run is and what it is called, and nothing of its training."""

_SETTING_COLUMNS = (
    Column("K", "number"),
    Column("average"),
    Column("KL weight", "number"),
    Column("lr", "number"),
    Column("epochs", "number"),
    Column("seeds", "number"),
    Column("top-1 %", "number"),
    Column("TTA top-1 %", "number"),
    Column("invariance", "number"),
    Column("chosen on"),
    Column("runs by seed"),
)


def badge(verdict: Verdict, count: int | None = None) -> Markup:
    """A verdict, in words and in a color; count: how many times it was given."""
    text = verdict if count is None else f"{count} {verdict}"
    return element("span", text, class_=f"badge {_BADGES[verdict]}")


def badges(claims: Sequence[Claim]) -> Markup:
    """How many claims have each verdict."""
    counts = Counter(claim.verdict for claim in claims)
    return join((badge(verdict, counts[verdict]) for verdict in _BADGES if counts[verdict]), " ")


def claims_part(claims: Sequence[Claim]) -> Markup:
    items = [
        element(
            "li",
            element("p", badge(claim.verdict), " ", claim.text),
            _evidence(claim.evidence),
        )
        for claim in claims
    ]
    return join([element("h3", "The paper's claims"), element("ul", *items, class_="claims")])


def _evidence(lines: Sequence[str]) -> Markup:
    """All of a few lines; of many the first, and the others folded."""
    shown = len(lines) if len(lines) <= _MOST_EVIDENCE else _FIRST_EVIDENCE
    parts = [bullets(lines[:shown], class_="evidence")]
    if rest := lines[shown:]:
        folded = element("summary", f"{len(rest)} more", class_="note")
        parts.append(element("details", folded, bullets(rest, class_="evidence")))
    return join(parts)


def settings_part(selected: Selected, anchors: Anchors) -> Markup:
    """A row for each setting, at the learning rate and epochs that were chosen for it."""
    family = selected.family
    rows = [
        (anchors.setting(family, chosen.setting), _setting_cells(selected, chosen, anchors))
        for chosen in selected.chosen.values()
    ]
    how = (
        "Learning rate and epochs of each setting have the best mean top-1 on the held-out images."
        if selected.on == "validation"
        else "Learning rate and epochs of each setting have the best mean top-1 on the test images "
        "themselves, as the paper's apparently do: such accuracies are a little too good."
    )
    measured = "All measures are of the test images: the mean over the seeds [lowest–highest]."  # noqa: RUF001
    return join(
        [
            element("h3", "Settings"),
            element("p", how, " ", measured),
            table(_SETTING_COLUMNS, rows, label=f"Settings of {family.title}"),
        ]
    )


def _setting_cells(selected: Selected, chosen: Chosen, anchors: Anchors) -> list[Cell]:
    setting = chosen.setting
    several = setting.augmented and setting.views > 1  # else neither average nor weight matters
    average = setting.average if several else "any" if setting.augmented else "no augmentation"
    return [
        one(setting.views),
        Cell(average),
        one(setting.kl_weight) if several else Cell(NOTHING),
        one(chosen.lr),
        one(chosen.epochs),
        one(len(chosen.runs)),
        spread(chosen.values("top1"), accuracy=True),
        spread(chosen.values("tta_top1"), accuracy=True),
        spread(chosen.values("invariance"), accuracy=False),
        Cell(f"{selected.on}, best of {chosen.candidates}"),
        Cell(_run_links(selected.family, chosen, anchors)),
    ]


def _run_links(family: Family, chosen: Chosen, anchors: Anchors) -> Markup:
    """To the chosen runs by their seeds, and to all of the setting if there are more."""
    links = [
        link(anchors.run(run), str(run.config.run.seed), aria_label=f"seed {run.config.run.seed}")
        for run in chosen.runs
    ]
    everything = sum(run.setting == chosen.setting for run in family.runs)
    if everything > len(chosen.runs):
        links.append(link(anchors.runs_of(family, chosen.setting), f"all {everything}"))
    return join(links, " ")


def best_text(selected: Selected) -> str:
    """The highest mean accuracy of a family, and whose it is."""
    scored = [(chosen.mean("top1") or 0.0, chosen) for chosen in selected.chosen.values()]
    top1, chosen = max(scored, key=lambda pair: pair[0])
    return f"{measure_text('top1', top1)} ({chosen.setting.label})"


def varied_names(family: Family) -> list[str]:
    """Settings that differ between the runs of a family."""
    names = (name for name in setting_owners() if name not in _PLACES)
    return [name for name in names if len({_value(run, name) for run in family.runs}) > 1]


def varied_values(run: Run, names: Sequence[str]) -> list[tuple[str, str]]:
    return [(flag(name), _value(run, name)) for name in names]


def shared_part(family: Family) -> Markup:
    """The configuration that the family's runs have in common."""
    varied = {*varied_names(family), *_PLACES}
    lines = [
        f"{flag(name)} {_value(family.runs[0], name)}"
        for name in setting_owners()
        if name not in varied
    ]
    return element(
        "details",
        element("summary", "Configuration that all runs of the family share"),
        element("pre", "\n".join(lines)),
        class_="full",
    )


def _value(run: Run, name: str) -> str:
    value: Any = run.config.get(name)
    if isinstance(value, float):
        return short(value)
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value))
    return printable(str(value)) if value != "" else '""'
