"""--compile reduce-overhead: the steps of an ordinary run, by torch.compile's own CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import nullgpu_client as gpu
import pytest
import torch
from check_cuda_graph import BAD, STEPS, state, train
from torch._inductor.cudagraph_trees import reset_cudagraph_trees

from fastaug.config import TrainConfig
from fastaug.engine.learner import Learner
from fastaug.runtime.arithmetic import set_arithmetic

STAND_INS = {"devices": 1, "functional": True, "capability": 90}


@pytest.fixture(autouse=True)
def graphs_are_freed() -> Iterator[None]:
    """While Python runs: a stand-in GPU keeps the work of a graph as Python functions."""
    yield
    torch.compiler.reset()
    reset_cudagraph_trees()
    gc.collect()


def test_graphs_of_torch_compile_skip_steps_and_keep_their_terms(
    tiny: Callable[..., TrainConfig],
) -> None:
    # Inductor reads torch's older TF32 switches and its newer ones, and fails if they disagree.
    set_arithmetic(torch.device("cuda"), "tf32")
    config = tiny(kernel="reference", batch_size=4, ema=0.9, precision="tf32")
    learners = []
    for mode in ("off", "reduce-overhead"):
        torch.manual_seed(0)
        learners.append(Learner(config.replace(compile=mode), 3, torch.device("cuda")))
        learners[-1].model.train()
    (expected, expected_terms), (skipped, terms) = map(train, learners)
    assert skipped == expected == [step in BAD for step in range(STEPS)]
    options = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(terms, expected_terms, **options)
    torch.testing.assert_close(*map(state, learners[::-1]), **options)
    # The first step is run, the second one captured; forward and backward are a graph each.
    assert gpu.count("graph") >= 2 * (STEPS - 2)
