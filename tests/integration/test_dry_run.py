"""--dry-run: real steps and a real evaluation, and nothing is left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from expect import missing
from training import metrics, run, weights

from fastaug import cli, train
from fastaug.config import TrainConfig

Tiny = Callable[..., TrainConfig]
FLAGS = [
    *("--model", "wrn-10-1", "--size", "16", "--views", "2", "--batch-size", "16", "--epochs", "2"),
    *("--lr", "0.05", "--workers", "0", "--tta", "2", "--log-every", "1"),
]


def table(text: str) -> dict[str, str]:
    """First column -> second, over all lines of a row."""
    rows: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if cells := re.match(r"[│|] (.*?) *[│|] (.*?) *[│|]$", line):
            name = cells[1].strip() or name
            rows[name] = f"{rows.get(name, '')} {cells[2].strip()}".strip()
    return rows


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize("loader", ["torch", "dali"])
@pytest.mark.parametrize("out", [[], ["--out", "a/b"]])
def test_its_table(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str], loader: str, out: list[str]
) -> None:
    data = ["--data", str(folder), "--loader", loader]
    assert cli.run(train.main, [*data, *FLAGS, *out, "--dry-run"]) == 0
    assert os.listdir(here) == []
    rows = table(capsys.readouterr().out)
    assert missing(rows["run"], "36 15 3") == []  # training images, test images, classes
    assert missing(rows["steps"], "4 2") == []
    assert missing(rows["model"], "wrn-10-1 77,526") == []
    assert rows["loss kernel"] in ("native", "reference")
    assert "run folder" not in rows["run"]
    views = {"torch": ["reference"], "dali": ["fused (native)", "dali"]}
    assert rows["views"] in [f"{loader} loader, views engine: {own}" for own in views[loader]]
    assert re.search(r"\b\d+\.\d s\b", rows["epoch"])
    assert {"step", "epoch", "evaluation", "peak memory", "precision"} <= rows.keys()


def test_the_losses_are_those_of_the_training(
    folder: Path, tiny: Tiny, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The losses of its first two steps; the training logs them."""
    trained = metrics(run(tiny(log_every=1, max_steps=2, accumulate=2)), "train")
    capsys.readouterr()
    flags = ["--data", str(folder), *FLAGS, "--accumulate", "2", "--dry-run"]
    assert cli.run(train.main, flags) == 0
    losses = table(capsys.readouterr().out)["loss"]
    assert losses == ", then ".join(f"{record['loss']:.4f}" for record in trained)


def test_of_a_resumed_run(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    """A run in the middle, and one that has finished: its folder stays as it is."""
    for stop in (3, 8):
        out = run(tiny(max_steps=stop, log=("none",)), str(stop))
        before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
        first = weights(out)
        capsys.readouterr()
        assert cli.run(train.main, ["--resume", str(out), "--dry-run"]) == 0
        rows = table(capsys.readouterr().out)
        assert missing(rows["note"], f"resumed step {stop}") == []
        assert ("loss" in rows) == (stop == 3)
        assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
        assert all(bool((weights(out)[name] == first[name]).all()) for name in first)


def test_a_mistake_is_found(folder: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(folder), *FLAGS, "--kernel", "nothing", "--dry-run"]
    assert cli.run(train.main, flags) == 2
    assert missing(capsys.readouterr().err, "error nothing") == []
    assert os.listdir(here) == []


def test_two_ranks(folder: Path, here: Path) -> None:
    """Rank 0 prints one table; --print-config also works there."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "fastaug.train", "--data", str(folder), *FLAGS]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    for mode in ("--dry-run", "--print-config"):
        done = subprocess.run(
            [*command, mode], capture_output=True, text=True, timeout=300, cwd=here, env=env
        )
        assert done.returncode == 0, done.stderr
        assert os.listdir(here) == []
        if mode == "--dry-run":
            assert done.stdout.count("dry run") == 1
            assert missing(table(done.stdout)["run"], "2 ranks") == []
        else:
            assert done.stdout.count("batch_size: 16") == 1
