"""Which images make up which batch, with several ranks and numbers that do not divide."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from expect import raises

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet, Manifest
from fastaug.data.loader import ViewLoader
from fastaug.data.permutation import permuted
from fastaug.data.sampler import DRAWS, BatchSampler
from fastaug.errors import CheckpointError, DataError
from fastaug.views.philox import SUBSTITUTES, uniforms


def image_set(count: int, bad: dict[int, str] | None = None) -> ImageSet:
    manifest = Manifest(np.full((count, 2), 8), np.ones(count, bool), bad or {})
    array = np.zeros((count, 8, 8, 3), np.uint8)
    labels = np.zeros(count, np.int64)
    return ImageSet("some", ("a", "b"), labels, array=array, manifest=manifest)


def loader(images: ImageSet, config: TrainConfig, **sampling: object) -> ViewLoader:
    parts = {"seed": config.run.seed, "batches_per_step": config.optim.accumulate}
    return ViewLoader(images, config.data, config.view, **parts, **sampling)


def indices(schedule: ViewLoader) -> list[list[int]]:
    return [key.indices.tolist() for key in schedule.batches()]


def training(count: int, last_batch: str, ranks: int, accumulate: int = 1) -> list[ViewLoader]:
    """A step has 6 images over all ranks, in `accumulate` parts."""
    config = TrainConfig.from_flat(
        views=2, batch_size=12, accumulate=accumulate, last_batch=last_batch
    )
    per_batch = config.images_per_part(ranks)
    return [
        loader(
            image_set(count),
            config,
            train=True,
            images_per_batch=per_batch,
            rank=rank,
            ranks=ranks,
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("count", [6, 31, 60])
@pytest.mark.parametrize("last_batch", ["drop", "fill"])
def test_training_batches_of_all_ranks(ranks: int, count: int, last_batch: str) -> None:
    expected_steps = count // 6 + (last_batch == "fill" and count % 6 > 0)
    shards = training(count, last_batch, ranks)
    left_out = set()
    for epoch in range(4):
        for shard in shards:
            shard.set_epoch(epoch)
        batches = [indices(shard) for shard in shards]
        # The same number of steps on every rank and in every epoch, and every batch is full.
        assert {len(one) for one in batches} == {expected_steps}
        assert {len(shard) for shard in shards} == {expected_steps}
        assert {len(batch) for one in batches for batch in one} == {6 // ranks}
        seen = Counter(index for one in batches for batch in one for index in batch)
        if last_batch == "drop":
            assert set(seen.values()) == {1}
            left_out |= set(range(count)) - set(seen)
        else:
            assert set(seen) == set(range(count))
            assert sum(n - 1 for n in seen.values()) == expected_steps * 6 - count
            assert max(seen.values()) <= 2
    if last_batch == "drop" and count == 31:
        assert len(left_out) > 1  # another one in another epoch


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("last_batch", ["drop", "fill"])
def test_ranks_together_see_what_one_sees(ranks: int, last_batch: str) -> None:
    (alone,) = training(31, last_batch, 1)
    shards = [indices(shard) for shard in training(31, last_batch, ranks)]
    together = [list(itertools.chain(*parts)) for parts in zip(*shards, strict=True)]
    assert together == indices(alone)


def test_a_step_in_parts_is_whole() -> None:
    (schedule,) = training(31, "drop", 1, accumulate=3)
    assert len(schedule) == 15
    (schedule,) = training(31, "fill", 1, accumulate=3)
    assert len(schedule) == 18


def test_the_order_is_another_one_for_another_seed_or_epoch() -> None:
    (schedule,) = training(60, "drop", 1)
    first = indices(schedule)
    schedule.set_epoch(1)
    assert indices(schedule) != first
    config = TrainConfig.from_flat(views=2, batch_size=12, seed=1)
    assert indices(loader(image_set(60), config, train=True, images_per_batch=6)) != first


def test_too_few_images_for_a_step() -> None:
    with raises(DataError, "5 6"):
        training(5, "drop", 1)
    (schedule,) = training(5, "fill", 1)
    (batch,) = indices(schedule)
    assert set(batch) == set(range(5))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("per_batch", [1, 4, 7, 100])
@pytest.mark.parametrize("bad", [{}, {0: "x", 12: "y"}])
def test_an_evaluation_has_every_good_image_once(ranks: int, per_batch: int, bad: dict) -> None:
    shards = [
        loader(
            image_set(23, bad),
            TrainConfig(),
            train=False,
            images_per_batch=per_batch,
            rank=rank,
            ranks=ranks,
        )
        for rank in range(ranks)
    ]
    batches = [indices(shard) for shard in shards]
    assert [len(one) for one in batches] == [len(shard) for shard in shards]
    seen = [index for one in batches for batch in one for index in batch]
    assert sorted(seen) == [index for index in range(23) if index not in bad]
    assert all(0 < len(batch) <= per_batch for one in batches for batch in one)


def test_bad_images_are_replaced_and_nothing_else_moves() -> None:
    config = TrainConfig.from_flat(views=2, batch_size=12)
    kept = {"train": True, "images_per_batch": 6}
    whole, repaired = (
        loader(image_set(60, bad), config, **kept) for bad in ({}, {7: "torn", 41: "empty"})
    )
    replaced, alike = Counter(), 0
    for epoch in range(300):
        for schedule in (whole, repaired):
            schedule.set_epoch(epoch)
        pairs = zip(np.concatenate(indices(whole)), np.concatenate(indices(repaired)), strict=True)
        drawn = []
        for was, now in pairs:
            assert now not in (7, 41)
            if was != now:
                assert was in (7, 41)
                drawn.append(int(now))
        replaced.update(drawn)
        alike += len(set(drawn)) == 1
    assert alike < 30  # 5 by chance
    assert sum(replaced.values()) == 600
    assert len(replaced) == 58  # drawn again in every epoch, from all the others


def replaced(bad: dict[int, str], epoch: int, count: int = 60) -> list[int]:
    """The images of an epoch in their order."""
    config = TrainConfig.from_flat(views=2, batch_size=12)
    schedule = loader(image_set(count, bad), config, train=True, images_per_batch=6)
    schedule.set_epoch(epoch)
    return list(itertools.chain(*indices(schedule)))


@pytest.mark.parametrize("good", [59, 30, 2, 1])
def test_a_substitute_is_the_first_good_one_that_is_drawn(good: int) -> None:
    bad = dict.fromkeys(np.random.default_rng(good).permutation(60)[good:].tolist(), "torn")
    exhausted = 0
    for epoch in range(20):
        expected = []
        for index in permuted(0, epoch, 60, np.arange(60)).tolist():
            drawn = uniforms(0, epoch, SUBSTITUTES, np.array([index]), 1, DRAWS)[0, 0]
            candidates = [index, *(int(60 * number) for number in drawn)]
            # Behind the draws: the next image of the set that is good, from its start if need be.
            candidates += [(candidates[-1] + step) % 60 for step in range(60)]
            place = next(i for i, one in enumerate(candidates) if one not in bad)
            exhausted += place > DRAWS
            expected.append(candidates[place])
        assert replaced(bad, epoch) == expected
    assert (exhausted > 0) == (good < 5)


def test_one_more_bad_image_changes_only_its_own_places() -> None:
    """So it does not matter to the others when in the run it is found."""
    known = {7: "torn", 41: "empty", 12: "gone"}
    for epoch in range(200):
        before, after = replaced(known, epoch), replaced({**known, 30: "torn"}, epoch)
        for was, now in zip(before, after, strict=True):
            assert (was == now) == (was != 30)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("last_batch", ["drop", "fill"])
@pytest.mark.parametrize("then", [1, 2, 4])
@pytest.mark.parametrize("first", [1, 2, 4])
def test_an_epoch_goes_on_with_another_number_of_ranks(
    first: int, then: int, last_batch: str, accumulate: int
) -> None:
    """Every image once, in steps of 24 images, whoever makes them."""
    config = TrainConfig.from_flat(
        views=2, batch_size=48, accumulate=accumulate, last_batch=last_batch
    )
    count = 120 if last_batch == "fill" else 130

    def of_ranks(ranks: int) -> list[ViewLoader]:
        shared = {"train": True, "images_per_batch": config.images_per_part(ranks), "ranks": ranks}
        images = image_set(count)
        return [loader(images, config, rank=rank, **shared) for rank in range(ranks)]

    whole = sorted(itertools.chain(*indices(of_ranks(1)[0])))
    assert len(set(whole)) == 120
    for stop in range(5 * accumulate + 1):
        began, goes_on = of_ranks(first), of_ranks(then)
        seen: list[int] = []
        for schedule in began:
            for key in itertools.islice(schedule.batches(), stop):
                schedule._advance(key)
                seen += key.indices.tolist()
        for schedule in goes_on:
            schedule.load_state_dict(began[0].state_dict())
        if stop == 5 * accumulate:
            assert (goes_on[0].epoch, goes_on[0].position) == (1, 0)
            continue
        seen += [index for one in goes_on for batch in indices(one) for index in batch]
        assert sorted(seen) == whole


def test_a_set_of_more_than_one_block_is_seen_once() -> None:
    labels = np.zeros(40_001, np.int64)
    images = ImageSet("many", ("a",), labels, array=np.zeros((40_001, 1, 1, 3), np.uint8))
    sampler = BatchSampler(images, seed=0, train=True, images_per_batch=7, fill_last=True)
    keys = list(sampler.batches(images, 2))
    seen = np.concatenate([key.indices for key in keys])
    assert [key.position for key in keys] == list(range(5715))
    np.testing.assert_array_equal(np.sort(seen[:40_001]), np.arange(40_001))
    np.testing.assert_array_equal(seen[40_001:], seen[:4])  # the last batch is filled up
    for key, later in zip(keys[4000:], sampler.batches(images, 2, start=4000), strict=True):
        assert key.position == later.position
        np.testing.assert_array_equal(key.indices, later.indices)


def test_a_state_of_another_order_is_refused() -> None:
    (schedule,) = training(60, "drop", 1)
    state = schedule.state_dict()
    schedule.load_state_dict(state)
    with raises(CheckpointError, "version"):
        schedule.load_state_dict(state | {"version of the image order": 1})
    del state["version of the image order"]
    with pytest.raises(CheckpointError):
        schedule.load_state_dict(state)
