"""Every optimizer on a stand-in GPU: the CPU's steps, also where some are skipped; no host sync."""

from __future__ import annotations

import copy

import nullgpu_client as gpu
import pytest
import torch
from learning import OPTIMIZERS, build_learner, config_of, differing, flat_state, take_step

from fastaug.engine.graphed import GraphedLearner
from fastaug.engine.learner import Learner

STAND_INS = {"devices": 1, "functional": True}
BAD = (0, 3)
"""The first step, before the optimizer has any state, and one between others."""
KINDS = ("sgd", "adamw", "adafactor", "lamb", "muon")
"""Fused; with counters in tensors, in numbers, in groups."""


def train(learner: Learner, steps: int = 6, bad: tuple[int, ...] = BAD) -> list[bool]:
    skipped = [take_step(learner, step, bad=step in bad) for step in range(steps)]
    return [bool(skip) for skip in skipped]


def assert_close(ours: Learner, theirs: Learner) -> None:
    found, expected = flat_state(ours), flat_state(theirs)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[path], value, rtol=1e-4, atol=1e-6, msg=path)


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [*((name, "fp32") for name in OPTIMIZERS), *((name, "fp16") for name in KINDS)],
)
def test_steps_are_those_of_the_cpu(optimizer: str, precision: str) -> None:
    config = config_of(optimizer, precision=precision, head_lr=0.01, layer_decay=0.7)
    on_gpu, on_cpu = build_learner(config, "cuda"), build_learner(config, "cpu")
    expected = [step in BAD for step in range(6)]
    assert train(on_gpu) == train(on_cpu) == expected
    if optimizer == "radam":  # torch computes many tensors at once on a GPU only
        assert_close(on_gpu, on_cpu)
    else:
        assert differing(flat_state(on_gpu), flat_state(on_cpu)) == []
    gpu.assert_no_errors()


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [
        *((name, {}) for name in OPTIMIZERS),
        *((name, {"precision": "fp16", "agc": 0.01}) for name in KINDS),
        ("sgd", {"clip_norm": 0.01, "head_lr": 0.1}),
        ("adamw", {"clip_value": 0.01, "layer_decay": 0.5}),
        ("lamb", {"freeze": ("stem",), "ema": 0.9}),
    ],
    ids=str,
)
def test_a_step_never_waits(optimizer: str, changes: dict) -> None:
    learner = build_learner(config_of(optimizer, **changes), "cuda")
    train(learner, 2, ())
    update = learner.update

    def marked(rate: float) -> torch.Tensor:
        with gpu.marked("update"):
            return update(rate)

    learner.update = marked  # type: ignore[method-assign]
    before = len(gpu.records())
    train(learner, 5, (3,))
    records = gpu.records()[before:]
    assert len(gpu.selected("mark", name="/update", of=records)) == 5
    assert gpu.syncs(between=("update", "/update"), implicit=True, of=records) == []


@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize(("first", "second"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_a_state_continues_on_any_device(optimizer: str, first: str, second: str) -> None:
    """Also if it is read when the host does not know yet that the last step was skipped."""
    whole = build_learner(config_of(optimizer))
    train(whole, 6, (3,))
    stopped, resumed = (
        build_learner(config_of(optimizer), first),
        build_learner(whole.config, second),
    )
    train(stopped, 4, (3,))
    resumed.load_state_dict(copy.deepcopy(stopped.state_dict()))
    for step in (4, 5):
        take_step(resumed, step)
    assert differing(flat_state(resumed), flat_state(whole)) == []


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_replayed_steps_equal_ordinary_ones(optimizer: str) -> None:
    config = config_of(optimizer, layer_decay=0.5)
    learners = []
    for kind in (Learner, GraphedLearner):
        torch.manual_seed(0)
        learners.append(kind(config, 3, torch.device("cuda")))
        learners[-1].model.train()
        assert train(learners[-1], 7, (1, 5)) == [step in (1, 5) for step in range(7)]
    assert_close(*learners)  # the rate is a float there, and a tensor of fp32 here
    gpu.assert_no_errors()
