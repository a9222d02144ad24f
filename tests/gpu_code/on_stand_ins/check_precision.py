"""--precision on a GPU: which arithmetic cuBLAS and cuDNN are asked for, forward and backward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nullgpu_client as gpu
import pytest
import torch
from torch import nn
from training import tiny_config

from fastaug.config import TrainConfig
from fastaug.engine.learner import Learner
from fastaug.engine.metrics import Predictions, metrics_for
from fastaug.engine.trainer import Trainer
from fastaug.models.head import Fp32Linear
from fastaug.runtime.arithmetic import set_arithmetic
from fastaug.views.batch import ViewBatch

STAND_INS = {"devices": 1}
HEAD = ("Fp32Linear.forward", "/Fp32Linear.forward")


def views_on(device: torch.device, size: int = 16) -> ViewBatch:
    views = torch.zeros(2, 2, size, size, 3, device=device).permute(0, 1, 4, 2, 3)
    return ViewBatch(views, torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(2))


def arithmetic_of_step(learner: Learner) -> dict[str, list[str]]:
    """What matrix products of a step are computed in: the head's, all others', and convolutions."""
    convolutions: list[str] = []

    def note(*_: object) -> None:
        convolutions.append(torch.backends.cudnn.conv.fp32_precision)

    for module in learner.model.modules():
        if isinstance(module, nn.Conv2d):
            for register in (module.register_forward_hook, module.weight.register_hook):
                register(note)
    learner.start_step(0)
    gpu.mark("step")
    learner.backward(views_on(learner.device))
    gpu.mark("/step")
    modes = [r.name for r in gpu.selected("math_mode", between=("step", "/step"))]
    head = [r.name for r in gpu.selected("math_mode", between=HEAD)]
    return {"all": modes, "head": head, "convolutions": convolutions}


def observe(folder: str, out: str, precision: str) -> dict[str, list[str]]:
    gpu.mark_calls(Fp32Linear, "forward")
    changes = {"precision": precision, "device": "cuda", "kernel": "reference"}
    config = tiny_config(Path(folder), Path(out), **changes)
    return arithmetic_of_step(Trainer(config).learner)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_only_tf32_is_tf32(folder: Path, tmp_path: Path, precision: str) -> None:
    """In a process of its own: torch reads the variable of NVIDIA's images when it is imported."""
    arguments = str(folder), str(tmp_path), precision
    code = f"import json, check_precision as c; print(json.dumps(c.observe(*{arguments})))"
    paths = [str(Path(__file__).parent), *sys.path]
    env = {"PYTHONPATH": os.pathsep.join(paths), "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert set(seen["convolutions"]) == {"tf32" if precision == "tf32" else "ieee"}
    assert seen["head"] == ["fp32"]
    # The head's product and its two gradients; without cuDNN, convolutions are products, too.
    assert seen["all"].count("fp32") == (3 if precision == "tf32" else len(seen["all"]))
    assert len(seen["all"]) > 20


@pytest.fixture
def restored() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize("model", ["resnet18", "nf_resnet26"])
@pytest.mark.usefixtures("restored")
def test_every_operator_of_a_step_has_a_deterministic_form(
    tiny: Callable[..., TrainConfig], model: str
) -> None:
    """torch raises where there is none; and if cuBLAS may choose its workspace."""
    config = tiny(model=model, size=32, kernel="reference", ema=0.9, clip_norm=1.0)
    set_arithmetic(torch.device("cuda"), "fp32", deterministic=True)
    learner = Learner(config, 3, torch.device("cuda"))
    learner.start_step(0)
    learner.backward(views_on(learner.device, 32))
    learner.update(0.1)
    logits, labels = torch.zeros(2, 2, 3, device="cuda"), torch.zeros(2, device="cuda").long()
    for metric in metrics_for(2):
        metric.compute(Predictions(logits, labels, learner.kernel))
    assert not torch.backends.cudnn.benchmark


def test_the_head_is_fp32_whatever_torch_is_told() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        head, layer = Fp32Linear(8, 5).cuda(), nn.Linear(8, 8).cuda()
        with gpu.marked("plain"):
            layer(torch.zeros(4, 8, device="cuda")).sum().backward()
        with gpu.marked("head"):
            head(torch.zeros(4, 8, device="cuda", requires_grad=True)).sum().backward()
        after = torch.backends.cuda.matmul.fp32_precision
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert [r.name for r in gpu.selected("math_mode", between=("head", "/head"))] == ["fp32"] * 3
    assert {r.name for r in gpu.selected("math_mode", between=("plain", "/plain"))} == {"tf32"}
    assert after == "tf32"
