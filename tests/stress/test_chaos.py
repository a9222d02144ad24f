"""A short form of chaos.py: one round, and some enumerated faults. And does its check notice?"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos_check import account, compare, whole_epochs
from chaos_report import Report
from chaos_round import Result
from chaos_shim import Shim

from fastaug.config import TrainConfig
from fastaug.engine.trainer import Trainer

CHAOS = "tests/helpers/chaos.py"


def test_a_disturbed_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    played = ["--rounds", "1", "--jobs", "1", "--settings", "plain", "--enumerate", "some"]
    command = [sys.executable, CHAOS, *played, "--out", str(tmp_path / "chaos")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "chaos" / "chaos.json").read_text())
    assert report["failures"] == 0
    # What can come too late on a slow machine is not asked for.
    assert report["restarts"] >= 3, done.stdout
    assert report["faults"] >= 6, done.stdout
    cuts, operations = (each["faults"] for each in report["enumerated"])
    assert cuts["last.pt cut at a multiple of 4 KB"] > 200
    assert cuts["last.pt cut at a multiple of 4 KB, then trained to the end"] >= 1
    assert operations["SIGKILL before a file operation"] >= 8
    assert operations["SIGKILL in the middle of a write"] >= 1


# --- what disturbs: a clock and file operations under control, counts ---

WRITES = """
import os, time
print(time.time())
with open("run/.last.pt.1.tmp", "wb", buffering=0) as file:
    file.write(b"first")
    file.write(b"second")
os.replace("run/.last.pt.1.tmp", "run/last.pt")
"""


@pytest.mark.parametrize(
    ("operation", "left"),
    [
        ("", {"last.pt": b"firstsecond"}),
        ("open last.pt.tmp", {}),
        ("write last.pt.tmp 2", {".last.pt.1.tmp": b"first"}),
        ("half of write last.pt.tmp 2", {".last.pt.1.tmp": b"firstsec"}),
        ("rename to last.pt", {".last.pt.1.tmp": b"firstsecond"}),
    ],
)
def test_a_process_is_killed_at_a_file_operation(
    tmp_path: Path, operation: str, left: dict[str, bytes]
) -> None:
    (tmp_path / "run").mkdir()
    shim = Shim(tmp_path)
    shim.watch(tmp_path / "run")
    shim.clock_offset = -1000
    shim.kill_before(operation)
    code = WRITES.replace("run/", f"{tmp_path}/run/")
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | shim.environment, capture_output=True
    )
    assert done.returncode == (-signal.SIGKILL if operation else 0), done.stderr
    assert shim.killed == bool(operation)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == left
    if not operation:
        assert -1100 < float(done.stdout) - time.time() < -900


def test_counts_are_added_to_those_of_earlier_commands(tmp_path: Path) -> None:
    for seed, setting in enumerate(("plain", "dali", "plain")):
        report = Report(tmp_path / "chaos.json")
        assert report.next_seed == seed
        report.add(Result(setting, seed, Counter(SIGKILL=2, SIGTERM=seed)))
    stored = json.loads((tmp_path / "chaos.json").read_text())
    assert stored["by_kind"] == {"SIGKILL": 6, "SIGTERM": 3}
    assert stored["by_setting"] == {"plain": 6, "dali": 3}
    assert stored["faults"] == 9
    assert stored["failures"] == 0


# --- the check, on copies of a run ---


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checked") / "run"
    size: dict[str, Any] = {"size": 16, "views": 2, "batch_size": 16, "workers": 0}
    often: dict[str, Any] = {"log_every": 2, "checkpoint_every": 3, "kernel": "reference"}
    config = TrainConfig.from_flat(
        data=str(folder), out=str(path), epochs=3, tta=2, **size, **often
    )
    Trainer(config).fit()
    return path


def _edit_records(change: Callable[[list[str]], Any]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        change(lines)
        (run / "metrics.jsonl").write_text("".join(lines))

    return edit


def _edit_state(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        state = torch.load(run / name, weights_only=True)
        change(state)
        torch.save(state, run / name)

    return edit


def _nudge(state: dict[str, Any]) -> None:
    """The last bit of one weight."""
    _flip(next(iter(state["model"].values())))


def _nudge_momentum(state: dict[str, Any]) -> None:
    _flip(state["optimizer"]["state"][0]["momentum_buffer"])


def _flip(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32)[(0,) * tensor.ndim] ^= 1


def _other_measure(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    summary["measures"]["nll"] += 1e-12
    (run / "summary.json").write_text(json.dumps(summary))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "doubled": (_edit_records(lambda lines: lines.insert(3, lines[3])), "doubled"),
    "missing": (_edit_records(lambda lines: lines.pop(3)), "missing"),
    "order": (_edit_records(lambda lines: lines.insert(2, lines.pop(5))), "another order"),
    "torn": (_edit_records(lambda lines: lines.insert(2, '{"kind": "tr\n')), "no JSON"),
    "weight": (_edit_state("last.pt", _nudge), "last.pt model"),
    "momentum": (_edit_state("last.pt", _nudge_momentum), "last.pt optimizer"),
    "meter": (_edit_state("last.pt", lambda s: s["meter"]["sums"].add_(1)), "last.pt meter"),
    "best": (_edit_state("best.pt", lambda s: s.update(step=1)), "best.pt step"),
    "summary": (_other_measure, "summary.json measures nll"),
    "half": (lambda run: (run / ".last.pt.9.tmp").touch(), "should not be there"),
    "bad images": (lambda run: (run / "bad-images.txt").touch(), "should not be there"),
    "unreadable": (lambda run: (run / "best.pt").write_bytes(b"PK"), "cannot be read"),
}


def test_a_run_equals_itself(run: Path) -> None:
    assert compare(run, run) == []


@pytest.mark.parametrize("name", BROKEN)
def test_the_check_notices(run: Path, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    breaks, complaint = BROKEN[name]
    breaks(copy)
    problems = compare(copy, run)
    assert problems
    assert complaint in problems[0]


def steps(pid: int, first: int, end: int) -> list[dict[str, Any]]:
    """What a process notes that makes these steps, of two images each."""
    made = [{"pid": pid, "rank": 0, "step": s, "indices": [2 * s, 2 * s + 1]} for s in range(end)]
    return [{"pid": pid, "rank": 0, "started": True}, *made[first:]]


SAVED_3 = {"least": 3, "most": 3}


def test_steps_that_are_redone_are_in_order() -> None:
    whole = steps(1, 0, 6)
    assert account(whole, whole) == []
    assert account([*steps(1, 0, 5), SAVED_3, *steps(2, 3, 6)], whole) == []


@pytest.mark.parametrize(
    ("journal", "complaint"),
    [
        ([*steps(1, 0, 3), SAVED_3, *steps(2, 4, 6)], "begins with step 4"),  # one is left out
        ([*steps(1, 0, 5), SAVED_3, *steps(2, 4, 6)], "begins with step 4, saved was 3"),
        ([*steps(1, 0, 5), SAVED_3, *steps(2, 1, 6)], "begins with step 1, saved was 3"),
        (steps(1, 0, 5), "has made 5 of 6 steps"),
        ([*steps(1, 0, 4), *steps(1, 3, 6)[1:]], "step 3 has images"),  # twice in one process
        ([*steps(1, 0, 5), {"pid": 1, "rank": 0, "step": 5, "indices": [0, 1]}], "step 5 has"),
    ],
)
def test_steps_that_are_not_are_noticed(journal: list[dict[str, Any]], complaint: str) -> None:
    assert any(complaint in problem for problem in account(journal, steps(1, 0, 6)))


def test_an_image_that_comes_twice_in_an_epoch_is_noticed() -> None:
    assert whole_epochs(steps(1, 0, 6), steps=3, images=6) == []
    twice = [*steps(1, 0, 5), {"pid": 1, "rank": 0, "step": 5, "indices": [6, 11]}]
    assert whole_epochs(twice, steps=3, images=6) == ["epoch 1: 6 images, 5 different ones"]
