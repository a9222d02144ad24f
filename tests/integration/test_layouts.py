"""Every layout of data: train, resume, evaluate, preview and scan by --data and nothing else.

To add a layout, write a function that makes a small set in its real format and list it in LAYOUTS.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from color_folders import CLASSES, color_image, write_folder
from PIL import Image
from training import metrics

from fastaug import cli, evaluate, pack, preview, scan, train

SMALL = "--model wrn-10-1 --size 16 --views 2 --batch-size 8 --workers 0 --tta 0 --log-every 1"
TRAIN, TEST = 6, 2
"""Images of each class."""


def write_csv(root: Path) -> Path:
    """labels.csv with a column for the split, and a folder of images."""
    rng, rows = np.random.default_rng(0), [("path", "label", "split")]
    (root / "images").mkdir(parents=True)
    for split, count in (("train", TRAIN), ("val", TEST)):
        for i in range(3 * count):
            name = f"images/{split}{i:02}.jpg"
            Image.fromarray(color_image(i % 3, rng, 20)).save(root / name)
            rows.append((name, CLASSES[i % 3], split))
    with open(root / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return root / "labels.csv"


def write_csv_folder(root: Path) -> Path:
    return write_csv(root).parent


def write_class_folders(root: Path) -> Path:
    return write_folder(root, {"train": TRAIN, "val": TEST})


def write_packed(root: Path) -> Path:
    write_class_folders(root / "source")
    assert cli.run(pack.main, [str(root / "source"), str(root / "packed")]) == 0
    return root / "packed"


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "class folders": write_class_folders,
    "csv": write_csv,
    "folder with a csv": write_csv_folder,
    "packed": write_packed,
}
"""Each makes a set of 3 classes (CLASSES), TRAIN training and TEST test images of each."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_command(name: str, tmp_path: Path) -> None:
    data = str(LAYOUTS[name](tmp_path / "data"))
    out, picture = tmp_path / "run", tmp_path / "views.png"

    def call(main: Callable, line: str) -> None:
        assert cli.run(main, line.split()) == 0

    call(scan.main, f"{data} --out {tmp_path / 'scan.json'}")
    found = json.loads((tmp_path / "scan.json").read_text())["sets"]
    assert [part["images"] for part in found] == [3 * TRAIN, 3 * TEST]
    call(preview.main, f"--dali --data {data} --size 16 --views 2 --out {picture} --logdir=")
    assert picture.is_file()
    call(train.main, f"--dali --data {data} {SMALL} --epochs 1 --max-steps 2 --out {out}")
    call(train.main, f"--resume {out} --max-steps 3")
    assert [record["step"] for record in metrics(out, "train")] == [1, 2, 3]
    call(evaluate.main, f"{out} --tta 0 --workers 0 --out {tmp_path / 'result.json'}")
    result = json.loads((tmp_path / "result.json").read_text())
    assert 0 <= result["measures"]["top1"] <= 1
