"""The README's ten lines of make_views, as they stand there; and the doctor's line about views."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch
from PIL import Image

from fastaug import doctor
from fastaug.data import sources
from fastaug.data.sources import open_split
from fastaug.kernels.admission import KernelReport
from fastaug.views import native

README = Path(__file__).parents[2] / "README.md"
CPU = torch.device("cpu")


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


def facts(timed: bool = False) -> dict[str, doctor.Fact]:
    return {fact.name: fact for fact in doctor.look_at_views(CPU, timed=timed)}


class TestDoctor:
    def test_what_works(self) -> None:
        found = facts(timed=True)
        assert re.match(r"admitted, [\d,]+ views/s\nworst of 7 cases: ", found["fused"].value)
        assert found["auto"].value == "fused"
        assert not any(fact.todo for fact in found.values())

    def test_one_that_is_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        report = KernelReport("native", "cpu", False, 2, "off by 9 x the tolerance\nand more")
        monkeypatch.setattr(doctor, "compare", lambda *_: report)
        found = facts()
        assert found["fused"].value == "refused\nworst of 2 cases: off by 9 x the tolerance"
        assert found["fused"].failed
        assert "use --views-engine dali" in found["fused"].todo
        assert found["auto"].value == "dali"

    @pytest.mark.parametrize("compiler", [None, "g++"])
    def test_one_that_cannot_run(
        self, monkeypatch: pytest.MonkeyPatch, compiler: str | None
    ) -> None:
        """Without a compiler there is a line of the compiler's already."""
        monkeypatch.setattr(native, "_why_not", lambda: "g++ cannot compile it")
        monkeypatch.setattr(doctor, "cpp_compiler", lambda: compiler)
        found = facts()
        assert found["fused"].value == "not available: g++ cannot compile it"
        assert bool(found["fused"].todo) == bool(compiler)
        assert not found["fused"].failed
        assert found["auto"].value == "dali"
