"""python -m fastaug.scan: the table, the list, the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from color_folders import write_folder
from expect import missing
from PIL import Image

from fastaug import cli, scan

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """36 training images, 20 x 20, but one of 7 x 90 and one of 64 x 48; 15 test images."""
    root = write_folder(tmp_path / "colors", {"train": 12, "test": 5})
    Image.new("RGB", (7, 90)).save(root / "train/red/00.jpg", "PNG")
    Image.new("RGB", (64, 48)).save(root / "train/red/01.jpg")
    return root


def row(shown: str, name: str) -> list[str]:
    """Values in the rows of this name."""
    cells = [line.split("│") for line in shown.splitlines() if line.startswith(f"│ {name} ")]
    return [cell[2].strip() for cell in cells]


def test_sound_data(data: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.run(scan.main, [str(data)]) == 0
    shown = capsys.readouterr().out
    assert row(shown, "images") == ["36", "15"]
    assert row(shown, "classes") == ["3", "3"]
    assert row(shown, "formats") == ["JPEG 35, PNG 1", "JPEG 15"]
    sizes = row(shown, "smallest / median / largest")
    assert sizes == ["20 x 20 / 20 x 20 / 64 x 48", "20 x 20 / 20 x 20 / 20 x 20"]
    assert row(shown, "bad") == ["0 (0%)", "0 (0%)"]


def test_bad_images_within_the_share(data: Path, capsys: pytest.CaptureFixture) -> None:
    bad = data / "train/blue/03.jpg"
    bad.write_bytes(b"")
    assert cli.run(scan.main, [str(data), "--max-bad", "0.1"]) == 0
    shown = capsys.readouterr()
    assert row(shown.out, "bad") == ["1 (2.78%)", "0 (0%)"]
    assert row(shown.out, "smallest / median / largest")[0] == "20 x 20 / 20 x 20 / 64 x 48"
    assert f"{bad}: it is empty" in shown.out.splitlines()
    assert shown.err == ""


def test_too_many_bad_images(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    bad = sorted((data / "train").rglob("*.jpg"))[5:30]
    for file in bad:
        file.write_bytes(b"text")
    assert cli.run(scan.main, [str(data), "--out", str(tmp_path / "found.json")]) == 2
    shown = capsys.readouterr()
    assert row(shown.out, "bad") == ["25 (69.4%)", "0 (0%)"]
    listed = [line for line in shown.out.splitlines() if "known format" in line]
    assert listed == [f"{file}: not an image of a known format" for file in bad[:20]]
    more = shown.out.split("and 5 more; all of them: ")[1].split("\n")[0]
    assert len(Path(more).read_text().splitlines()) == 25
    (error,) = shown.err.strip().splitlines()
    assert error.startswith(f"error: {data / 'train'}: 25 of 36 images are bad (69.4%)")
    assert missing(error, f"--max-bad {more}") == []
    assert "fastaug.scan" not in error
    found = json.loads((tmp_path / "found.json").read_text())["sets"]
    assert [one["images"] for one in found] == [36, 15]
    assert set(found[0]["bad"]) == {str(file) for file in bad}
    assert found[1] == found[1] | {"bad": {}, "smallest": [20, 20], "formats": {"JPEG": 15}}


def test_full_decodes(data: Path, capsys: pytest.CaptureFixture) -> None:
    file = data / "test/red/00.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)).save(
        file, "PNG"
    )
    content = file.read_bytes()
    file.write_bytes(content[:2000] + bytes([content[2000] ^ 4]) + content[2001:])
    assert cli.run(scan.main, [str(data), "--max-bad", "0.5"]) == 0
    assert row(capsys.readouterr().out, "bad") == ["0 (0%)", "0 (0%)"]
    assert cli.run(scan.main, [str(data), "--max-bad", "0.5", "--full"]) == 0
    assert row(capsys.readouterr().out, "bad") == ["0 (0%)", "1 (6.67%)"]


@pytest.mark.parametrize("flags", [["--data", "{}"], ["--data={}"]])
def test_data_may_be_named_as_in_other_commands(data: Path, flags: list[str]) -> None:
    assert cli.run(scan.main, [flag.format(data) for flag in flags]) == 0


def test_a_flat_folder(data: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.run(scan.main, [str(data / "train/red")]) == 0
    shown = capsys.readouterr()
    assert row(shown.out, "images") == ["12"]
    assert row(shown.out, "smallest / median / largest") == ["20 x 20 / 20 x 20 / 64 x 48"]
    assert shown.err == ""


def test_a_single_split(
    data: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    (data / "test").rename(data / "elsewhere")
    assert cli.run(scan.main, [str(data)]) == 0
    assert row(capsys.readouterr().out, "images") == ["36"]
    assert caplog.messages == []
    (data / "elsewhere").rename(data / "test")
    (data / "train").rename(data / "elsewhere")
    assert cli.run(scan.main, [str(data)]) == 0
    assert row(capsys.readouterr().out, "images") == ["15"]
    (line,) = caplog.messages
    assert missing(line, f"{data / 'test'} train/") == []


def test_every_image_is_bad(data: Path, capsys: pytest.CaptureFixture) -> None:
    for file in (data / "test").rglob("*.jpg"):
        file.write_bytes(b"")
    assert cli.run(scan.main, [str(data), "--max-bad", "1"]) == 2
    shown = capsys.readouterr()
    assert row(shown.out, "bad") == ["0 (0%)", "15 (100%)"]
    assert row(shown.out, "formats")[1] == row(shown.out, "smallest / median / largest")[1] == "-"
    assert missing(shown.err, "15 100%") == []
    assert "raise --max-bad" not in shown.err


def test_arrays(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((40, 8, 9, 3), np.uint8), labels=np.arange(40) % 2)
    assert cli.run(scan.main, [str(tmp_path / "a.npz")]) == 0
    shown = capsys.readouterr().out
    assert row(shown, "formats") == ["array 40"]
    assert row(shown, "smallest / median / largest")[0] == "9 x 8 / 9 x 8 / 9 x 8"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "--data nowhere: "),
        (["shapes", "--max-bad", "2"], "--max-bad must be at least 0 and at most 1, got 2.0"),
        (["shapes", "--workers", "-2"], "--workers must be at least -1, got -2"),
        (["shapes", "--out", "/no/such/folder/x.json"], "--out /no/such/folder/x.json: "),
        ([""], "DATA is empty"),
        ([], "no DATA given"),
    ],
)
def test_mistakes(args: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.run(scan.main, args) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_a_file_name_that_is_not_utf8(data: Path, tmp_path: Path) -> None:
    bad = os.fsencode(data / "train/red") + b"/\xff.jpg"
    with open(bad, "wb"):
        pass
    out = tmp_path / "x.json"
    command = [sys.executable, "-m", "fastaug.scan", str(data), "--max-bad", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\\udcff.jpg: it is empty" in done.stdout
    assert len(json.loads(out.read_text())["sets"][0]["bad"]) == 1
