"""Pictures of the report: figures as inline SVG, views of the training images, curves of a run."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup
from PIL import Image

from fastaug.experiments.plotting import render
from fastaug.experiments.report_format import number, short
from fastaug.experiments.results import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = list[tuple[float, float]]

PICTURE_WIDTH = 1200
MAX_POINTS = 200
_MAX_PIXELS = 80_000_000
_READ_BYTES = 1_000_000
"""Bytes of a metrics.jsonl that are parsed, about 5,000 lines."""
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_FRAME = {"width": 320, "height": 170, "left": 60, "right": 310, "top": 10, "bottom": 136}
"""The size of a plot of a run, and the box between its axes."""


def inline_svg(figure: Figure, prefix: str, label: str) -> Markup:
    """A figure as an element of the page. Its ids begin with the prefix, as several figures share
    the page. Its colors stay on white: captions name them."""
    text = render(figure, "svg").decode()
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    root = ElementTree.fromstring(text)
    for node in list(root.iter()):
        for child in list(node):
            # matplotlib's rule for all lines would apply to the whole page: report.css has it.
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                node.remove(child)
        node.tail = None  # indentation
        node.text = (node.text or "").strip()
        if node.get("id") not in used:
            node.attrib.pop("id", None)
        for key, value in node.attrib.items():
            node.set(key, _prefixed(key, value, prefix))
    for name in ("width", "height", "version"):
        del root.attrib[name]
    root.set("role", "img")
    root.set("aria-label", label)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _prefixed(key: str, value: str, prefix: str) -> str:
    if key == "id":
        return f"{prefix}_{value}"
    if key.endswith("href"):
        return re.sub(r"^#", f"#{prefix}_", value)
    return value.replace("url(#", f"url(#{prefix}_")


def jpeg_url(file: Path) -> str:
    """A PNG file as a data: URL, no wider than the page needs it. As a PNG, photographs would take
    five times as much."""
    with Image.open(file, formats=["PNG"]) as picture:
        if picture.width * picture.height > _MAX_PIXELS:
            raise ValueError(f"{picture.width} x {picture.height} pixels are too many")
        small = picture.convert("RGB")
    small.thumbnail((PICTURE_WIDTH, 4 * PICTURE_WIDTH), Image.Resampling.LANCZOS)
    written = io.BytesIO()
    small.save(written, "JPEG", quality=85, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()


def run_plots(run: Run) -> list[dict[str, Any]]:
    """Loss and its terms by step, accuracy and invariance by epoch; empty without metrics.jsonl."""
    lines = list(read_metrics(run.folder / "metrics.jsonl"))
    train = [line for line in lines if line.get("kind") == "train"]
    evaluated = [line for line in lines if line.get("kind") == "eval"]
    images = "held-out images" if run.config.data.validation else "test images"
    plots = (
        plot("training loss", {name: _points(train, name) for name in ("loss", "nll", "kl")}),
        plot(f"top-1 in %, {images}", {"top-1": _points(evaluated, "top1", 100)}),
        plot(f"invariance in nats, {images}", {"invariance": _points(evaluated, "invariance")}),
    )
    return [found for found in plots if found]


def read_metrics(file: Path) -> Iterator[dict[str, Any]]:
    """Lines of a metrics.jsonl. A long training has millions of them and a plot shows few: from a
    large file, all evaluations and an even share of the rest."""
    if not file.is_file():
        return
    every = max(1, file.stat().st_size // _READ_BYTES)
    with file.open(encoding="utf-8", errors="replace") as lines:
        for place, line in enumerate(lines):
            if place % every and '"eval"' not in line:
                continue
            try:
                parsed = json.loads(line)
            except (ValueError, RecursionError):  # torn by a kill, or made up
                continue
            if isinstance(parsed, dict):
                yield parsed


def _points(lines: Iterable[Mapping[str, Any]], name: str, scale: float = 1.0) -> Points:
    found = ((number(line.get("epoch")), number(line.get(name))) for line in lines)
    return [(x, scale * y) for x, y in found if x is not None and y is not None]


def plot(title: str, series: Mapping[str, Points]) -> dict[str, Any] | None:
    """Lines over the epochs on one scale, as the template draws them; None without a point."""
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    low_x, high_x = _range([x for points in series.values() for x, _ in points])
    low_y, high_y = _range([y for points in series.values() for _, y in points])
    left, right, top, bottom = (_FRAME[side] for side in ("left", "right", "top", "bottom"))

    def place(x: float, y: float) -> str:
        across = left + (right - left) * (x - low_x) / (high_x - low_x)
        down = top + (bottom - top) * (high_y - y) / (high_y - low_y)
        return f"{across:.1f},{down:.1f}"

    ends = ", ".join(f"{name} ends at {short(points[-1][1])}" for name, points in series.items())
    limits = {"low_x": low_x, "high_x": high_x, "low_y": low_y, "high_y": high_y}
    return {
        "title": title,
        "label": f"{title} over the epochs: {ends}",
        "names": list(series),
        "lines": [" ".join(place(*p) for p in thinned(points)) for points in series.values()],
        "frame": _FRAME,
        **{name: f"{value:.3g}" for name, value in limits.items()},
    }


def thinned(points: Points, most: int = MAX_POINTS) -> Points:
    """The ends, and the lowest and highest point of each stretch between them: spikes stay."""
    if len(points) <= most:
        return points
    first, *between, last = points
    stretches = (most - 2) // 2
    cuts = [place * len(between) // stretches for place in range(stretches + 1)]
    kept = [first]
    for start, end in pairwise(cuts):
        stretch = between[start:end]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return [*kept, last]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest value; a single value gets a margin, so that it lies in the middle."""
    low, high = min(values), max(values)
    if low < high:
        return low, high
    margin = abs(low) / 2 or 0.5
    return low - margin, high + margin
