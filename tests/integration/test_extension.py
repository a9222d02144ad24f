"""--resume with another --epochs: the run ends as one that began with it, to the bit, or is
refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expect import missing, raises
from training import metrics, run

from fastaug import cli, train
from fastaug.config import TrainConfig
from fastaug.engine.trainer import Trainer
from fastaug.errors import CheckpointError
from fastaug.runs.checkpoint import load_checkpoint

Tiny = Callable[..., TrainConfig]


def assert_same_state(ours: Path, theirs: Path) -> None:
    """Weights, average, optimizer, loader and counters of the last checkpoint."""
    first, second = load_checkpoint(ours / "last.pt"), load_checkpoint(theirs / "last.pt")
    for state in (first, second):
        del state["speed"]
        for name in ("out", "resume", "max_steps"):
            del state["config"][name]
    _assert_equal(first, second)


def _assert_equal(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            _assert_equal(ours[key], theirs[key])
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            _assert_equal(one, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize(
    ("settings", "epochs", "stop"),
    [
        ({"schedule": "constant"}, 4, 0),  # of a finished run
        ({"schedule": "constant", "warmup_epochs": 1.0, "optimizer": "adamw"}, 3, 0),
        ({"schedule": "constant", "log_every": 3, "ema": 0.9}, 4, 5),
        ({"schedule": "halving"}, 4, 3),  # 8 steps: the first halving comes after 4
        ({"schedule": "halving"}, 4, 4),
        ({"schedule": "cosine", "warmup_epochs": 1.0}, 4, 4),  # the warm-up ends
        ({"schedule": "constant", "epochs": 4}, 2, 5),  # shortened
    ],
)
def test_it_ends_as_if_it_had_begun_so(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], settings: dict, epochs: int, stop: int
) -> None:
    config = tiny(log=("none",), **settings)
    begun = run(config.replace(max_steps=stop), "-extended")
    if not stop:
        assert json.loads((begun / "summary.json").read_text())["finished"]
    whole = run(config.replace(epochs=epochs), "-whole")
    capsys.readouterr()
    assert cli.run(train.main, ["--resume", str(begun), "--epochs", str(epochs)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "--epochs" in line]
    old = config.optim.epochs
    assert len(said) == 1
    assert missing(said[0], f"--epochs {old} {epochs} {4 * old} {4 * epochs}") == []
    assert_same_state(begun, whole)
    assert metrics(begun) == metrics(whole)
    summaries = [json.loads((f / "summary.json").read_text()) for f in (begun, whole)]
    for summary in summaries:
        del summary["timing"]
    assert summaries[0] == summaries[1]
    assert summaries[0]["finished"]
    assert json.loads((begun / "config.json").read_text())["epochs"] == epochs
    best = [load_checkpoint(f / "best.pt") for f in (begun, whole)]
    assert best[0]["step"] == best[1]["step"]


@pytest.mark.parametrize(
    ("settings", "epochs", "stop"),
    [
        ({"schedule": "cosine"}, 4, 3),
        ({"schedule": "halving"}, 4, 5),
        ({"schedule": "halving"}, 4, 0),
        ({"schedule": "cosine", "warmup_epochs": 1.0}, 4, 6),
    ],
)
def test_a_schedule_that_does_not_allow_it(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], settings: dict, epochs: int, stop: int
) -> None:
    begun = run(tiny(log=("none",), max_steps=stop, **settings))
    before = {p: p.stat().st_mtime_ns for p in begun.iterdir()}
    assert cli.run(train.main, ["--resume", str(begun), "--epochs", str(epochs)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    schedule = settings["schedule"]
    assert missing(line, f"--epochs {epochs} --schedule {schedule} --weights {begun}") == []
    assert {p: p.stat().st_mtime_ns for p in begun.iterdir()} == before
    advice = line[line.index("--config") :].split()  # a new run, of the same settings
    wanted = TrainConfig.from_saved(json.loads((begun / "config.json").read_text())).replace(
        epochs=epochs, weights=str(begun), out="NEW", max_steps=0
    )
    assert train.read_settings(advice) == (wanted, None)


def test_not_below_the_step_that_is_reached(tiny: Tiny) -> None:
    begun = run(tiny(schedule="constant", log=("none",), max_steps=6))
    with raises(CheckpointError, "--epochs 1 2"):
        Trainer(tiny(schedule="constant", epochs=1), begun / "last.pt")


def test_growing_views_depend_on_the_epochs(tiny: Tiny) -> None:
    config = tiny(schedule="constant", log=("none",), max_steps=2, size=64, initial_size=32)
    begun = run(config)
    with raises(CheckpointError, f"--epochs 3 2 --size 32:64 --weights {begun}"):
        Trainer(config.replace(epochs=3), begun / "last.pt")


def test_other_settings_still_may_not_change(tiny: Tiny) -> None:
    begun = run(tiny(schedule="constant", log=("none",), max_steps=6))
    with raises(CheckpointError, "--lr 0.05 0.5"):
        Trainer(tiny(schedule="constant", epochs=3, lr=0.5), begun / "last.pt")


def test_an_extended_run_is_not_finished(tiny: Tiny) -> None:
    """summary.json of the shorter run is gone while the longer one trains."""
    begun = run(tiny(schedule="constant", log=("none",)))
    trainer = Trainer(tiny(schedule="constant", log=("none",), epochs=3), begun / "last.pt")
    trainer._open_folder()
    assert not (begun / "summary.json").exists()
    trainer.folder.close()
