"""benchmarks/resizing.py: the time of a training by hand, and a short run."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import resizing
from expect import raises

from fastaug import cli
from fastaug.errors import ConfigError


def test_share_of_time() -> None:
    """The second round is twice as slow, the third one has a slow first size."""
    samples = {128: [1.0, 2.0, 4.0], 224: [4.0, 8.0, 4.0]}
    assert resizing.share_of_time(Counter({128: 6, 224: 4}), samples) == pytest.approx(0.55)


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"epochs": 1}])
def test_wrong_flags(wrong: dict) -> None:
    with raises(ConfigError, "--" + next(iter(wrong))):
        resizing.Options(**wrong)


def test_a_short_run(folder: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--quick", "--photos", str(folder), "--size", "16:64", "--turn-seconds", "0.05"]
    assert cli.run(resizing.main, flags) == 0
    shown = capsys.readouterr().out
    rows = [row.split("│") for row in shown.splitlines() if row.startswith("│")]
    sizes, epochs = ([int(row[column]) for row in rows] for column in (1, 2))
    assert sizes == [16, 24, 32, 40, 48, 56, 64]
    assert epochs == [2, 1, 1, 2, 1, 1, 2]
    assert float(rows[0][4]) < 0.6 < float(rows[-1][4]) == 1
    (share,) = re.findall(r"take (0\.\d+) of the time", shown)
    assert 0.1 < float(share) < 0.95
