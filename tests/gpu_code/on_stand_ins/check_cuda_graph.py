"""--cuda-graph: replayed steps are those of an ordinary run, also where steps are skipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import nullgpu_client as gpu
import pytest
import torch
from expect import raises
from training import assert_same_weights, run

from fastaug.config import TrainConfig
from fastaug.engine.graphed import WARM_UP, GraphedLearner
from fastaug.engine.learner import Learner
from fastaug.errors import ConfigError
from fastaug.kernels.objective import ObjectiveTerms
from fastaug.runtime.distributed import Group
from fastaug.views.batch import ViewBatch

STAND_INS = {"devices": 1, "functional": True}
STEPS, BAD = 7, (1, 5)
"""One of the bad steps is before the capture, the other one is replayed."""

Tiny = Callable[..., TrainConfig]


def train(
    learner: Learner, steps: int = STEPS, bad: tuple[int, ...] = BAD
) -> tuple[list[bool], list[ObjectiveTerms]]:
    """Which steps were skipped, and the terms of all parts, read when all is done."""
    parts = learner.config.optim.accumulate
    random, skipped, terms = torch.Generator().manual_seed(0), [], []
    size = learner.config.view.size
    for step in range(steps):
        mark = "replay" if step > WARM_UP else "warm up, capture"
        with gpu.marked(mark):
            learner.start_step(step)
        for part in range(parts):
            views = torch.randn(2, 2, size, size, 3, generator=random).permute(0, 1, 4, 2, 3)
            views[0] *= math.nan if step in bad else 1
            labels = torch.tensor([step % 3, 2])
            batch = ViewBatch(views, labels, labels).to(learner.device)
            with gpu.marked(mark):
                terms.append(learner.backward(batch, 1 / parts, last=part == parts - 1))
        with gpu.marked(mark):
            skipped.append(learner.update(0.01 * (step + 1)))
    return [bool(skip) for skip in skipped], terms


def state(learner: Learner) -> dict[str, Any]:
    found = learner.state_dict()
    model, ema = found["model"], found["ema"] or {}
    momentum = [own["momentum_buffer"] for own in found["optimizer"]["state"].values()]
    return {"weights": [*model.values(), *ema.values(), *momentum], "scaler": found["scaler"]}


WITH_BATCH_NORM = {"model": "timm/resnet10t", "dropout": 0.5, "ema": 0.9, "clip_norm": 1.0}


@pytest.mark.parametrize(
    "changes",
    [WITH_BATCH_NORM | {"accumulate": 2, "batch_size": 8}, {"precision": "fp16"}],
    ids=["batch norm, dropout, parts, ema", "fp16"],
)
def test_replayed_steps_equal_ordinary_ones(tiny: Tiny, changes: dict) -> None:
    config = tiny(kernel="reference", **({"batch_size": 4} | changes))
    learners = []
    for kind in (Learner, GraphedLearner):
        torch.manual_seed(0)
        learners.append(kind(config, 3, torch.device("cuda")))
        learners[-1].model.train()
    expected, actual = map(train, learners)
    assert actual[0] == expected[0] == [step in BAD for step in range(STEPS)]
    options: dict = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(actual[1], expected[1], **options)
    torch.testing.assert_close(*map(state, learners[::-1]), **options)
    gpu.assert_no_errors()


def test_a_replayed_step_is_two_launches_and_never_waits(tiny: Tiny) -> None:
    learner = GraphedLearner(tiny(kernel="reference", batch_size=4), 3, torch.device("cuda"))
    before = len(gpu.records())
    train(learner)
    records, replay = gpu.records()[before:], ("replay", "/replay")
    steps = STEPS - WARM_UP - 1
    assert gpu.count("graph", between=replay, of=records) == 2 * steps
    # The batch, the rate, and copies of what is returned.
    assert gpu.count(("op", "memcpy"), between=replay, of=records) <= 8 * steps
    assert gpu.syncs(between=replay, implicit=True, of=records) == []


def test_a_run_ends_with_the_weights_of_the_cpu(tiny: Tiny) -> None:
    config = tiny(kernel="reference", ema=0.9)
    on_gpu = run(config.replace(device="cuda", cuda_graph=True), "-gpu")
    assert_same_weights(on_gpu, run(config.replace(device="cpu"), "-cpu"))


def test_growing_views_are_captured_again(tiny: Tiny) -> None:
    """9 steps in each of two epochs: 3 to warm up, one to capture, 5 replayed."""
    config = tiny(kernel="reference", batch_size=8, initial_size=8, tta=0, eval_views=0)
    before = len(gpu.records())
    on_gpu = run(config.replace(device="cuda", cuda_graph=True), "-gpu")
    assert gpu.count("graph", of=gpu.records()[before:]) == 2 * 2 * (9 - WARM_UP)
    assert_same_weights(on_gpu, run(config.replace(device="cpu"), "-cpu"))
    gpu.assert_no_errors()


def test_what_cannot_be_captured_is_one_line(tiny: Tiny) -> None:
    class Waiting(GraphedLearner):
        def _has_nonfinite_gradient(self) -> torch.Tensor:
            assert super()._has_nonfinite_gradient().item() in (True, False)
            return super()._has_nonfinite_gradient()

    with raises(ConfigError, "--cuda-graph"):
        train(Waiting(tiny(kernel="reference", batch_size=4), 3, torch.device("cuda")))
    with raises(ConfigError, "--cuda-graph 2"):
        GraphedLearner(tiny(), 3, torch.device("cuda"), Group(0, 2))
