"""Figures and tables of the paper as parts of the page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from fastaug.experiments.figure_style import render
from fastaug.experiments.gallery import Drawn
from fastaug.experiments.page_anchors import Anchors
from fastaug.experiments.page_html import Cell, Column, Markup, bullets, element, join, link, table
from fastaug.experiments.page_values import counted
from fastaug.experiments.results import Family
from fastaug.experiments.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


def gallery_part(drawn: Sequence[Drawn], anchors: Anchors, family: Family | None = None) -> Markup:
    """Figures, and below them what is not drawn and why; family: the one that they are of."""
    figures = [_figure(one, one.figure, anchors, family) for one in drawn if one.figure is not None]
    missing = [
        element("li", element("strong", one.title), bullets(one.notes), id=_anchor(one, anchors))
        for one in drawn
        if one.figure is None
    ]
    parts = [element("div", *figures, class_="gallery")] if figures else []
    if missing:
        title = counted(len(missing), "figure that is", "figures that are")
        folded = element("summary", f"{title} not drawn, for lack of runs")
        parts.append(element("details", folded, element("ul", *missing, class_="notes")))
    return join(parts)


def _figure(drawn: Drawn, figure: Figure, anchors: Anchors, family: Family | None) -> Markup:
    anchor = _anchor(drawn, anchors)
    home = [] if family is None else [" ", link(anchors.family(family), "↑ its family")]
    caption = element(
        "figcaption",
        element("strong", drawn.title),
        " ",
        drawn.caption,
        *home,
        bullets(drawn.notes, class_="notes"),
    )
    drawing = inline_svg(figure, anchor, f"{drawn.title}. {drawn.caption}")
    # Figures of one column stand beside others where there is room.
    size = f"--inches: {figure.get_figwidth():g}"
    return element(
        "figure", element("div", drawing), caption, class_="drawn", id=anchor, style=size
    )


def _anchor(drawn: Drawn, anchors: Anchors) -> str:
    return anchors.part("figure", drawn.name)


def inline_svg(figure: Figure, prefix: str, label: str) -> Markup:
    """A figure as an element of the page. Names in it begin with the prefix, as several figures
    share the page. Its colors stay as they are, on white: captions speak of them."""
    text = render(figure, "svg").decode()
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    root = ElementTree.fromstring(text)
    for node in list(root.iter()):
        for child in list(node):
            # matplotlib's rule for all lines would be one for all of the page: page.css has it.
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                node.remove(child)
        node.tail = None  # indentation
        node.text = (node.text or "").strip()
        if node.get("id") not in used:
            node.attrib.pop("id", None)
        for key, value in node.attrib.items():
            node.set(key, _own(key, value, prefix))
    for name in ("width", "height", "version"):
        del root.attrib[name]
    root.set("role", "img")
    root.set("aria-label", label)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _own(key: str, value: str, prefix: str) -> str:
    """An attribute's value, as it is to be in the page."""
    if key == "id":
        return f"{prefix}_{value}"
    if key.endswith("href"):
        return re.sub(r"^#", f"#{prefix}_", value)
    return value.replace("url(#", f"url(#{prefix}_")


def table_part(given: Table, anchors: Anchors) -> Markup:
    """One of the paper's tables, with the paper's numbers beside ours."""
    columns = [
        Column(title, "word" if _has_letters(row[place] for row in given.rows) else "number")
        for place, title in enumerate(given.header)
    ]
    rows = [(None, [Cell(text) for text in row]) for row in given.rows]
    return element(
        "section",
        element("h3", given.title),
        element("p", given.caption),
        table(columns, rows, label=given.title, sortable=False),
        bullets(given.notes, class_="notes"),
        id=anchors.part("table", given.name),
    )


def _has_letters(texts: Iterable[str]) -> bool:
    return any(character.isalpha() for text in texts for character in text)
