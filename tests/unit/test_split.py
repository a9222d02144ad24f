"""Which training images are trained on and which are held out, against rules written out here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from expect import raises
from image_sets import files_of, open_data

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.split import held_out, split_training
from fastaug.data.storage import Spans
from fastaug.engine.loaders import build_loader
from fastaug.engine.trainer import Trainer
from fastaug.errors import ConfigError


def numbered(labels: list[int]) -> ImageSet:
    """Images that hold their own number."""
    array = np.zeros((len(labels), 4, 4, 3), np.uint8)
    array += np.arange(len(labels), dtype=np.uint8)[:, None, None, None]
    classes = tuple("abc"[: max(labels) + 1])
    return ImageSet("numbered", classes, np.array(labels, np.int64), array=array)


def numbers(images: ImageSet | None) -> list[int]:
    assert images is not None
    return [int(images.image(i)[0, 0, 0]) for i in range(len(images))]


def test_a_tenth_is_every_tenth_image_of_each_class() -> None:
    labels = np.array([0] * 25 + [1] * 10 + [2] * 20)
    assert np.flatnonzero(held_out(labels, 0.1)).tolist() == [9, 19, 34, 44, 54]
    assert held_out(np.zeros(100, int), 0.29).sum() == 29  # 100 * 0.29 is just below 29 in fp64


@pytest.mark.parametrize(("share", "expected"), [(0.5, 5), (0.3, 3), (0.25, 2), (1 / 3, 3), (0, 0)])
def test_so_much_is_held_out_of_each_class(share: float, expected: int) -> None:
    labels = np.array([0, 1] * 10)
    out = held_out(labels, share)
    assert [int(out[labels == label].sum()) for label in (0, 1)] == [expected] * 2


@pytest.mark.parametrize(
    ("count", "share", "places"),
    [
        (9, 0.2, [4, 8]),  # 1.8
        (11, 0.2, [4, 9]),  # 2.2
        (3, 0.1, [2]),  # at least one
        (2, 0.9, [0]),  # and one to train on
        (1, 0.9, []),
        (19, 0.29, [2, 5, 9, 12, 16, 18]),  # 5.51
    ],
)
def test_numbers_are_rounded_to_the_nearest(count: int, share: float, places: list[int]) -> None:
    assert np.flatnonzero(held_out(np.zeros(count, int), share)).tolist() == places


def test_both_parts_are_the_set_and_share_no_image() -> None:
    images = numbered([0, 1, 2] * 20)
    train, validation = split_training(images, validation=0.2, train_images=0)
    assert sorted(numbers(train) + numbers(validation)) == list(range(60))
    assert Counter(validation.labels.tolist()) == {0: 4, 1: 4, 2: 4}
    assert [images.labels[n] for n in numbers(train)] == train.labels.tolist()


def test_fewer_images_are_as_many_of_each_class_and_hold_out_the_same() -> None:
    images = numbered([0] * 30 + [1] * 20 + [2] * 4)
    _, all_held = split_training(images, validation=0.1, train_images=0)
    train, held = split_training(images, validation=0.1, train_images=13)
    assert numbers(held) == numbers(all_held)
    # The last class has only three left, which are all taken; the other two have five each.
    assert Counter(train.labels.tolist()) == {0: 5, 1: 5, 2: 3}
    assert numbers(train) == [0, 1, 2, 3, 4, 30, 31, 32, 33, 34, 50, 51, 52]


def test_nothing_asked_for_is_the_set_itself() -> None:
    images = numbered([0, 1] * 3)
    assert split_training(images, validation=0, train_images=0) == (images, None)


@pytest.mark.parametrize(
    ("validation", "train_images", "message"),
    [
        (0.5, 11, "10 numbered 11"),
        (0.0, 21, "20 numbered 21"),
        (0.0, 1, "image train"),
    ],
)
def test_a_split_that_cannot_be(validation: float, train_images: int, message: str) -> None:
    with raises(ConfigError, message):
        split_training(numbered([0, 1] * 10), validation=validation, train_images=train_images)


def test_classes_of_one_image_cannot_be_split() -> None:
    with raises(ConfigError, "--validation 0.5 numbered"):
        split_training(numbered([0, 1, 2]), validation=0.5, train_images=0)


def test_files_are_split_with_their_labels(folder: Path) -> None:
    files = open_data(str(folder), "train")
    train, held = split_training(files, validation=0.25, train_images=6)
    assert held is not None
    assert (len(train), len(held)) == (6, 9)
    assert not set(files_of(train)) & set(files_of(held))
    for part in (train, held):
        named = [part.classes.index(file.parent.name) for file in files_of(part)]
        assert part.labels.tolist() == named


def test_images_in_shards_are_split_with_all_of_their_parts(tmp_path: Path) -> None:
    shard = tmp_path / "a.rec"
    shard.write_bytes(b"0123456789")
    spans = Spans(
        (shard,),
        shard=np.zeros(4, np.int32),
        offset=np.array([0, 2, 4, 6], np.int64),
        size=np.array([2, 2, 2, 2], np.int64),
        continued={1: ((8, 1),), 3: ((9, 1),)},
        separator=b"-",
    )
    images = ImageSet("spans", ("a", "b"), np.array([0, 1, 0, 1]), storage=spans)
    train, held = split_training(images, validation=0.5, train_images=0)
    assert held is not None
    assert [train.encoded(i) for i in range(2)] == [b"01", b"23-8"]
    assert [held.encoded(i) for i in range(2)] == [b"45", b"67-9"]


def test_a_loader_has_the_images_of_the_split(tiny: Callable[..., TrainConfig]) -> None:
    config = tiny(validation=0.25, train_images=12, views=1, batch_size=4)
    indices = [i for batch in build_loader(config) for i in batch.indices.tolist()]
    assert sorted(indices) == list(range(12))


def test_held_out_images_are_evaluated_and_choose_the_best(
    tiny: Callable[..., TrainConfig],
) -> None:
    config = tiny(validation=0.25, epochs=3)
    trainer = Trainer(config)
    summary = trainer.fit()
    out = Path(config.run.out)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluated = [record["top1"] for record in records if record["kind"] == "eval"]
    # 9 held-out and 15 test images: only one of the two can have been measured in ninths.
    assert all(abs(9 * top1 - round(9 * top1)) < 1e-9 for top1 in evaluated)
    assert summary["best_top1"] == max(evaluated)
    assert summary["validation"]["top1"] == evaluated[-1]
    top1 = 15 * summary["measures"]["top1"]
    assert abs(top1 - round(top1)) < 1e-9
    again = Trainer(config.replace(validation=0.0, out=str(out) + "-all")).fit()
    assert "validation" not in again


def test_a_run_with_other_images_cannot_be_resumed(tiny: Callable[..., TrainConfig]) -> None:
    config = tiny()
    assert config.differences(config.replace(validation=0.5)) == ["--validation 0.0 (here: 0.5)"]
    (difference,) = config.differences(config.replace(weights="w.pt"))
    assert difference == "--weights not given (here: w.pt)"
    assert config.differences(config.replace(train_images=9)) == ["--train-images 0 (here: 9)"]
