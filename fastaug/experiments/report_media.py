"""Pictures of the report: figures as inline SVG, views of the training images as JPEG."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from markupsafe import Markup
from PIL import Image

from fastaug.experiments.plotting import render
from fastaug.runtime.folder_files import read_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_WIDTH = 1200
_MAX_BYTES, _MAX_PIXELS = 2**26, 40_000_000
"""A views.png of 64 views with 224 pixels has 29 million pixels. These take 350 MB to convert."""
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


def inline_svg(figure: Figure, prefix: str, label: str) -> Markup:
    """A figure as an element of the page. All its ids get the prefix, as several figures share the
    page."""
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
    """A PNG file as a data: URL with a JPEG, scaled down to the page's width. A PNG of photographs
    would be five times as large."""
    content = io.BytesIO(read_file(file, _MAX_BYTES))
    with Image.open(content, formats=["PNG"]) as picture:
        if picture.width * picture.height > _MAX_PIXELS:
            raise ValueError(f"{picture.width} x {picture.height} pixels is too large")
        small = picture.convert("RGB")
    small.thumbnail((PICTURE_WIDTH, 4 * PICTURE_WIDTH), Image.Resampling.LANCZOS)
    written = io.BytesIO()
    small.save(written, "JPEG", quality=85, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()
