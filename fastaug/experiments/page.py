"""All that some runs say, as one HTML page that needs nothing else, not even a network."""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files

import fastaug
from fastaug.errors import printable
from fastaug.experiments.claims import Claim, check_claims
from fastaug.experiments.gallery import Drawn, gallery
from fastaug.experiments.page_anchors import Anchors
from fastaug.experiments.page_family import (
    badges,
    best_text,
    claims_part,
    settings_part,
    shared_part,
)
from fastaug.experiments.page_figures import gallery_part, table_part
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
from fastaug.experiments.page_runs import family_runs, runs_table
from fastaug.experiments.page_values import counted, one
from fastaug.experiments.page_views import Pictures, find_pictures
from fastaug.experiments.results import Family, Results, Unfinished
from fastaug.experiments.selection import Selected
from fastaug.experiments.tables import Table, paper_tables

PAPER = "Regularising for invariance to data augmentation improves supervised learning"


@dataclass(frozen=True)
class FamilyContent:
    """What is said of one family."""

    selected: Selected
    claims: Sequence[Claim]
    drawn: Sequence[Drawn]
    pictures: Pictures

    @property
    def family(self) -> Family:
        return self.selected.family


@dataclass(frozen=True)
class Content:
    """What a page is made of."""

    sources: Sequence[str]
    """Folders as they were given."""
    made: datetime
    anchors: Anchors
    families: Sequence[FamilyContent]
    unfinished: Sequence[Unfinished]
    drawn: Sequence[Drawn]
    """Figures of several families, or of no runs at all."""
    tables: Sequence[Table]


def gather(
    sources: Sequence[str], results: Results, selected: Sequence[Selected], made: datetime
) -> Content:
    anchors = Anchors([one.family for one in selected])
    by_family: defaultdict[str, list[Drawn]] = defaultdict(list)
    for drawn in gallery(selected):
        by_family[anchors.of_figure(drawn.name)].append(drawn)
    families = [
        FamilyContent(
            one,
            check_claims(one),
            by_family[anchors.family(one.family)],
            find_pictures(one.family, anchors),
        )
        for one in selected
    ]
    return Content(
        sources, made, anchors, families, results.unfinished, by_family[""], paper_tables(selected)
    )


def write_page(content: Content) -> str:
    parts = [
        _overview(content),
        *(_family(found, content.anchors) for found in content.families),
        _shared_figures(content),
        _tables(content),
        _all_runs(content),
        _runs(content),
    ]
    body = [
        element("header", element("h1", "What the runs show"), _made(content)),
        _contents(content),
        element("main", *parts),
    ]
    return "<!doctype html>\n" + element("html", _head(), element("body", *body), lang="en")


def _head() -> Markup:
    style = (files("fastaug.experiments") / "page.css").read_text(encoding="utf-8")
    script = (files("fastaug.experiments") / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("link", rel="icon", href="data:,"),
        element("title", "fastaug: what the runs show"),
        element("style", Markup(style)),
        # In the head, so that nothing in the page can end up before it; it runs when all is there.
        element("script", Markup(script)),
    )


def _made(content: Content) -> Markup:
    runs = sum(len(found.family.runs) for found in content.families)
    said = element(
        "p",
        f"{counted(runs, 'finished run', 'finished runs')} in "
        f"{counted(len(content.families), 'family', 'families')}, from ",
        join((element("code", printable(source)) for source in content.sources), ", "),
        f"; made {content.made:%d %B %Y, %H:%M %Z} by fastaug {fastaug.__version__}. The paper is ",
        element("cite", PAPER),
        " (Botev, Bauer and De, 2022).",
    )
    if not content.unfinished:
        return said
    lines = [
        join([element("code", printable(str(found.folder))), ": ", printable(found.reason)])
        for found in content.unfinished
    ]
    title = counted(len(lines), "run folder", "run folders") + " without a result: not shown"
    return join([said, element("details", element("summary", title), bullets(lines))])


def _contents(content: Content) -> Markup:
    items = [link("overview", "Overview")]
    items += [
        link(content.anchors.family(found.family), found.family.title) for found in content.families
    ]
    items += [link("figures", "Figures")] if content.drawn else []
    items += [link("tables", "Tables")] if content.tables else []
    items += [link("all-runs", "All runs"), link("runs", "Run by run")]
    return element("nav", bullets(items), aria_label="Contents")


def _overview(content: Content) -> Markup:
    columns = (
        Column("family", "text"),
        Column("runs", "number"),
        Column("settings", "number"),
        Column("best top-1", "text"),
        Column("claims of the paper", "text"),
    )
    rows = [
        (
            None,
            [
                Cell(link(content.anchors.family(found.family), found.family.title)),
                one(len(found.family.runs)),
                one(len(found.selected.chosen)),
                Cell(best_text(found.selected)),
                Cell(badges(found.claims)),
            ],
        )
        for found in content.families
    ]
    return _section("overview", "Overview", table(columns, rows, label="Families"))


def _family(found: FamilyContent, anchors: Anchors) -> Markup:
    family = found.family
    return _section(
        anchors.family(family),
        family.title,
        claims_part(found.claims),
        settings_part(found.selected, anchors),
        shared_part(family),
        element("h3", "Figures") if found.drawn else "",
        gallery_part(found.drawn, anchors, family),
        found.pictures.part(),
    )


def _shared_figures(content: Content) -> Markup:
    if not content.drawn:
        return Markup()
    return _section("figures", "Figures", gallery_part(content.drawn, content.anchors))


def _tables(content: Content) -> Markup:
    if not content.tables:
        return Markup()
    parts = (table_part(given, content.anchors) for given in content.tables)
    return _section("tables", "The paper's tables", *parts)


def _all_runs(content: Content) -> Markup:
    # The script shows it: without one there is nothing to filter with.
    search = element(
        "label",
        "Rows with all of these words: ",
        element("input", type="search", data_filters="runs-table", autocomplete="off"),
        " ",
        element("output"),
        hidden=True,
        class_="filter",
    )
    selected = [found.selected for found in content.families]
    runs = runs_table(selected, content.anchors, "runs-table")
    return _section("all-runs", "All runs", search, runs)


def _runs(content: Content) -> Markup:
    folded = [
        element(
            "details",
            element("summary", found.family.title, ": ", _runs_text(found.family)),
            family_runs(found.selected, content.anchors, found.pictures.shown),
            class_="family-runs",
        )
        for found in content.families
    ]
    return _section("runs", "Run by run", *folded)


def _runs_text(family: Family) -> str:
    return counted(len(family.runs), "run", "runs")


def _section(anchor: str, title: str, *content: str) -> Markup:
    return element("section", element("h2", title), *content, id=anchor)
