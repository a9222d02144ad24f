"""A page of HTML that must be complete by itself: parsed by Python's own parser."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """Tags that are open, text, and all references of a page."""

    VOID = ("meta", "br", "img", "link", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe"), tag
        named = dict(attrs)
        self.ids += [named["id"]] if named.get("id") else []  # type: ignore[list-item]
        self.references += [str(named[name]) for name in ("href", "src") if name in named]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def check_page(text: str) -> Page:
    """Well-formed, refers to nothing outside of itself, and all links lead somewhere."""
    page = Page(text)
    assert all(r.startswith("#") and r[1:] in page.ids for r in page.references), page.references
    assert not re.search(r"https?://|url\(|@import", text)
    assert len(page.ids) == len(set(page.ids))
    return page
