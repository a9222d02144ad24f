"""Small data in real formats, and a config that trains on it in a second."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

# Tests run side by side: more threads than cores each would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What is remembered of data sets stays with the tests.
os.environ["FASTAUG_CACHE"] = tempfile.mkdtemp(prefix="fastaug-tests-")

import numpy as np
import pytest
import torch
from PIL import Image

from fastaug.config import TrainConfig
from fastaug.data import retry as reading
from fastaug.runtime.device import avoid_broken_cpu_arithmetic

CLASSES = ("blue", "green", "red")
torch.set_num_threads(1)
# Before any test uses oneDNN: afterwards it would be too late for this process.
avoid_broken_cpu_arithmetic(torch.device("cpu"), "bf16")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        needs_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(needs_gpu)


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["FASTAUG_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that stays bad is not waited for; one test is about the true pauses."""
    monkeypatch.setattr(reading, "RETRY_PAUSES", (0.01, 0.01))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("FASTAUG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def color_image(label: int, rng: np.random.Generator, size: int) -> np.ndarray:
    """[size, size, 3] uint8: noise with one channel raised, so that a class can be learned."""
    image = rng.integers(0, 120, (size, size, 3))
    image[..., 2 - label] += 100
    return image.astype(np.uint8)


def write_folder(root: Path, counts: dict[str, int], size: int = 20) -> Path:
    """root/SPLIT/CLASS/NN.jpg with counts[SPLIT] images a class."""
    rng = np.random.default_rng(0)
    for split, count in counts.items():
        for label, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(color_image(label, rng, size)).save(folder / f"{i:02}.jpg")
    return root


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders: 3 classes, 12 training and 5 test images each, 20 px."""
    return write_folder(tmp_path_factory.mktemp("data") / "colors", {"train": 12, "test": 5})


@pytest.fixture
def tiny(folder: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """A config of a few steps on the color folders; keyword arguments change it."""

    def make(**changes: object) -> TrainConfig:
        settings: dict = {
            "data": str(folder),
            "model": "wrn-10-1",
            "size": 16,
            "views": 2,
            "batch_size": 16,
            "epochs": 2,
            "lr": 0.05,
            "workers": 0,
            "tta": 2,
            "log_every": 2,
            "out": str(tmp_path / "run"),
        }
        return TrainConfig.from_flat(**(settings | changes))

    return make
