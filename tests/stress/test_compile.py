"""torch.compile with its default compiler, inductor, which takes some 10 s for each program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from stand_ins import ROOT, run_checks
from torch import Tensor, nn
from training import metrics, run

import fastaug
from fastaug.config import TrainConfig


@pytest.mark.parametrize("soft", [False, True])
def test_a_compiled_objective(soft: bool) -> None:
    torch.manual_seed(0)
    linear, x, y = nn.Linear(10, 7), torch.randn(12, 10), torch.tensor([0, 6, 3])
    if soft:
        y = torch.rand(3, 7, dtype=torch.float16)

    def step(x: Tensor) -> Tensor:
        return fastaug.objective(linear(x).unflatten(0, (-1, 4)), y).loss

    torch.compiler.reset()
    loss = torch.compile(step, fullgraph=True)(x)
    (grad,) = torch.autograd.grad(loss, linear.weight)
    torch.testing.assert_close(loss, step(x))
    torch.testing.assert_close(grad, torch.autograd.grad(step(x), linear.weight)[0])


def test_a_compiled_training_has_the_loss_of_a_plain_one(
    tiny: Callable[..., TrainConfig],
) -> None:
    plain = metrics(run(tiny(max_steps=2, tta=0), "1"))
    compiled = metrics(run(tiny(max_steps=2, tta=0, compile="default"), "2"))
    assert compiled[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-4)


def test_its_modes_on_a_stand_in_gpu(tmp_path: Path) -> None:
    done = run_checks(ROOT / "tests/gpu_code/on_stand_ins/slow_compile_modes.py", tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
