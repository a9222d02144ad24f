"""A run's course as small drawings: plain SVG, a few kilobytes for each of hundreds of runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastaug.experiments.page_html import Markup, element, join
from fastaug.experiments.page_values import number, short
from fastaug.experiments.results import Run

Points = list[tuple[float, float]]

MOST_POINTS = 200
_ENOUGH = 1_000_000
"""Bytes of metrics.jsonl that are read of a run, about 5,000 lines."""
_WIDTH, _HEIGHT = 320, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 10, 34


def curves(run: Run) -> Markup:
    """Loss and its terms by the step; accuracy and invariance after each epoch."""
    records = list(read_records(run.folder / "metrics.jsonl"))
    train = [record for record in records if record.get("kind") == "train"]
    evaluated = [record for record in records if record.get("kind") == "eval"]
    images = "held-out images" if run.config.data.validation else "test images"
    drawn = [
        plot("training loss", {name: _points(train, name) for name in ("loss", "nll", "kl")}),
        plot(f"top-1 in %, {images}", {"top-1": _points(evaluated, "top1", 100)}),
        plot(f"invariance in nats, {images}", {"invariance": _points(evaluated, "invariance")}),
    ]
    if not any(drawn):
        return element("p", "No course of the training: no metrics.jsonl.", class_="note")
    return element("div", *drawn, class_="curves")


def read_records(file: Path) -> Iterator[dict[str, Any]]:
    """Lines of metrics.jsonl. A long training has millions of them, and a drawing shows few: of a
    large file, all evaluations and an even share of the others."""
    if not file.is_file():
        return
    every = max(1, file.stat().st_size // _ENOUGH)
    with file.open(encoding="utf-8", errors="replace") as lines:
        for place, line in enumerate(lines):
            if place % every and '"eval"' not in line:
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # torn by a kill, or nobody's idea of a record
                continue
            if isinstance(record, dict):
                yield record


def _points(records: Iterable[Mapping[str, Any]], name: str, scale: float = 1.0) -> Points:
    found = ((number(record.get("epoch")), number(record.get(name))) for record in records)
    return [(x, scale * y) for x, y in found if x is not None and y is not None]


def plot(title: str, series: Mapping[str, Points]) -> Markup:
    """Lines over the epochs on one scale, with its ends; nothing at all without a point."""
    series = {name: points for name, points in series.items() if points}
    everywhere = [point for points in series.values() for point in points]
    if not everywhere:
        return Markup()
    low_x, high_x = _range([x for x, _ in everywhere])
    low_y, high_y = _range([y for _, y in everywhere])

    def place(x: float, y: float) -> str:
        across = _LEFT + (_WIDTH - _LEFT - _RIGHT) * (x - low_x) / (high_x - low_x)
        down = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high_y - y) / (high_y - low_y)
        return f"{across:.1f},{down:.1f}"

    lines = [
        element(
            "polyline",
            points=" ".join(place(*point) for point in thinned(points)),
            class_=f"line line-{place_of}",
        )
        for place_of, points in enumerate(series.values(), 1)
    ]
    said = ", ".join(f"{name} ends at {short(points[-1][1])}" for name, points in series.items())
    drawing = element(
        "svg",
        *_axes(low_x, high_x, low_y, high_y),
        *lines,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=f"{title} over the epochs: {said}",
    )
    return element("figure", drawing, element("figcaption", title, _legend(list(series))))


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """The ends, and the lowest and highest of each stretch between them: a spike stays."""
    if len(points) <= most:
        return points
    first, *between, last = points
    stretches = (most - 2) // 2
    kept = [first]
    for place in range(stretches):
        stretch = between[
            place * len(between) // stretches : (place + 1) * len(between) // stretches
        ]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return [*kept, last]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest; around a single value, so that it is drawn in the middle."""
    low, high = min(values), max(values)
    if low < high:
        return low, high
    margin = abs(low) / 2 or 0.5
    return low - margin, high + margin


def _axes(low_x: float, high_x: float, low_y: float, high_y: float) -> list[Markup]:
    right, floor = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    middle = (_LEFT + right) / 2
    return [
        element("line", x1=_LEFT, y1=_TOP, x2=_LEFT, y2=floor, class_="axis"),
        element("line", x1=_LEFT, y1=floor, x2=right, y2=floor, class_="axis"),
        _text(_LEFT - 5, _TOP + 8, "end", short(high_y)),
        _text(_LEFT - 5, floor, "end", short(low_y)),
        _text(_LEFT, floor + 16, "start", short(low_x)),
        _text(right, floor + 16, "end", short(high_x)),
        _text(middle, floor + 28, "middle", "epoch"),
    ]


def _text(x: float, y: float, anchor: str, text: str) -> Markup:
    # text-anchor, by the name that Python admits
    return element("text", text, x=x, y=y, text_anchor=anchor)


def _legend(names: Sequence[str]) -> Markup:
    """What each line is, where there are several."""
    if len(names) < 2:
        return Markup()
    keys = [element("span", name, class_=f"key key-{place}") for place, name in enumerate(names, 1)]
    return join([": ", *keys])
