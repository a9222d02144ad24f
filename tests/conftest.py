"""Fixtures of all tests: small data in real formats, and a config that trains on it in a second."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

# Tests run side by side: more threads than cores would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from color_folders import write_folder
from training import tiny_config

from fastaug.config import TrainConfig
from fastaug.data import retry
from fastaug.runtime.device import avoid_broken_cpu_arithmetic

torch.set_num_threads(1)
# Before any test uses oneDNN: afterwards it would be too late for this process.
avoid_broken_cpu_arithmetic(torch.device("cpu"), "bf16")


if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers inherit it
    os.environ["FASTAUG_CACHE"] = tempfile.mkdtemp(prefix="fastaug-tests-")
SESSION_CACHE = Path(os.environ["FASTAUG_CACHE"])


def pytest_configure(config: pytest.Config) -> None:
    """Compiled kernels and admission reports, named by their content, are kept between sessions."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.add_cleanup(lambda: shutil.rmtree(SESSION_CACHE, ignore_errors=True))
        if config.pluginmanager.hasplugin("cacheprovider"):
            (SESSION_CACHE / "kernels").symlink_to(config.cache.mkdir("fastaug-kernels"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        needs_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(needs_gpu)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreadable image is not waited for; one test is about the real pauses."""
    monkeypatch.setattr(retry, "RETRY_PAUSES", (0.01, 0.01))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for one test."""
    monkeypatch.setenv("FASTAUG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiled_cache(own_cache: Path) -> Path:
    """A cache folder for one test that has the compiled kernels of the session and no more."""
    (own_cache / "kernels").mkdir(parents=True)
    for file in (SESSION_CACHE / "kernels").glob("*"):
        if file.suffix != ".json":  # admission reports are made again
            (own_cache / "kernels" / file.name).symlink_to(file)
    return own_cache


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders: 3 classes, 12 training and 5 test images each, 20 px."""
    return write_folder(tmp_path_factory.mktemp("data") / "colors", {"train": 12, "test": 5})


@pytest.fixture
def tiny(folder: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """A config of a few steps on the color folders; keyword arguments change it."""

    return lambda **changes: tiny_config(folder, tmp_path / "run", **changes)
