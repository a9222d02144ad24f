"""The scripts in examples/, run as they are on a few small images.

The oracle of each loss is the literal formula in float64, with the views of an image picked row by
row; that of the training is a data set whose colors tell the class.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from literal import literal_kl, literal_nll
from torch import Tensor

import fastaug

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = ("plain_torch", "lightning_module", "accelerate_loop", "hf_trainer", "timm_training")


class Step:
    """One call of MultiViewLoss."""

    def __init__(
        self, module: fastaug.MultiViewLoss, logits: Tensor, targets: Tensor, loss: float
    ) -> None:
        self.targets, self.loss = targets, loss
        views, images = module.views, len(logits) // module.views
        numbers = [
            [b * views + k if module.order == "images" else k * images + b for k in range(views)]
            for b in range(images)
        ]
        self.logits = logits.detach().double()[torch.tensor(numbers)]  # [B, K, C]

    def expected(self) -> float:
        nll = literal_nll(self.logits, self.targets, "losses", 0.0)
        return (nll + literal_kl(self.logits)).mean().item()

    def accuracy(self) -> float:
        return (self.logits.argmax(-1) == self.targets[:, None]).double().mean().item()


Run = Callable[..., tuple[float, list[Step]]]


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """main() of an example on the color folders: the accuracy that it returns, and its steps."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    steps: list[Step] = []
    terms = fastaug.MultiViewLoss.terms

    def recorded(
        self: fastaug.MultiViewLoss, logits: Tensor, targets: Tensor
    ) -> fastaug.ObjectiveTerms:
        found = terms(self, logits, targets)
        if found.loss.requires_grad:  # not those of an evaluation
            steps.append(Step(self, logits, targets, found.loss.item()))
        return found

    monkeypatch.setattr(fastaug.MultiViewLoss, "terms", recorded)

    def run_example(name: str, *args: str) -> tuple[float, list[Step]]:
        torch.manual_seed(0)
        accuracy = importlib.import_module(name).main(["--data", str(folder), *args])
        return accuracy, steps

    yield run_example
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def check(accuracy: float, steps: list[Step], *, count: int, images: int, views: int) -> None:
    assert len(steps) == count
    for step in steps:
        assert step.logits.shape == (images, views, 3)
        assert step.loss == pytest.approx(step.expected(), rel=1e-4, abs=1e-6)
    losses = [step.loss for step in steps]
    assert sum(losses[-3:]) / 3 < losses[0] / 2
    # Each row of logits belongs to the target that it was paired with; chance is 1/3.
    assert sum(step.accuracy() for step in steps[-3:]) / 3 > 0.8
    assert accuracy > 0.8


@pytest.mark.parametrize("precision", [(), ("--bf16",)], ids=["fp32", "bf16"])
def test_plain_torch(run: Run, precision: tuple[str, ...]) -> None:
    found = run("plain_torch", "--images", "12", "--epochs", "4", *precision)
    check(*found, count=12, images=12, views=4)


def test_the_views_of_an_epoch_in_workers_are_those_of_a_plan(folder: Path, run: Run) -> None:
    """The first batch of the third epoch, in worker processes and in this one."""
    example = importlib.import_module("plain_torch")
    images = example.Photos(str(folder / "train"))
    collate = example.CollateViews(views=3, size=16, augment="randaugment")
    loader = torch.utils.data.DataLoader(images, 4, num_workers=1, collate_fn=collate)
    collate.epoch = 2
    views, labels = next(iter(loader))
    pixels = [images[index][1] for index in range(4)]
    plan = fastaug.plan_views(pixels, views=3, size=16, augment="randaugment", epoch=2)
    assert torch.equal(views, fastaug.make_views(pixels, plan).flatten(0, 1))
    assert labels.tolist() == [0, 0, 0, 0]


def test_lightning_module(run: Run) -> None:
    found = run("lightning_module", "--batch-size", "48", "--epochs", "4")
    check(*found, count=12, images=12, views=4)


def test_accelerate_loop(run: Run) -> None:
    found = run("accelerate_loop", "--batch-size", "48", "--epochs", "4")
    check(*found, count=12, images=12, views=4)


def test_hf_trainer(run: Run) -> None:
    found = run("hf_trainer", "--images", "12", "--epochs", "4")
    check(*found, count=12, images=12, views=4)


def test_timm_training(run: Run) -> None:
    found = run("timm_training", "--images", "12", "--epochs", "10", "--size", "32")
    check(*found, count=30, images=12, views=3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_page_shows_parts_of_the_script(name: str) -> None:
    page = (ROOT / "docs/guide/integration.md").read_text()
    source = (EXAMPLES / f"{name}.py").read_text()
    shown = re.findall(rf"```python\n# examples/{name}\.py\n(.*?)```", page, re.DOTALL)
    assert shown
    for block in shown:
        assert any(textwrap.indent(block, " " * width) in source for width in (0, 4, 8)), block
