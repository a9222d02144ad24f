"""What holds for every optimizer that is offered: exact resume, skipped steps, parts, ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm.optim
import torch
from expect import missing
from learning import (
    OPTIMIZERS,
    RATES,
    build_learner,
    config_of,
    differing,
    flat_state,
    take_step,
    weights_of,
)
from ranks import run_ranks
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from training import assert_same_weights, metrics, run

from fastaug.config import TrainConfig
from fastaug.engine.optim import build_optimizer
from fastaug.engine.trainer import Trainer
from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runtime.distributed import Group

Tiny = Callable[..., TrainConfig]


def relative(ours: Tensor, theirs: Tensor, start: Tensor) -> float:
    """Distance of two ends, by that from the start."""
    return float((ours - theirs).norm() / (theirs - start).norm())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_stopped_run_continues_with_the_same_bits(tiny: Tiny, optimizer: str) -> None:
    rate = RATES.get(optimizer, 0.003)
    config = tiny(optimizer=optimizer, lr=rate, epochs=1, tta=0, eval_views=0, ema=0.9)
    whole = run(config, "-whole")
    stopped = run(config.replace(max_steps=2))
    resumed = run(config, checkpoint=stopped / "last.pt")
    assert_same_weights(resumed, whole)
    assert metrics(resumed) == metrics(whole)
    ours, theirs = (load_checkpoint(f / "last.pt")["optimizer"] for f in (resumed, whole))
    assert differing_states(ours, theirs) == []


def differing_states(ours: dict, theirs: dict) -> list[Any]:
    return [
        (place, name)
        for place, own in theirs["state"].items()
        for name, value in own.items()
        if not torch.equal(*(torch.as_tensor(v) for v in (value, ours["state"][place][name])))
    ] + [n for n in theirs["param_groups"][0] if n not in ours["param_groups"][0]]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_changes_nothing(optimizer: str, precision: str) -> None:
    """Not even the first one, before the optimizer has any state."""
    config = config_of(optimizer, precision=precision, ema=0.9)
    learner, other = build_learner(config), build_learner(config)
    assert take_step(learner, 9, bad=True)
    for step in range(2):
        assert not take_step(learner, step)
    before = flat_state(learner)
    assert take_step(learner, 7, bad=True)
    changed = differing(flat_state(learner), before)
    assert [path for path in changed if "scaler" not in path] == []
    if precision == "fp32":  # the scale of fp16 is another one after a skipped step
        take_step(learner, 2)
        for step in range(3):
            take_step(other, step)
        assert differing(flat_state(learner), flat_state(other)) == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_the_formula_of_timm_or_torch(optimizer: str) -> None:
    """Neither fused nor by our groups: one parameter at a time."""
    options: dict[str, Any] = (
        {"betas": (0.8, 0.9)} if optimizer in ("adamw", "lamb", "lion") else {}
    )
    options |= {"eps": 1e-4} if optimizer in ("adamw", "rmsprop") else {}
    momenta = ("sgd", "sgdw", "lars", "muon", "rmsprop", "rmsproptf")
    theirs = options | ({"momentum": 0.7} if optimizer in momenta else {})
    theirs |= {"nesterov": False} if optimizer in ("sgd", "sgdw") else {}
    kind = timm.optim.get_optimizer_class(optimizer, bind_defaults=optimizer.startswith("rms"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 4, bias=False))
    model.head = model[1]
    config = TrainConfig.from_flat(
        optimizer=optimizer, lr=0.01, weight_decay=0.1, momentum=0.7, **options
    )
    ours = build_optimizer(model, config.optim)
    copies = {n: torch.nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
    groups = [
        {"params": [p for n, p in copies.items() if "weight" in n], "weight_decay": 0.1},
        {"params": [p for n, p in copies.items() if "bias" in n], "weight_decay": 0.0},
    ]
    reference = kind(groups, lr=0.01, **theirs)
    for step in range(3):
        torch.manual_seed(step)
        for (_, parameter), copy in zip(model.named_parameters(), copies.values(), strict=True):
            parameter.grad = torch.randn_like(parameter)
            copy.grad = parameter.grad.clone()
        ours.step()
        reference.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), copies[name].detach(), rtol=1e-4, atol=1e-6)


def test_weight_decay_of_adamw_is_decoupled() -> None:
    """Without a gradient the weights shrink by rate * decay, and vectors keep their values."""
    model = torch.nn.Sequential()
    model.head = torch.nn.Linear(3, 2)
    config = TrainConfig.from_flat(optimizer="adamw", lr=0.1, weight_decay=0.2)
    optimizer = build_optimizer(model, config.optim)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.head.weight.detach(), before["head.weight"] * (1 - 0.1 * 0.2))
    assert torch.equal(model.head.bias.detach(), before["head.bias"])


# Lion takes the sign and Muon orthogonalizes in bf16: they amplify the rounding of the sums.
TOLERANCE = {"lion": 0.1, "muon": 0.1, "adopt": 0.02}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parts_add_up_to_the_whole_step(optimizer: str) -> None:
    start = weights_of(build_learner(config_of(optimizer)))
    ends = []
    for parts in (1, 2):
        learner = build_learner(config_of(optimizer, accumulate=parts))
        for step in range(3):
            take_step(learner, step)
        ends.append(weights_of(learner))
    assert relative(ends[1], ends[0], start) < TOLERANCE.get(optimizer, 0.005)


def _train_each(group: Group) -> dict[str, tuple[np.ndarray, list[bool]]]:
    found = {}
    for optimizer in OPTIMIZERS:
        learner = build_learner(config_of(optimizer), group=group)
        skipped = [bool(take_step(learner, step, bad=step == 1)) for step in range(4)]
        found[optimizer] = weights_of(learner).numpy(), skipped
    return found


def test_two_ranks_are_one() -> None:
    """For each optimizer; the second step is bad on one of the ranks and skipped on both."""
    alone = _train_each(Group())
    first, second = run_ranks(2, _train_each)
    for optimizer in OPTIMIZERS:
        start = weights_of(build_learner(config_of(optimizer)))
        end, skipped = first[optimizer]
        assert np.array_equal(end, second[optimizer][0]), optimizer
        assert skipped == alone[optimizer][1] == [False, True, False, False], optimizer
        off = relative(*map(torch.from_numpy, (end, alone[optimizer][0])), start)
        assert off < TOLERANCE.get(optimizer, 0.005), (optimizer, off)


FROZEN = {"model": "resnet18", "freeze": ("2",), "size": 16}


def test_frozen_stages_stay_as_they_are(tiny: Tiny, capsys: pytest.CaptureFixture) -> None:
    """Weights and statistics, also of the moving average, in a run that is stopped and resumed."""
    config = tiny(**FROZEN, optimizer="adamw", lr=0.001, ema=0.9, epochs=1, tta=0)
    learner = Trainer(config).learner
    start = {name: value.clone() for name, value in learner.model.state_dict().items()}
    whole = run(config, "-whole")
    shown = capsys.readouterr().out
    trained = sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
    assert missing(shown, f"frozen: 2 stages {trained:,}") == []
    stopped = run(config.replace(max_steps=2))
    assert_same_weights(run(config, checkpoint=stopped / "last.pt"), whole)
    state = load_checkpoint(whole / "last.pt")
    kept = {n for n in start if n.startswith(("stem", "blocks.0.", "blocks.1."))}
    for values in (state["model"], {n[7:]: v for n, v in state["ema"].items() if n[7:] in start}):
        same = {name for name, value in start.items() if torch.equal(values[name], value)}
        assert same >= kept
        assert {
            "blocks.2.conv1.weight",
            "head.weight",
            "blocks.2.norm1.running_mean",
        } & same == set()
    assert len(state["optimizer"]["state"]) == len(list(learner.model.parameters())) - len(
        [n for n, _ in learner.model.named_parameters() if n in kept]
    )


def _train_frozen(group: Group, config: TrainConfig) -> tuple[np.ndarray, int]:
    """The weights after three steps, and how many numbers the ranks averaged in each."""
    learner, averaged = build_learner(config, group=group), [0]

    def count(bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        averaged[0] += bucket.buffer().numel()
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]

    if learner._ranks is not None:
        learner._ranks.register_comm_hook(None, lambda _, bucket: count(bucket))
    for step in range(3):
        take_step(learner, step)
    return weights_of(learner).numpy(), averaged[0] // 3


@pytest.mark.parametrize("freeze", [("stem", "blocks.0"), ("backbone",)])
def test_frozen_parameters_are_not_reduced_over_the_ranks(freeze: tuple[str, ...]) -> None:
    config = config_of("adamw", freeze=freeze)
    alone, _ = _train_frozen(Group(), config)
    (first, averaged), (second, _) = run_ranks(2, _train_frozen, config)
    assert np.array_equal(first, second)
    np.testing.assert_allclose(first, alone, rtol=1e-3, atol=1e-5)
    learner = build_learner(config)
    assert learner.frozen is not None
    assert averaged == learner.frozen.trained
    start = weights_of(learner).numpy()
    assert (first != start).sum() <= learner.frozen.trained


def test_every_group_has_its_rate_in_every_step() -> None:
    learner = build_learner(config_of("adamw", lr=0.1, head_lr=0.4, layer_decay=0.5))
    take_step(learner, 1)  # at 0.02
    blocks = len(learner.model.blocks)
    by_id = {id(p): g["lr"] for g in learner.optimizer.param_groups for p in g["params"]}
    rates = {n: by_id[id(p)] for n, p in learner.model.named_parameters()}
    assert rates["head.weight"] == pytest.approx(0.02 * 4)
    assert rates[f"blocks.{blocks - 1}.conv1.weight"] == pytest.approx(0.02 * 0.5)
    assert rates["stem.bias"] == pytest.approx(0.02 * 0.5 ** (blocks + 1))
