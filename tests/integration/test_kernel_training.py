"""Kernels through the command line: one's own, a wrong one, and that all train alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastaug

ROOT = Path(__file__).parents[2]
SMALL = (
    "--model wrn-10-1 --size 16 --views 2 --batch-size 16 --epochs 2 --workers 0 --tta 2 --lr 0.05 "
    "--log-every 1 --device cpu"
)


def train(folder: Path, out: Path, kernel: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "fastaug.train", *SMALL.split(), "--kernel", kernel]
    return subprocess.run(
        [*command, "--data", str(folder), "--out", str(out)],
        cwd=ROOT,  # where examples/ is found
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def losses(out: Path) -> list[float]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


@pytest.fixture(scope="module")
def curve(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The training loss of the reference kernel, step by step."""
    out = tmp_path_factory.mktemp("reference") / "run"
    done = train(folder, out, "reference")
    assert done.returncode == 0, done.stderr
    assert len(losses(out)) >= 8
    return losses(out)


@pytest.mark.parametrize(
    ("kernel", "environment"),
    [
        ("native", {}),
        ("examples.autograd_kernel:kernel", {}),
        ("triton", {"TRITON_INTERPRET": "1"}),
    ],
)
def test_all_kernels_follow_the_same_curve(
    kernel: str, environment: dict[str, str], folder: Path, tmp_path: Path, curve: list[float]
) -> None:
    done = train(folder, tmp_path / "run", kernel, **environment)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(curve, rel=1e-3)


def test_a_kernel_that_is_wrong_is_refused_with_its_worst_case(
    folder: Path, tmp_path: Path
) -> None:
    done = train(folder, tmp_path / "run", "examples.cancelling_kernel:kernel")
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("error: kernel 'cancelling' on cpu: refused, 29 cases; kl off by")
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_examples_are_short_and_judged_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    assert fastaug.check_kernel("examples.autograd_kernel:kernel").admitted
    assert not fastaug.check_kernel("examples.cancelling_kernel:kernel").admitted
