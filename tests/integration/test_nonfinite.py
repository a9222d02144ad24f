"""Steps with a non-finite loss or gradient change nothing, and are reported."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expect import missing, raises
from image_sets import open_data
from ranks import run_ranks
from torch import Tensor
from training import metrics

from fastaug.config import TrainConfig
from fastaug.engine import learner, trainer
from fastaug.engine.learner import Learner
from fastaug.engine.loaders import build_loader
from fastaug.engine.trainer import Trainer
from fastaug.errors import DataError, NonFiniteError
from fastaug.kernels.contract import Kernel
from fastaug.kernels.objective import ObjectiveTerms
from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runtime.distributed import Group
from fastaug.views.batch import ViewBatch

Tiny = Callable[..., TrainConfig]


class Poisoned:
    """A loader in whose first epoch the views of some images are NaN."""

    def __init__(self, loader: Any, images: set[int]) -> None:
        self.loader, self.poisonous = loader, torch.tensor(sorted(images))

    def __iter__(self) -> Iterator[ViewBatch]:
        is_first = self.loader.epoch == 0
        for batch in self.loader:
            hit = torch.isin(batch.indices, self.poisonous)
            if hit.any() and is_first:
                batch.views[hit] = math.nan
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def make_views(self, epoch: int, indices: np.ndarray) -> Tensor:
        views = self.loader.make_views(epoch, indices)
        if epoch == 0:
            views[torch.isin(torch.from_numpy(indices), self.poisonous)] = math.nan
        return views

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def poison(monkeypatch: pytest.MonkeyPatch | None, images: set[int]) -> None:
    def build(*args: Any, **named: Any) -> Poisoned:
        return Poisoned(build_loader(*args, **named), images)

    if monkeypatch is None:  # in a process of its own
        trainer.build_loader = build
    else:
        monkeypatch.setattr(trainer, "build_loader", build)


def images_of(config: TrainConfig, *steps: int) -> list[list[int]]:
    """What the steps of the first epoch train on."""
    per_part = config.optim.accumulate
    keys = list(build_loader(config).batches())
    return [
        [int(i) for key in keys[step * per_part : (step + 1) * per_part] for i in key.indices]
        for step in steps
    ]


def leave_out(monkeypatch: pytest.MonkeyPatch, left_out: set[int]) -> None:
    """The oracle: these steps compute nothing and change nothing."""
    backward, update, started = Learner.backward, Learner.update, []

    def start(self: Learner, step: int) -> None:
        started.append(step)

    def no_backward(self: Learner, batch: ViewBatch, *args: Any, **named: Any) -> ObjectiveTerms:
        if started[-1] not in left_out:
            return backward(self, batch, *args, **named)
        nothing = torch.zeros(len(batch.labels))
        return ObjectiveTerms(torch.tensor(math.nan), nothing, nothing)

    def no_update(self: Learner, rate: float) -> Tensor:
        return torch.tensor(False) if started[-1] in left_out else update(self, rate)

    monkeypatch.setattr(Learner, "start_step", start)
    monkeypatch.setattr(Learner, "backward", no_backward)
    monkeypatch.setattr(Learner, "update", no_update)


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (0, {}),
        (0, {"ema": 0.9, "accumulate": 2}),
        (2, {"ema": 0.9, "accumulate": 2}),
        (2, {"model": "resnet18", "max_steps": 4, "lr": 0.01}),
    ],
    ids=["plain", "ema-parts-first", "ema-parts", "batch-norm"],
)
def test_a_bad_step_is_as_if_it_had_not_been(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, step: int, changes: dict
) -> None:
    config = tiny(**changes)
    (batch,) = images_of(config, step)
    with monkeypatch.context() as patch:
        poison(patch, {batch[1]})
        Trainer(config).fit()
    without = config.replace(out=f"{config.run.out}-without")
    with monkeypatch.context() as patch:
        leave_out(patch, {step})
        Trainer(without).fit()
    ours, theirs = (load_checkpoint(Path(c.run.out) / "last.pt") for c in (config, without))
    for part in ("model", "ema", "optimizer"):
        torch.testing.assert_close(ours[part], theirs[part], rtol=0, atol=0)

    (skipped,) = metrics(Path(config.run.out), "skipped")
    # Through batch norm one NaN image makes its whole batch NaN.
    culprits = batch if config.model.model == "resnet18" else [batch[1]]
    assert (skipped["step"], sorted(skipped["culprits"])) == (step + 1, sorted(culprits))
    assert sorted(skipped["images"]) == sorted(batch)
    assert [r["skipped_steps"] for r in metrics(Path(config.run.out), "train")][-1] == 1
    losses = [r["loss"] for r in metrics(Path(config.run.out), "train")]
    assert all(math.isfinite(loss) for loss in losses)


def test_a_bad_loss_with_a_good_gradient_is_bad(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def infinite(
        _kernel: Kernel, logits: Tensor, labels: Tensor, **_settings: Any
    ) -> ObjectiveTerms:
        terms = logits.sum((1, 2))
        return ObjectiveTerms(terms.mean() + math.inf, terms.detach(), terms.detach())

    one = Learner(tiny(), 3, torch.device("cpu"))
    before = [parameter.clone() for parameter in one.model.parameters()]
    batch = ViewBatch(torch.randn(4, 2, 3, 16, 16), torch.zeros(4, dtype=torch.int64), None)
    monkeypatch.setattr(learner, "loss_terms", infinite)
    one.backward(batch)
    assert bool(one.update(0.1)) is True
    torch.testing.assert_close(list(one.model.parameters()), before, rtol=0, atol=0)


def test_the_scale_of_fp16_backs_off(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(precision="fp16")
    first, second = images_of(config, 1, 2)
    poison(monkeypatch, {first[0], second[0]})
    Trainer(config).fit()
    state = load_checkpoint(Path(config.run.out) / "last.pt")
    assert state["scaler"]["scale"] == 65536 / 4
    assert [r["fp16_scale"] for r in metrics(Path(config.run.out), "skipped")] == [32768, 16384]


@pytest.mark.parametrize("bad", [(1, 2), (0, 2, 3)], ids=["within", "at its end"])
def test_too_many_in_a_row(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...]
) -> None:
    """Noticed within an epoch of four steps, or when it ends."""
    config = tiny(max_bad_steps=2, epochs=3)
    batches = images_of(config, *bad)
    loader = build_loader(config)
    seen = {int(i): views for b in loader for i, views in zip(b.indices, b.views, strict=True)}
    number, first = bad[-2] + 1, batches[-2]
    with monkeypatch.context() as patch:
        poison(patch, {batch[5] for batch in batches})
        with raises(NonFiniteError, f"2 {number}") as raised:
            Trainer(config).fit()
    out = Path(config.run.out)
    image = open_data(config.data.data, "train").where(first[5])
    assert missing(str(raised.value), f"{first[5]} {image} {out}/bad-batch.pt") == []
    kept = torch.load(out / "bad-batch.pt", weights_only=True)
    assert kept["step"] == number
    assert sorted(kept["images"].tolist()) == sorted(first)
    assert kept["images"][0] == first[5] == kept["culprits"].item()
    assert kept["views"][0].isnan().all()
    for image, views in zip(kept["images"][1:], kept["views"][1:], strict=True):
        assert torch.equal(views, seen[int(image)])
    assert kept["nll"].shape == kept["labels"].shape == (8,)
    assert load_checkpoint(out / "last.pt")["step"] == bad[-1] + 1
    # Resumed where the images are sound, it is as if those steps had not been.
    Trainer(config, out / "last.pt").fit()
    without = config.replace(out=f"{config.run.out}-without")
    with monkeypatch.context() as patch:
        leave_out(patch, set(bad))
        Trainer(without).fit()
    ours, theirs = (load_checkpoint(Path(c.run.out) / "last.pt") for c in (config, without))
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=0, atol=0)
    assert (ours["skipped_steps"], theirs["skipped_steps"]) == (len(bad), 0)


def test_views_that_cannot_be_made_again_do_not_hide_the_error(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(max_bad_steps=1)
    (batch,) = images_of(config, 1)
    poison(monkeypatch, {batch[0]})

    def fail(*_: Any) -> Tensor:
        raise DataError("the disk is gone")

    monkeypatch.setattr(Poisoned, "make_views", fail)
    with raises(NonFiniteError, "1 2"):
        Trainer(config).fit()
    kept = torch.load(Path(config.run.out) / "bad-batch.pt", weights_only=True)
    assert "views" not in kept
    assert sorted(kept["images"].tolist()) == sorted(batch)


@pytest.mark.parametrize("loader", ["torch", "dali"])
def test_parts_of_a_step_do_not_keep_their_views(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, loader: str
) -> None:
    """Alive when a part begins: its own views, and at most those of the part before."""
    backward, refs, alive = Learner.backward, [], []

    def count(self: Learner, batch: ViewBatch, *args: Any, **named: Any) -> ObjectiveTerms:
        refs.append(weakref.ref(batch.views))
        alive.append(sum(ref() is not None for ref in refs))
        return backward(self, batch, *args, **named)

    monkeypatch.setattr(Learner, "backward", count)
    Trainer(tiny(loader=loader, accumulate=8, epochs=1, tta=0)).fit()
    assert len(alive) == 4 * 8
    assert max(alive) <= 2


def _train_poisoned(group: Group, config: TrainConfig, images: set[int]) -> None:
    poison(None, images)
    Trainer(config, None, group).fit()


def test_one_rank_s_bad_image_skips_the_step_of_all(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(kernel="reference")
    (batch,) = images_of(config, 2)
    run_ranks(2, _train_poisoned, config, {batch[-1]})  # the second rank's
    (skipped,) = metrics(Path(config.run.out), "skipped")
    assert (skipped["culprits"], sorted(skipped["images"])) == ([batch[-1]], sorted(batch))
    one = config.replace(out=f"{config.run.out}-one")
    poison(monkeypatch, {batch[-1]})
    Trainer(one).fit()
    ours, theirs = (load_checkpoint(Path(c.run.out) / "last.pt") for c in (config, one))
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=1e-4, atol=2e-5)
