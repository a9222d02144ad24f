"""Coordinates of the report's plots, which templates/gpu_report.html.j2 draws as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Plot = dict[str, Any]

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 448, 22, 200
_BAR = 24
"""Height of a horizontal bar with its gap."""


class Bar(NamedTuple):
    """A measured value, and its prediction where there is one."""

    label: str
    value: float
    predicted: float | None = None
    low: float = 0.0
    high: float = 0.0


def bar_plot(title: str, bars: Sequence[Bar]) -> Plot | None:
    """Vertical bars with their values, and predictions as marks with a range."""
    if not bars:
        return None
    top = max(max(bar.value, bar.high) for bar in bars) or 1.0
    width = (RIGHT - LEFT) / len(bars)

    def down(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * value / top, 1)

    drawn = [
        {
            "x": round(LEFT + place * width + 0.2 * width, 1),
            "width": round(0.6 * width, 1),
            "middle": round(LEFT + (place + 0.5) * width, 1),
            "y": down(bar.value),
            "label": bar.label,
            "text": short(bar.value),
            "predicted": None if bar.predicted is None else down(bar.predicted),
            "predicted_text": "" if bar.predicted is None else short(bar.predicted),
            "low": down(bar.low),
            "high": down(bar.high),
        }
        for place, bar in enumerate(bars)
    ]
    return {"title": title, "bars": drawn}


def stacked_plot(title: str, rows: Mapping[str, Mapping[str, float]], unit: str) -> Plot | None:
    """Horizontal bars of the parts of a sum. rows: label -> name of a part -> value."""
    totals = {label: sum(parts.values()) for label, parts in rows.items()}
    if not rows or not any(totals.values()):
        return None
    scale = (RIGHT - LEFT - 60) / max(totals.values())
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    drawn = []
    for place, (label, parts) in enumerate(rows.items()):
        x, pieces = float(LEFT), []
        for name, value in parts.items():
            style = names.index(name) + 1
            piece = {"x": round(x, 1), "width": round(scale * value, 1), "style": style}
            pieces.append(piece | {"text": f"{name}: {short(value)} {unit}"})
            x += scale * value
        end = {"x": round(x + 5, 1), "text": f"{short(totals[label])} {unit}"}
        drawn.append({"label": label, "y": TOP + place * _BAR, "pieces": pieces, "end": end})
    legend = list(enumerate(names, start=1))
    return {"title": title, "rows": drawn, "legend": legend, "height": TOP + len(rows) * _BAR}


def line_plot(title: str, x_label: str, lines: Mapping[str, Sequence[float]]) -> Plot | None:
    """Lines over 1, 2, 3, ... on one scale."""
    values = [value for line in lines.values() for value in line]
    if not values:
        return None
    low, high = min(values), max(values)
    high = high if high > low else low + 1.0
    longest = max(map(len, lines.values()))

    def place(number: int, value: float) -> str:
        x = LEFT + (RIGHT - LEFT) * number / max(1, longest - 1)
        return f"{x:.1f},{BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low):.1f}"

    drawn = [
        {"name": name, "style": style, "points": " ".join(map(place, range(len(line)), line))}
        for style, (name, line) in enumerate(lines.items(), start=1)
    ]
    ends = [(BOTTOM, short(low)), (TOP, short(high))]
    return {"title": title, "x_label": x_label, "lines": drawn, "ends": ends, "last": longest}


def short(value: float) -> str:
    """A number with three digits."""
    if value and abs(value) < 100:
        return f"{value:.3g}"
    return f"{float(f'{value:.3g}'):,.0f}"
