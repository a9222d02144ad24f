"""Pictures of the views that the runs of a family have trained on."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from fastaug.errors import first_line, printable
from fastaug.experiments.page_anchors import Anchors
from fastaug.experiments.page_html import Markup, bullets, element, join, link
from fastaug.experiments.results import Family, Run

WIDEST = 1200
"""Pixels across a picture in the page."""
_MOST_PIXELS = 80_000_000
"""Of a picture that is read at all."""


@dataclass(frozen=True)
class Pictures:
    """One for each number and kind of views in a family, by the anchors that runs link to."""

    shown: Mapping[str, Markup]
    notes: Sequence[str]

    def part(self) -> Markup:
        if not self.shown and not self.notes:
            return Markup()
        heading = element("h3", "What the network sees")
        return join([heading, *self.shown.values(), bullets(self.notes, class_="notes")])


def find_pictures(family: Family, anchors: Anchors) -> Pictures:
    """Of the first run of each kind that has one: those of the others would look the same."""
    shown: dict[str, Markup] = {}
    notes = []
    for run in family.runs:
        anchor, file = anchors.views(family, run), run.folder / "views.png"
        if anchor in shown or not file.is_file():
            continue
        try:
            data = _jpeg(file)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            notes.append(f"{printable(str(file))}: no picture ({printable(first_line(error))})")
            continue
        shown[anchor] = _figure(run, data, anchor, anchors)
    return Pictures(shown, notes)


def _figure(run: Run, data: str, anchor: str, anchors: Anchors) -> Markup:
    config = run.config
    what = f"{config.view.views} views" if config.view.views > 1 else "1 view"
    said = f"Training images, each with {what} of it, augmentation {config.view.augment}"
    picture = element("img", src=data, alt=f"{said}: a row for each image.", loading="lazy")
    caption = element("figcaption", said, ", from ", link(anchors.run(run), anchors.name(run)), ".")
    return element("figure", picture, caption, id=anchor, class_="views")


def _jpeg(file: Path) -> str:
    """A picture, no wider than the page needs it, as an address that holds all of it. PNG would
    take five times as much for photographs."""
    with Image.open(file, formats=["PNG"]) as picture:
        if picture.width * picture.height > _MOST_PIXELS:
            raise ValueError(f"{picture.width} x {picture.height} pixels are too many")
        small = picture.convert("RGB")
    small.thumbnail((WIDEST, 4 * WIDEST), Image.Resampling.LANCZOS)
    written = io.BytesIO()
    small.save(written, "JPEG", quality=85, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()
