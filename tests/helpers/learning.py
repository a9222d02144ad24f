"""Steps of a learner on random views, without data, and its state to compare."""

from __future__ import annotations

import math
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from fastaug.config import TrainConfig
from fastaug.engine.config import OptimConfig
from fastaug.engine.learner import Learner
from fastaug.runtime.distributed import Group
from fastaug.views.batch import ViewBatch

OPTIMIZERS = [n for n in get_args(get_type_hints(OptimConfig)["optimizer"]) if n != "apex"]
"""All that --optimizer offers and this machine can run."""
RATES = {"sgd": 0.05, "sgdw": 0.05, "lars": 0.5}
CLASSES, IMAGES = 3, 4


def config_of(optimizer: str, **changes: object) -> TrainConfig:
    settings: dict[str, Any] = {
        "model": "wrn-10-1",
        "size": 8,
        "views": 2,
        "batch_size": 2 * IMAGES,
        "kernel": "reference",
        "optimizer": optimizer,
        "weight_decay": 0.05,
    }
    return TrainConfig.from_flat(**(settings | changes))


def build_learner(
    config: TrainConfig, device: str = "cpu", group: Group | None = None, seed: int = 0
) -> Learner:
    torch.manual_seed(seed)
    learner = Learner(config, CLASSES, torch.device(device), group)
    with torch.no_grad():
        for name, parameter in learner.model.named_parameters():
            if name.endswith("skip_gain"):  # else the branches have no gradient
                parameter.fill_(0.5)
    if learner.scaler.is_enabled():  # a scale at which no good step overflows
        learner.scaler = torch.amp.GradScaler(device, init_scale=256.0)
    learner.model.train()
    return learner


def take_step(learner: Learner, step: int, *, bad: bool = False) -> Tensor:
    """One step on views that depend on the step only; a bad one has a NaN on the last rank.
    Returns True if it was skipped."""
    config = learner.config
    size, views = config.view.size, config.view.views
    random = torch.Generator().manual_seed(step)
    images = torch.randn(IMAGES, views, size, size, 3, generator=random).permute(0, 1, 4, 2, 3)
    labels = torch.randint(CLASSES, (IMAGES,), generator=random)
    if bad:
        images[-1, -1, 0, 0, 0] = math.nan
    parts, group = config.optim.accumulate, learner.group
    share = IMAGES // (parts * group.ranks)
    learner.start_step(step)
    for part in range(parts):
        own = slice((part * group.ranks + group.rank) * share, None)
        batch = ViewBatch(images[own][:share], labels[own][:share], labels[own][:share])
        learner.backward(batch.to(learner.device), 1 / parts, last=part == parts - 1)
    rate = RATES.get(config.optim.optimizer, 0.01)
    return learner.update(rate * (1 + step % 3))


def weights_of(learner: Learner) -> Tensor:
    """-> [N]: all parameters."""
    return torch.cat([p.detach().cpu().flatten() for p in learner.model.parameters()])


def flat_state(learner: Learner) -> dict[str, Any]:
    """Everything that a step may change, but for the rate, by its path in state_dict()."""
    found: dict[str, Any] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, own in value.items():
                add(f"{path}/{key}", own)
        elif isinstance(value, (list, tuple)):
            for place, own in enumerate(value):
                add(f"{path}/{place}", own)
        elif not path.endswith(("/lr", "/capturable")):
            found[path] = value.detach().cpu().clone() if isinstance(value, Tensor) else value

    add("", learner.state_dict())
    return found


def differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Paths of what is not the same, bit for bit."""

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        return one == other

    paths = sorted(ours.keys() | theirs.keys())
    missing = object()
    return [p for p in paths if not same(ours.get(p, missing), theirs.get(p, missing))]
