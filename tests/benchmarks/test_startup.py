"""benchmarks/startup.py: its slopes by hand, and a short real start."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import startup
from expect import raises

from fastaug.errors import ConfigError


def test_slopes() -> None:
    options = startup.Options(files=11_000, few=1_000)
    line = startup.Line("seconds", "s", 4.0, 5.0)
    assert line.per_million(options) == pytest.approx(100)
    assert line.at(1_000, options) == pytest.approx(4)
    assert line.at(501_000, options) == pytest.approx(54)


@pytest.mark.parametrize("wrong", [{"few": 999}, {"files": 3_000}, {"ranks": ()}, {"repeats": 0}])
def test_wrong_flags(wrong: dict) -> None:
    with raises(ConfigError, "--" + next(iter(wrong))):
        startup.Options(**wrong)


def test_a_set(tmp_path: Path) -> None:
    startup.write_set(tmp_path, 25, classes=10)
    counts = [len(list(place.iterdir())) for place in sorted((tmp_path / "train").iterdir())]
    assert counts == [3] * 5 + [2] * 5
    assert len(list(tmp_path.glob("val/*/*.JPEG"))) == startup.TEST_FILES


def test_memory() -> None:
    rss, pss = startup.memory_of(psutil.Process(os.getpid()))
    assert rss == pytest.approx(psutil.Process().memory_info().rss / 2**20, rel=0.2)
    assert 0 < pss <= rss


def test_a_start(tmp_path: Path) -> None:
    startup.write_set(tmp_path / "data", 60, classes=3)
    environment = os.environ | {"FASTAUG_CACHE": str(tmp_path / "cache")}
    start = startup.one_start(tmp_path / "data", 1, environment)
    assert start.cpu > 0.5
    assert start.seconds > 0.5
    assert 100 < start.pss <= start.rss
