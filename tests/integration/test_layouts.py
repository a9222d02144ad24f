"""Every layout of data: train, resume, evaluate, preview and scan by --data and nothing else.

To add a layout, write a function that makes a small set in its real format and list it in LAYOUTS.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from color_folders import CLASSES, color_image, write_folder
from expect import missing
from hugging_face_sets import save_dict_to_disk, table, write_parquet
from image_sets import open_data
from imagenet_sets import write_flat, write_kaggle, write_tars
from PIL import Image
from shard_writers import photos
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


def write_parquet_files(root: Path) -> Path:
    train, test = hugging_face_tables()
    write_parquet(root / "data/train-00000-of-00001.parquet", train)
    write_parquet(root / "data/validation-00000-of-00001.parquet", test)
    return root


def write_saved_dataset(root: Path) -> Path:
    train, test = hugging_face_tables()
    return save_dict_to_disk(root, train=train, test=test)


def hugging_face_tables() -> list[pa.Table]:
    return [table(photos(3 * count, seed=count)) for count in (TRAIN, TEST)]


def write_packed(root: Path) -> Path:
    write_class_folders(root / "source")
    assert cli.run(pack.main, [str(root / "source"), str(root / "packed")]) == 0
    return root / "packed"


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "class folders": write_class_folders,
    "csv": write_csv,
    "folder with a csv": write_csv_folder,
    "ImageNet from Kaggle": write_kaggle,
    "ImageNet with a flat val/": write_flat,
    "ImageNet's tars": write_tars,
    "parquet": write_parquet_files,
    "save_to_disk": write_saved_dataset,
    "packed": write_packed,
}
"""Each makes a set of 3 classes, TRAIN training and TEST test images of each."""


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


def test_commands_take_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    made = hugging_face_tables()[0].rename_columns(["left", "kind"])
    made = made.append_column("right", made.column("left"))
    file = write_parquet(tmp_path / "pairs.parquet", made.replace_schema_metadata())
    packed = tmp_path / "packed"
    for main, flags in (
        (scan.main, f"{file}"),
        (pack.main, f"{file} {packed}"),
        (train.main, f"--data {file} {SMALL} --max-steps 1 --out {tmp_path / 'run'}"),
    ):
        assert cli.run(main, flags.split()) == 2
        assert missing(capsys.readouterr().err, "left right --image-column") == []
        columns = "--image-column left --label-column kind"
        assert cli.run(main, f"{flags} {columns}".split()) == 0
    assert len(open_data(packed, "train")) == 3 * TRAIN
