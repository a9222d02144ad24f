"""The predicted cost of the paper's experiments, against sums by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fastaug import cli

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import hardware
import paper_cost

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


def cells(capsys: Capture) -> list[str]:
    line = capsys.readouterr().out.strip().splitlines()[-1]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_hours_are_steps_times_seconds(monkeypatch: Patch, capsys: Capture) -> None:
    """The sweep of the weight: 6 weights, 6 rates, 5 seeds, 128 epochs of 50,000 / 4 steps."""
    seconds = {"mid": 0.01, "high": 0.005, "low": 0.02}
    monkeypatch.setattr(paper_cost, "_gpu_seconds_of_a_step", lambda key, gpu, case: seconds[case])
    args = ["--experiments", "cifar100-lambda", "--gpus", "A100"]
    assert cli.run(paper_cost.main, args) == 0
    steps = 6 * 6 * 5 * 128 * 12_500
    assert cells(capsys) == [
        "cifar100-lambda",
        "180",
        f"{steps * 64 / 1e9:,.0f} billion",
        f"{steps * 0.01 / 3600:,.0f} ({steps * 0.005 / 3600:,.0f} to {steps * 0.02 / 3600:,.0f})",
    ]
    assert cli.run(paper_cost.main, [*args, "--seeds-of-choice"]) == 0
    # One seed of all 36 points, and four more of one point for each weight.
    assert cells(capsys)[1] == str(36 + 6 * 4)


def test_a_step_costs_more_than_its_arithmetic_on_all_gpus() -> None:
    """64 views on eight GPUs are eight on each, and all eight are paid for."""
    key = ("nf_resnet26", 224, 64, 8, "bf16", "crop-flip")
    found = paper_cost._gpu_seconds_of_a_step(key, "A100", "mid")
    work = paper_cost._work("nf_resnet26", 224, 8, "bf16")
    flops = sum(op.flops for op in (*work.forward, *work.backward))
    peak = hardware.get_gpu("A100").bf16.value * hardware.ASSUMED.compute.value
    assert found > 8 * flops / peak


def test_a_wrong_name_is_one_line(capsys: Capture) -> None:
    assert cli.run(paper_cost.main, ["--experiments", "cifar100-lamda"]) == 2
    assert "did you mean cifar100-lambda" in capsys.readouterr().err
