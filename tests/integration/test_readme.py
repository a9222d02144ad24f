"""The README: its Python examples run, and it stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fastaug

README = Path(__file__).parents[2] / "README.md"


def example(heading: str) -> str:
    section = README.read_text().partition(f"## {heading}\n")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found, heading
    return found[1]


def test_fine_tuning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = example("Fine-tune a timm model")
    # A small network of the same family on small views; weights cannot be downloaded in a test.
    replaced = {
        "DIR": str(folder),
        "resnet50": "test_resnet",
        "pretrained=True": "pretrained=False",
    }
    replaced |= {"size=224": "size=32", "batch_size=64": "batch_size=16", "range(5)": "range(12)"}
    replaced |= {"lr=1e-4": "lr=1e-2"}
    for theirs, ours in replaced.items():
        assert theirs in code, theirs
        code = code.replace(theirs, ours)
    torch.manual_seed(0)
    names: dict = {}
    exec(code, names)
    batch, model = names["batch"], names["model"]
    assert names["logits"].shape == (4, 4, 3)  # images, views, classes
    assert (model.eval()(batch.flat).argmax(1) == batch.labels.repeat_interleave(4)).all()


def test_the_loss_in_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(5)
    views = torch.randn(20, 3, 2, 2, generator=generator) + labels.repeat_interleave(4).view(
        -1, 1, 1, 1
    )
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss() -> float:
        logits = model(views).unflatten(0, (5, 4))
        return fastaug.objective(logits, labels, kernel="reference").loss.item()

    before = loss()
    exec(
        example("Your own loop"),
        {"model": model, "optimizer": optimizer, "loader": [(views, labels)] * 20},
    )
    assert loss() < 0.7 * before


def test_it_is_short() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines()
    long = [line for line in prose if len(line) > 110 and not line.startswith(("|", "    "))]
    assert long == []
