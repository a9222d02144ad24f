"""The DALI loader on a GPU, for those who have one: pytest -m gpu."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kept_batches import check_that_kept_batches_stay

import fastaug
from fastaug.config import TrainConfig
from fastaug.engine.trainer import Trainer

pytestmark = pytest.mark.gpu
Tiny = Callable[..., TrainConfig]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"crop": "pad", "size": 20},
        {"views_dtype": "fp16", "precision": "fp16"},
        {"augment": "randaugment", "randaugment_magnitude": 7.0},
        {"augment": "randaugment", "randaugment_policy": "dali"},
        {"views_engine": "fused"},
        {"views_engine": "dali"},
    ],
    ids=str,
)
def test_the_views_are_those_of_the_cpu(tiny: Tiny, changes: dict) -> None:
    config = tiny(loader="dali", **changes)
    on_gpu = list(fastaug.build_loader(config.replace(device="cuda")))
    on_cpu = list(fastaug.build_loader(config.replace(device="cpu")))
    differing = []
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert ours.views.is_cuda
        assert ours.flat.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(ours.indices, theirs.indices)
        differing.append(
            (ours.views.float().cpu() - theirs.views.float()).abs().flatten(2).mean(-1)
        )
    # A level is 0.017. nvJPEG rounds otherwise than libjpeg, and a posterized level goes far.
    limit = 0.15 if config.view.augment == "randaugment" else 0.03
    assert torch.cat(differing).median() < limit


def test_batches_that_are_kept_stay_as_they_were(tiny: Tiny) -> None:
    check_that_kept_batches_stay(tiny(loader="dali", device="cuda"))


def test_a_stopped_run_ends_as_a_whole_one(tiny: Tiny) -> None:
    config = tiny(loader="dali", device="cuda", augment="randaugment", precision="bf16")
    whole = config.replace(out=f"{config.run.out}-whole")
    Trainer(whole).fit()
    Trainer(config.replace(max_steps=5)).fit()
    Trainer(config, Path(config.run.out) / "last.pt").fit()
    ours, theirs = (torch.load(Path(c.run.out) / "last.pt")["model"] for c in (config, whole))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)
