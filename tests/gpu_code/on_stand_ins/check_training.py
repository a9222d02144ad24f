"""Training on a stand-in GPU ends with the weights of the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training import assert_same_weights, run

from fastaug.config import TrainConfig

STAND_INS = {"devices": 2, "functional": True}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_are_those_of_the_cpu(tiny: Callable[..., TrainConfig], precision: str) -> None:
    config = tiny(precision=precision, ema=0.9, max_steps=6, kernel="reference")
    on_gpu = run(config.replace(device="cuda"), "-gpu")
    assert_same_weights(on_gpu, run(config.replace(device="cpu"), "-cpu"))
