"""Kernels through the command line: built-in, one's own and a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
from expect import missing
from training import metrics

import fastaug
from fastaug import cli, train

ROOT = Path(__file__).parents[2]
SMALL = (
    "--model wrn-10-1 --size 16 --views 2 --batch-size 16 --epochs 2 --workers 0 --tta 2 --lr 0.05 "
    "--log-every 1 --device cpu"
)


@pytest.fixture(autouse=True)
def where_examples_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


def code_and_losses(folder: Path, out: Path, kernel: str) -> tuple[int, list[float]]:
    """The exit code of a training, and its loss step by step."""
    flags = [*SMALL.split(), "--kernel", kernel, "--data", str(folder), "--out", str(out)]
    code = cli.run(train.main, flags)
    found = metrics(out, "train") if (out / "metrics.jsonl").exists() else []
    return code, [record["loss"] for record in found]


def test_all_kernels_follow_the_same_curve(folder: Path, tmp_path: Path) -> None:
    code, expected = code_and_losses(folder, tmp_path / "reference", "reference")
    assert (code, len(expected)) == (0, 8)
    for kernel in ("native", "examples.autograd_kernel:kernel"):
        code, losses = code_and_losses(folder, tmp_path / kernel, kernel)
        assert code == 0
        assert losses == pytest.approx(expected, rel=1e-3)


def test_a_kernel_that_is_wrong_is_refused_with_its_worst_case(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    kernel = "examples.cancelling_kernel:kernel"
    assert code_and_losses(folder, tmp_path / "run", kernel) == (2, [])
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert missing(message, "error: cancelling cpu kl float32") == []


def test_the_examples_are_judged_as_they_say() -> None:
    assert fastaug.check_kernel("examples.autograd_kernel:kernel").admitted
    assert not fastaug.check_kernel("examples.cancelling_kernel:kernel").admitted
