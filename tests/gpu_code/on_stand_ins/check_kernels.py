"""The loss kernels on a stand-in GPU: launched by the driver, run by the PTX emulator."""

from __future__ import annotations

from collections.abc import Callable

import nullgpu_client as gpu
import pytest
import torch
from training import run, weights

from fastaug.config import TrainConfig

STAND_INS = {"devices": 2, "functional": True}
Tiny = Callable[..., TrainConfig]


@pytest.mark.parametrize("kernel", ["cuda", "triton"])
def test_a_kernel_is_admitted_and_trains(tiny: Tiny, kernel: str) -> None:
    config = tiny(max_steps=2, batch_size=8)
    on_gpu = weights(run(config.replace(device="cuda", kernel=kernel), "-gpu"))
    on_cpu = weights(run(config.replace(device="cpu", kernel="reference"), "-cpu"))
    assert gpu.count("kernel", name="objective") > 0
    for name, value in on_cpu.items():
        torch.testing.assert_close(on_gpu[name], value, rtol=1e-5, atol=1e-6)
