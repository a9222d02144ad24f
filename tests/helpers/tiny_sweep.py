"""Data and flags of sweeps that take seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import optuna
from color_folders import color_image

TINY = ("--size", "12", "--crop", "pad", "--batch-size", "8", "--workers", "0", "--tta", "2")


def write_colors(path: Path) -> Path:
    """60 training and 12 test images of 12 px."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 60), ("test", 12)):
        labels = np.arange(count) % 3
        arrays[f"{split}_images"] = np.stack([color_image(label, rng, 12) for label in labels])
        arrays[f"{split}_labels"] = labels
    np.savez(path, **arrays)
    return path


def trials_of(database: Path) -> list[optuna.trial.FrozenTrial]:
    url = f"sqlite:///{database}"
    (name,) = optuna.get_all_study_names(url)
    return optuna.load_study(study_name=name, storage=url).get_trials()
