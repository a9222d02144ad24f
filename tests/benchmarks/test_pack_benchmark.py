"""benchmarks/pack.py: its 12-megapixel pictures, and a short run."""

from __future__ import annotations

from pathlib import Path

import pack
import pytest
from color_folders import write_folder
from PIL import Image

from fastaug import cli


def test_large_pictures(folder: Path, tmp_path: Path) -> None:
    photos = sorted((folder / "train").rglob("*.jpg"))
    pack.make_large(photos, tmp_path, pack.Options(large=2))
    made = sorted(tmp_path.rglob("*.jpg"))
    assert [file.parent.name for file in made] == ["a", "b"]
    with Image.open(made[0]) as picture:
        assert picture.size == (4000, 3000)


def test_a_short_run(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "TILE", (80, 60))
    photos = write_folder(tmp_path / "photos", {"train": 4}, size=120)
    flags = ["--max-side", "40", "--size", "32", "--repeats", "1", "--turn-seconds", "0.02"]
    assert cli.run(pack.main, ["--quick", "--photos", str(photos), *flags]) == 0
    shown = capsys.readouterr().out
    for name in ("photos", "12 megapixels", "KB per image", "decode, images/s", "loader, K=8"):
        assert name in shown
    ratios = [float(row.split("│")[4]) for row in shown.splitlines() if "KB per image" in row]
    assert len(ratios) == 2
    assert max(ratios) < 0.5
