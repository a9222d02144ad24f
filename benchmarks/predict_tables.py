"""The tables of the prediction, for benchmarks/tables.py."""

from __future__ import annotations

from collections.abc import Sequence

from stages import FORWARD
from table_parts import Row, markdown, number


def of_one_gpu(run: Sequence[Row]) -> list[str]:
    """Predicted views/s of one GPU, the band, and what limits."""
    found = {(row["device"], row["K"]): row for row in run if _is(row, "views/s", "1")}
    views = list(dict.fromkeys(k for _, k in found))
    lines = []
    for gpu in dict.fromkeys(gpu for gpu, _ in found):
        cells = [
            f"{float(row['value']):,.0f} ({float(row['low']):,.0f} to {float(row['high']):,.0f}), "
            + row["limit"]
            for row in (found[gpu, k] for k in views)
        ]
        lines.append([gpu, *cells])
    return markdown(["PREDICTION: views/s of one GPU", *(f"K={k}" for k in views)], lines)


def of_many_gpus(run: Sequence[Row]) -> list[str]:
    """Predicted images/s of many GPUs together at the smallest and the largest K."""
    views = sorted({int(row["K"]) for row in run})
    counts = sorted({int(row["count"]) for row in run})
    lines = []
    for gpu in dict.fromkeys(row["device"] for row in run):
        for k in (views[0], views[-1]):
            rows = {
                int(row["count"]): row
                for row in run
                if row["device"] == gpu and row["K"] == str(k) and row["quantity"] == "images/s"
            }
            cells = [f"{float(rows[n]['value']):,.0f}, {rows[n]['limit']}" for n in counts]
            lines.append([f"{gpu}, K={k}", *cells])
    return markdown(["PREDICTION: images/s in all", *(f"{n:,} GPUs" for n in counts)], lines)


def check(run: Sequence[Row]) -> list[str]:
    """The same model with this CPU's numbers, beside what was measured."""
    head = ["CPU, ms", "measured", "predicted from probes", "error"]
    head += ["predicted, calibrated on forward", "error"]
    suffix = ", calibrated on forward"
    found = {(row["quantity"], row["K"]): row for row in run}
    lines = []
    for (quantity, k), row in found.items():
        if (other := found.get((quantity + suffix, k))) is None:
            continue
        name = quantity.removesuffix(" time") + (f", K={k}" if k else "")
        cells = [name, number({"median": row["measured"]})]
        for each in (row, other):
            cells += [number({"median": each["value"]}), f"{100 * float(each['error']):+.0f}%"]
        if name == FORWARD:
            cells[-1] = "(input)"
        lines.append(cells)
    return markdown(head, lines)


def _is(row: Row, quantity: str, count: str) -> bool:
    return row["quantity"] == quantity and row["count"] == count
