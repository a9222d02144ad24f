"""Under torchrun, from a shell: ranks that differ end with one line, others train to the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import run_ranks, train

import fastaug
from fastaug.config import TrainConfig
from fastaug.engine.learner import Learner
from fastaug.engine.rank_drift import DriftCheck
from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runtime.distributed import Group

Tiny = Callable[..., TrainConfig]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ROOT = Path(fastaug.__file__).parents[1]
# A rank, started in a folder of its own and with the sources of fastaug that are there.
WRAPPER = f"""#!/bin/sh
cd "$(dirname "$0")/rank$RANK"
export PYTHONPATH="$PWD/sources"
exec {sys.executable} -m fastaug.train "$@"
"""
# A rank whose weights differ by one bit after its sixth step, unless it was restarted.
FLIPPING = """
import os, sys, torch
from fastaug import cli, train
from fastaug.engine import rank_drift
from fastaug.engine.learner import Learner

rank_drift.EVERY = 4
update, steps = Learner.update, []

def flipping(self, rate):
    skip = update(self, rate)
    steps.append(1)
    is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first_start and self.group.rank == 1 and len(steps) == 6:
        next(self.model.parameters()).detach().view(torch.int32)[0, 0, 0, 0] ^= 1
    return skip

Learner.update = flipping
sys.exit(cli.run(train.main))
"""


def torchrun(*words: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


SETTINGS: dict = {"model": "wrn-10-1", "size": 16, "views": 2, "batch_size": 16, "epochs": 3}
SETTINGS |= {"lr": 0.05, "workers": 0, "tta": 0, "eval_views": 0, "kernel": "reference"}


def flags(data: object, out: Path) -> list[str]:
    settings = {"data": data, "out": out, **SETTINGS}
    return [word for n, v in settings.items() for word in (f"--{n.replace('_', '-')}", str(v))]


@pytest.fixture
def ranks(tmp_path: Path, folder: Path) -> tuple[Path, list[Path]]:
    """A script that starts a rank, and the folder of each: a copy of the data, and the sources."""
    own = [tmp_path / f"rank{rank}" for rank in range(2)]
    for place in own:
        shutil.copytree(folder, place / "data")
        (place / "sources").symlink_to(ROOT)
    script = tmp_path / "start.sh"
    script.write_text(WRAPPER)
    script.chmod(0o755)
    return script, own


def assert_refused(done: subprocess.CompletedProcess, out: Path, *words: str) -> None:
    assert done.returncode == 1, done.stderr  # torchrun's own
    (line,) = (line for line in done.stderr.splitlines() if "error: " in line)
    assert [word for word in words if word not in line] == []
    assert done.stderr.count("exitcode  : 2 ") == 2, done.stderr
    assert "gloo" not in done.stderr
    assert not out.exists()


def test_another_folder_under_the_same_path(tmp_path: Path, ranks: tuple) -> None:
    """The class folders of rank 1 have each other's images, under the same names."""
    script, (_, second) = ranks
    classes = second / "data/train"
    for old, new in (("blue", "x"), ("red", "blue"), ("x", "red")):
        (classes / old).rename(classes / new)
    data, out = "/proc/self/cwd/data", tmp_path / "run"  # each rank has its own current folder
    done = torchrun("--no-python", script, *flags(data, out))
    assert_refused(done, out, "training images", "rank 1", f"--data {data}")


def test_other_sources(tmp_path: Path, ranks: tuple) -> None:
    script, (first, second) = ranks
    (second / "sources").unlink()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("fastaug", "pipelines", "cuda"):
        shutil.copytree(ROOT / name, second / "sources" / name, symlinks=True, ignore=ignored)
    with (second / "sources/pipelines/loader.py").open("a") as file:
        file.write("# a comment\n")
    out = tmp_path / "run"
    done = torchrun("--no-python", script, *flags(first / "data", out))
    assert_refused(done, out, "fastaug/pipelines/loader.py", "rank 1")


def test_a_flipped_bit_restarts_from_a_good_checkpoint(tmp_path: Path, folder: Path) -> None:
    script = tmp_path / "flipping.py"
    script.write_text(FLIPPING)
    disturbed, whole = tmp_path / "disturbed", tmp_path / "whole"
    done = torchrun("--max-restarts", 1, script, *flags(folder, disturbed))
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "error: " in line)
    assert "the weights of rank 1" in line
    assert "resumed at step 4" in done.stdout  # the end of the first epoch
    config = TrainConfig.from_flat(data=str(folder), out=str(whole), **SETTINGS)
    assert run_ranks(2, train, config) == [0, 0]
    ours, theirs = (load_checkpoint(out / "last.pt") for out in (disturbed, whole))
    for part in ("model", "optimizer"):
        torch.testing.assert_close(ours[part], theirs[part], rtol=0, atol=0)


def _train_and_compare_every_step(group: Group, config: TrainConfig, skipped: int) -> int:
    """Returns how often the ranks were compared. skipped: a step with a non-finite loss."""
    compared, compare, start = [], DriftCheck._compare, Learner.start_step

    def counting(self: DriftCheck, step: int, hashes: list) -> None:
        compared.append(step)
        compare(self, step, hashes)

    def starting(self: Learner, step: int) -> None:
        start(self, step)
        self.poisoned = step == skipped  # type: ignore[attr-defined]

    backward = Learner.backward

    def poisoning(self: Learner, batch: object, *args: object, **named: object) -> object:
        if self.poisoned and group.rank == 1:  # type: ignore[attr-defined]
            batch.views.fill_(float("nan"))  # type: ignore[attr-defined]
        return backward(self, batch, *args, **named)  # type: ignore[arg-type]

    DriftCheck.after_step = DriftCheck.check_now  # type: ignore[method-assign]
    DriftCheck._compare = counting  # type: ignore[method-assign]
    Learner.start_step, Learner.backward = starting, poisoning  # type: ignore[assignment]
    assert train(group, config) == 0
    return len(compared)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "resnet18", "batch_norm": "sync", "ema": 0.9, "accumulate": 2},
        {"model": "resnet18", "precision": "bf16", "loader": "dali", "clip_norm": 1.0},
        {"optimizer": "lamb", "lr": 0.01, "agc": 0.01},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_equal_ranks_are_never_stopped(tiny: Tiny, changes: dict) -> None:
    """Compared after every one of eight steps, one of which is skipped."""
    config = tiny(kernel="reference", tta=0, eval_every=10, **changes)
    assert run_ranks(2, _train_and_compare_every_step, config, 3) == [8, 8]
    assert load_checkpoint(Path(config.run.out) / "last.pt")["skipped_steps"] == 1
