"""The ten lines of make_views in the README, run as they are."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch
from PIL import Image

from fastaug.data import sources
from fastaug.data.sources import open_split

README = Path(__file__).parents[2] / "README.md"


def test_the_lines_of_the_readme_draw_a_picture(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = README.read_text().partition("## The views in your own training loop")[2]
    code = re.match(r"\n*((?:    .*\n|\n)+)", section)
    assert code
    lines = textwrap.dedent(code[1]).replace("(0, 700, 1900)", "(0, 14, 33)")
    assert len([line for line in lines.splitlines() if line]) <= 10
    monkeypatch.chdir(tmp_path)
    # The built-in set takes seconds to make; another one will do.
    monkeypatch.setattr(sources, "open_split", lambda _, split: open_split(str(folder), split))
    exec(lines, {})
    picture = Image.open(tmp_path / "views.png")
    assert picture.size == (8 * 66 + 2, 3 * 66 + 2)  # torchvision's grid has edges of 2
    shown = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    assert shown.float().std() > 20
