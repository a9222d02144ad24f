"""HTML that cannot forget to escape: text is escaped unless it is Markup already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal


class Markup(str):
    """HTML as it goes into the page. Only this module makes it out of text; what str's own methods
    return is text again."""

    __slots__ = ()


_EMPTY = {"meta", "link", "img", "input", "line", "polyline"}
"""Elements without content, of those that the page uses."""


def element(name: str, /, *content: str, **attributes: str | float | bool | None) -> Markup:
    """An element. class_ and data_value are the attributes class and data-value; None and False
    leave one out, True gives it no value."""
    given = "".join(
        f" {_attribute(key)}" if value is True else f' {_attribute(key)}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _EMPTY:
        return Markup(f"<{name}{given}/>")  # the slash is for those of SVG
    return Markup(f"<{name}{given}>{join(content)}</{name}>")


def join(parts: Iterable[str], between: str = "") -> Markup:
    """Parts one after another; those that are text are escaped."""
    return Markup(_escaped(between).join(_escaped(part) for part in parts))


def link(anchor: str, text: str, **attributes: str) -> Markup:
    """To another part of the page."""
    return element("a", text, href=f"#{anchor}", **attributes)


def paragraphs(texts: Iterable[str], class_: str | None = None) -> Markup:
    return join(element("p", text, class_=class_) for text in texts)


def bullets(items: Iterable[str], class_: str | None = None) -> Markup:
    """A list; nothing at all without items."""
    lines = [element("li", item) for item in items]
    return element("ul", *lines, class_=class_) if lines else Markup()


def pairs(values: Iterable[tuple[str, str]]) -> Markup:
    """Names and values, in two columns."""
    rows = [
        element("tr", element("th", name, scope="row"), element("td", value))
        for name, value in values
    ]
    return element("table", element("tbody", *rows), class_="pairs")


@dataclass(frozen=True)
class Cell:
    """Of a table: what is shown, and what it is sorted by if that is a number."""

    content: str
    value: float | None = None


@dataclass(frozen=True)
class Column:
    title: str
    kind: Literal["word", "text", "number"] = "word"
    """Words stay on one line, text does not; numbers are sorted by the cells' values."""


def table(
    columns: Sequence[Column],
    rows: Iterable[tuple[str | None, Sequence[Cell]]],
    *,
    label: str,
    id: str | None = None,
    sortable: bool = True,
) -> Markup:
    """Rows are (id, cells). The page's script makes buttons of the headers of a sortable one."""
    head = [element("th", column.title, scope="col", class_=column.kind) for column in columns]
    body = [
        element("tr", *(_cell(*found) for found in zip(columns, cells, strict=True)), id=anchor)
        for anchor, cells in rows
    ]
    whole = element(
        "table",
        element("thead", element("tr", *head)),
        element("tbody", *body),
        id=id,
        class_="sortable" if sortable else None,
    )
    # Scrolls by itself where the page is too narrow for it; by the keyboard too.
    return element("div", whole, class_="scroll", tabindex=0, role="region", aria_label=label)


def _cell(column: Column, cell: Cell) -> Markup:
    value = None if cell.value is None else f"{cell.value:.10g}"
    return element("td", cell.content, class_=column.kind, data_value=value)


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _escaped(text: str) -> str:
    return text if isinstance(text, Markup) else escape(text)
