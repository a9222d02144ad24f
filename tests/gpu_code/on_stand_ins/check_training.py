"""Training on a stand-in GPU ends with the weights of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nullgpu_client as gpu
import pytest
import torch
from training import assert_same_weights, metrics, run

from fastaug.config import TrainConfig
from fastaug.engine import learner

STAND_INS = {"devices": 2, "functional": True}
Tiny = Callable[..., TrainConfig]


def assert_same_run(config: TrainConfig) -> Path:
    """Train on a stand-in GPU and on the CPU: losses, measures and weights are the same."""
    on_gpu = run(config.replace(device="cuda"), "-gpu")
    on_cpu = run(config.replace(device="cpu"), "-cpu")
    assert_same_weights(on_gpu, on_cpu)
    assert metrics(on_gpu) == metrics(on_cpu)
    gpu.assert_no_errors()
    return on_gpu


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16", "accumulate": 2, "clip_norm": 0.5},
        {"model": "resnet18", "ema": 0.9, "max_steps": 3},
        {"model": "nf_resnet26", "precision": "bf16", "size": 32, "max_steps": 2},
    ],
    ids=str,
)
def test_a_run_is_that_of_the_cpu(tiny: Tiny, changes: dict) -> None:
    assert_same_run(tiny(kernel="reference", **changes))


def test_fp16_skips_a_step_that_overflows(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    class LargeScale(torch.amp.GradScaler):
        def __init__(self, device: str, enabled: bool) -> None:
            super().__init__(device, init_scale=2.0**19, enabled=enabled)

    monkeypatch.setattr(learner.torch.amp, "GradScaler", LargeScale)
    folder = assert_same_run(tiny(kernel="reference", precision="fp16"))
    skipped = metrics(folder, "skipped")
    assert 0 < len(skipped) < 8
    assert all(not record["culprits"] for record in skipped)


@pytest.mark.parametrize(("first", "second"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_checkpoint_continues_on_the_other_device(tiny: Tiny, first: str, second: str) -> None:
    config = tiny(kernel="reference", ema=0.9, augment="randaugment")
    stopped = run(config.replace(device=first, max_steps=3), "-stopped")
    resumed = config.replace(device=second, out=str(stopped))
    run(resumed, checkpoint=stopped / "last.pt")
    assert_same_weights(stopped, run(config.replace(device="cpu"), "-whole"))
