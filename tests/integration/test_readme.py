"""The README: its Python examples run, and it stays short."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = Path(__file__).parents[2] / "README.md"


def example(heading: str) -> str:
    section = README.read_text().partition(f"## {heading}\n")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found, heading
    return found[1]


def test_your_own_loop(folder: Path) -> None:
    code = example("Your own loop")
    # A small network of the same family on small views; weights cannot be downloaded in a test.
    replaced = {
        "DIR": str(folder),
        "resnet50": "test_resnet",
        "pretrained=True": "pretrained=False",
    }
    replaced |= {"size=224": "size=32", "batch_size=64": "batch_size=16", "range(5)": "range(16)"}
    replaced |= {"lr=1e-4": "lr=3e-3"}
    for theirs, ours in replaced.items():
        assert theirs in code, theirs
        code = code.replace(theirs, ours)
    torch.manual_seed(0)
    names: dict = {}
    exec(code, names)
    batch, model = names["batch"], names["model"]
    assert (model.eval()(batch.flat).argmax(1) == batch.labels.repeat_interleave(4)).all()


def test_it_is_short() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines()
    long = [line for line in prose if len(line) > 110 and not line.startswith(("|", "    "))]
    assert long == []
