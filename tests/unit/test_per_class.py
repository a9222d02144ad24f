"""Accuracy by class, against counts by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from fastaug.engine.metrics import Predictions
from fastaug.engine.per_class import PerClass, PredictedClasses
from fastaug.runtime.distributed import Group

CLASSES = ("ant", "bee", "cat", "dog")


def predictions(labels: list[int], *views: list[int]) -> Predictions:
    """A batch whose view k predicts the classes views[k], with a logit of 4."""
    logits = torch.zeros(len(labels), len(views), len(CLASSES))
    for k, predicted in enumerate(views):
        logits[range(len(labels)), k, predicted] = 4.0
    return Predictions(logits, torch.tensor(labels), Mock())


# ant: 3 of 4 right, bee: 0 of 3, cat: 1 of 1, dog: no images.
CENTRAL = [
    predictions([0, 0, 1], [0, 1, 0]),
    predictions([1, 0, 2, 1, 0], [0, 0, 2, 2, 0]),
]
# Two of three views decide: ant: 4 of 4, bee: 1 of 3, cat: 0 of 1.
VIEWS = [
    predictions([0, 0, 1], [0, 0, 1], [0, 0, 1], [1, 3, 0]),
    predictions([1, 0, 2, 1, 0], [0, 0, 3, 2, 0], [2, 0, 3, 2, 1], [0, 0, 2, 1, 0]),
]


class Rank(Group):
    """Rank 0 of several, whose others have collected this."""

    def __init__(self, *others: object) -> None:
        super().__init__(ranks=1 + len(others))
        object.__setattr__(self, "others", others)

    def gather(self, value: object) -> list[object]:
        return [value, *self.others]  # type: ignore[attr-defined]


def collected(batches: slice) -> PredictedClasses:
    own = PredictedClasses(CLASSES, views=3)
    for central, views in zip(CENTRAL[batches], VIEWS[batches], strict=True):
        own.add(central, 0)
        own.add(views, 3)
    return own


def sent(own: PredictedClasses) -> object:
    """What a rank gives to the others."""
    group = Mock(gather=Mock(side_effect=lambda value: [value]))
    own.gather(group)
    return group.gather.call_args.args[0]


def on_one_rank() -> PerClass:
    return collected(slice(0, 2)).gather(Group())


def on_two_ranks() -> PerClass:
    return collected(slice(0, 1)).gather(Rank(sent(collected(slice(1, 2)))))


def with_an_idle_rank() -> PerClass:
    return collected(slice(0, 2)).gather(Rank(sent(collected(slice(0, 0)))))


@pytest.mark.parametrize("measure", [on_one_rank, on_two_ranks, with_an_idle_rank])
def test_counts_by_hand(measure: Callable[[], PerClass]) -> None:
    found = json.loads(json.dumps(measure().as_json()))
    assert found["classes"] == [
        {"class": "ant", "images": 4, "top1": 0.75, "tta_top1": 1.0},
        {"class": "bee", "images": 3, "top1": 0.0, "tta_top1": pytest.approx(1 / 3)},
        {"class": "cat", "images": 1, "top1": 1.0, "tta_top1": 0.0},
        {"class": "dog", "images": 0, "top1": None, "tta_top1": None},
    ]
    # Over the three classes with images.
    assert found["balanced"] == pytest.approx({"top1": 1.75 / 3, "tta_top1": 4 / 9})
    assert found["confused"] == [
        {"class": "bee", "predicted": "ant", "images": 2},
        {"class": "ant", "predicted": "bee", "images": 1},
        {"class": "bee", "predicted": "cat", "images": 1},
    ]


def test_views_are_averaged_as_probabilities() -> None:
    """Two views of probability 0.95 outvote one whose logit is larger than both of theirs."""
    own = PredictedClasses(CLASSES, views=3)
    own.add(predictions([1], [1]), 0)
    views = predictions([1], [1], [1], [2])
    views.logits[0, 2, 2] = 20.0
    own.add(views, 3)
    assert own.gather(Group()).accuracy("tta_top1")[1] == 1.0


def test_the_table_has_the_worst_class_first() -> None:
    title, rows = on_one_rank().table(3, None)
    assert "3 views" in title
    assert [name for name, _ in rows[1:4]] == ["bee", "ant", "cat"]
    texts = dict(rows)
    assert texts["mean over classes"] == "58.3% / 44.4%"
    assert texts["ant"] == "75.0% / 100.0% of 4 images"
    assert texts["no test images"] == "dog"
    assert texts["most confused"].splitlines()[0] == "bee as ant: 2 of 3 images"


@pytest.mark.parametrize("count", [20, 21, 1000])
def test_of_many_classes_the_worst_and_the_best_are_shown(count: int) -> None:
    classes = tuple(f"class-{number}" for number in range(count))
    # Of each 1,000 images of class c, c are right.
    right = [(c, c, c) for c in range(count)]
    wrong = [(c, (c + 1) % count, 1000 - c) for c in range(count)]
    measured = PerClass(classes, {"top1": np.array(right + wrong)})
    _, rows = measured.table(0, Path("result.json"))
    names = [name for name, _ in rows if name.startswith("class-")]
    if count == 20:
        assert names == list(classes)
        return
    assert names == [*classes[:10], *classes[-5:]]
    assert dict(rows)["..."].startswith(f"{count - 15} more classes")
    assert "result.json" in dict(rows)["..."]
