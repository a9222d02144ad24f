"""Results of scanning a set of images: as plain values, and as a table."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastaug.data.image_set import ImageSet
from fastaug.data.scan import ScanResult
from fastaug.errors import printable
from fastaug.runs.console import show_table

_SHOWN = 20
"""Bad images that are listed below the table."""


def show_scan(images: ImageSet, found: ScanResult) -> None:
    facts, bad = describe_scan(images, found), found.manifest.bad
    formats = ", ".join(f"{name} {count:,}" for name, count in facts["formats"].items())
    sizes = [facts[name] for name in ("smallest", "median", "largest")]
    rows = [
        ("images", f"{len(images):,}"),
        ("classes", f"{len(images.classes):,}"),
        ("formats", formats or "-"),
        ("smallest / median / largest", " / ".join(f"{w} x {h}" for w, h in sizes if w) or "-"),
        ("bad", f"{len(bad):,} ({100 * len(bad) / len(images):.3g}%)"),
    ]
    show_table(images.name, rows)
    for place, reason in list(facts["bad"].items())[:_SHOWN]:
        print(printable(f"{place}: {reason}"))
    if len(bad) > _SHOWN:
        rest = f"; all of them: {found.bad_list}" if found.bad_list else "; --out FILE has them all"
        print(printable(f"and {len(bad) - _SHOWN:,} more{rest}"))


def describe_scan(images: ImageSet, found: ScanResult) -> dict[str, Any]:
    """Results as plain values. Sizes are (width, height) of readable images, ordered by area."""
    good = np.delete(found.manifest.sizes, list(found.manifest.bad), axis=0)
    order = np.argsort(good.prod(axis=1, dtype=np.int64), kind="stable")
    places = {"smallest": 0, "median": len(order) // 2, "largest": len(order) - 1}
    return {
        "name": printable(images.name),
        "images": len(images),
        "formats": dict(found.formats.most_common()),
        **{
            name: good[order[place]][::-1].tolist() if len(order) else [0, 0]
            for name, place in places.items()
        },
        "bad": {
            printable(images.where(index)): reason for index, reason in found.manifest.bad.items()
        },
    }
