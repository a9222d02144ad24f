"""Numbers and Markdown, for the tables of the docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Row = Mapping[str, str]


def number(row: Row | None, scale: float = 1.0, shift: float = 0.0) -> str:
    assert row is not None
    value = scale * float(row["median"]) + shift
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 or not value else f"{value:.2f}"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *lines]
    return ["| " + " | ".join(row) + " |" for row in rows]
