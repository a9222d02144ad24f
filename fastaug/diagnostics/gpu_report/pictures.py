"""Small data sets that the report makes on the spot, and a config that trains on one in seconds."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fastaug.config import TrainConfig
from fastaug.data.shapes_drawing import OUTLINES, draw_picture
from fastaug.diagnostics import photos

CLASSES = tuple(sorted(OUTLINES))[:4]


def shape_folder(root: Path, *, train: int, test: int = 4) -> Path:
    """root/{train,test}/CLASS/NN.jpg: drawn shapes of 64 px, so many of each of 4 classes."""
    for place, (split, count) in enumerate({"train": train, "test": test}.items()):
        for label, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                rng = np.random.default_rng([place, label, number])
                draw_picture(name, rng).save(folder / f"{number:03}.jpg", quality=90)
    return root


def small_training(folder: Path, out: Path, **changes: Any) -> TrainConfig:
    """A training of a small network on the folder; keyword arguments change it."""
    settings: dict[str, Any] = {
        "data": str(folder),
        "model": "wrn-10-1",
        "size": 32,
        "views": 4,
        "batch_size": 64,
        "epochs": 100,
        "lr": 0.05,
        "workers": 0,
        "tta": 0,
        "eval_views": 0,
        "eval_every": 100,
        "log_every": 1,
        "progress_every": 0.0,
        "out": str(out),
    }
    return TrainConfig.from_flat(**(settings | changes))


def jpegs(count: int) -> dict[str, list[bytes]]:
    """Photo-like pictures of about 500 x 375 in each kind of JPEG, by the name of the kind."""
    kinds: dict[str, dict[str, Any]] = {
        "4:4:4, quality 96": {"subsampling": "4:4:4", "quality": 96},
        "4:2:0, quality 80": {"subsampling": "4:2:0", "quality": 80},
        "4:2:2, quality 90": {"subsampling": "4:2:2", "quality": 90},
        "4:2:0, progressive": {"subsampling": "4:2:0", "quality": 85, "progressive": True},
        "gray": {"quality": 90},
    }
    pictures = [photos.draw_picture(np.random.default_rng(number)) for number in range(count)]
    return {
        name: [_encoded(p.convert("L") if name == "gray" else p, options) for p in pictures]
        for name, options in kinds.items()
    }


def _encoded(picture: Image.Image, options: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", **options)
    return file.getvalue()
