"""Both loaders: what a batch holds depends on (seed, epoch, image, view) alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises
from image_sets import open_data
from PIL import Image
from shard_writers import WRITERS, every_format
from training import tiny_config

import fastaug
from fastaug.config import TrainConfig
from fastaug.diagnostics.gpu_report.loader_checks import check_kept_batches
from fastaug.engine.loaders import build_evaluation_loader
from fastaug.errors import CheckpointError, ConfigError, DataError
from fastaug.runtime import cores
from fastaug.runtime.cores import worker_count
from fastaug.views import randaugment
from fastaug.views.batch import ViewBatch
from fastaug.views.reference import denormalize

Tiny = Callable[..., TrainConfig]


@pytest.fixture(params=["torch", "dali"])
def tiny(request: pytest.FixtureRequest, tiny: Tiny) -> Tiny:
    return lambda **changes: tiny(**{"loader": request.param, **changes})


# Who makes the views: the reference, the fused kernel, DALI's operators.
ENGINES: dict[str, dict] = {
    "torch": {"loader": "torch"},
    "fused": {"loader": "dali", "views_engine": "fused"},
    "dali": {"loader": "dali", "views_engine": "dali"},
}


@pytest.fixture(params=ENGINES)
def any_engine(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Tiny:
    engine = ENGINES[request.param]
    return lambda **changes: tiny_config(folder, tmp_path / "run", **engine, **changes)


def assert_same(ours: list[ViewBatch], theirs: list[ViewBatch]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.views, other.views)
        assert torch.equal(one.indices, other.indices)


def views_by_image(batches: list[ViewBatch]) -> dict[int, torch.Tensor]:
    """Place in the data set -> its views: [K, 3, S, S]."""
    return {
        int(index): views
        for batch in batches
        for index, views in zip(batch.indices, batch.views, strict=True)
    }


def epoch_of(config: TrainConfig, epoch: int = 0, **ranks: int) -> dict[int, torch.Tensor]:
    loader = fastaug.build_loader(config, **ranks)
    loader.set_epoch(epoch)
    return views_by_image(list(loader))


def test_a_batch(tiny: Tiny, folder: Path) -> None:
    loader = fastaug.build_loader(tiny())
    batch = next(iter(loader))
    assert batch.views.shape == (8, 2, 3, 16, 16)
    assert batch.views.dtype == torch.float32
    assert batch.flat.shape == (16, 3, 16, 16)
    assert batch.flat.is_contiguous(memory_format=torch.channels_last)
    assert batch.flat.data_ptr() == batch.views.data_ptr()
    labels = open_data(str(folder), "train").labels
    assert batch.labels.tolist() == labels[batch.indices].tolist()


@pytest.mark.parametrize("augment", ["crop-flip", "randaugment"])
def test_views_depend_only_on_seed_epoch_image_and_view(tiny: Tiny, augment: str) -> None:
    config = tiny(augment=augment)
    expected = epoch_of(config)
    others = {
        "workers": epoch_of(config.replace(workers=2)),
        "batch size": epoch_of(config.replace(batch_size=24)),
        "ranks": {**epoch_of(config, rank=0, ranks=2), **epoch_of(config, rank=1, ranks=2)},
        "accumulation": epoch_of(config.replace(accumulate=2)),
        "number of views": epoch_of(config.replace(views=4, batch_size=32)),
    }
    for name, found in others.items():
        common = expected.keys() & found.keys()
        assert len(common) > 20, name
        for index in common:
            assert torch.equal(found[index][:2], expected[index]), name


def test_views_differ_by_seed_epoch_image_and_view(tiny: Tiny) -> None:
    config = tiny(batch_size=24)
    first = epoch_of(config)
    for other in (epoch_of(config.replace(seed=1)), epoch_of(config, epoch=1)):
        assert not any(torch.equal(first[i], other[i]) for i in first.keys() & other.keys())
    assert not any(torch.equal(views[0], views[1]) for views in first.values())


def test_the_order_changes_with_the_epoch_and_misses_nothing(tiny: Tiny) -> None:
    loader = fastaug.build_loader(tiny(batch_size=24))
    epochs = [[int(i) for batch in loader for i in batch.indices] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(36))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert loader.epoch == 3


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1)])
def test_ranks_and_parts_make_up_the_batches_of_one(
    tiny: Tiny, ranks: int, accumulate: int
) -> None:
    config = tiny(batch_size=24, accumulate=accumulate)
    whole = [b.indices.tolist() for b in fastaug.build_loader(config.replace(accumulate=1))]
    loaders = [fastaug.build_loader(config, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert {len(loader) for loader in loaders} == {len(whole) * accumulate}
    together = [
        [int(i) for batch in parts for i in batch.indices] for parts in zip(*loaders, strict=True)
    ]
    parts = iter(together)
    steps = [[i for _ in range(accumulate) for i in next(parts)] for _ in whole]
    assert steps == whole


def test_a_rest_that_makes_no_step_is_left_out(tiny: Tiny) -> None:
    loader = fastaug.build_loader(tiny(batch_size=20))  # 36 images in steps of 10
    assert len(loader) == 3
    epochs = [{int(i) for batch in loader for i in batch.indices} for _ in range(8)]
    assert {len(epoch) for epoch in epochs} == {30}
    assert set.union(*epochs) == set(range(36))


def test_too_few_images_for_a_step(tiny: Tiny) -> None:
    with raises(DataError, "36 50"):
        fastaug.build_loader(tiny(batch_size=100))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("augment", ["crop-flip", "randaugment"])
def test_a_state_continues_with_the_very_next_batch(
    any_engine: Tiny, workers: int, augment: str
) -> None:
    config = any_engine(workers=workers, augment=augment)
    through = fastaug.build_loader(config)
    expected = [*through, *through]
    stopped = fastaug.build_loader(config)
    for _ in zip(range(2), stopped, strict=False):
        pass
    state = stopped.state_dict()
    resumed = fastaug.build_loader(config)
    resumed.load_state_dict(state)
    assert_same([*resumed, *resumed], expected[2:])


def test_a_pass_that_is_broken_off_leaves_nothing_behind(any_engine: Tiny) -> None:
    loader = fastaug.build_loader(any_engine(augment="randaugment"))
    whole = list(loader)
    for count in (0, 1, 2):
        loader.set_epoch(0)
        batches = iter(loader)
        for _ in range(count):
            next(batches)
        batches.close()  # type: ignore[attr-defined]
        assert_same(list(loader), whole[count:])


def test_batches_that_are_kept_stay_as_they_were(any_engine: Tiny) -> None:
    check_kept_batches(any_engine())


@pytest.mark.parametrize(
    "changes",
    [{"prefetch": 1}, {"prefetch": 6, "workers": 5}, {"decode_memory": 4}, {"workers": 1}],
    ids=str,
)
def test_workers_depth_and_memory_change_no_batch(any_engine: Tiny, changes: dict) -> None:
    config = any_engine(augment="randaugment")
    other = fastaug.build_loader(config.replace(**changes))
    assert_same(list(fastaug.build_loader(config)), list(other))


def test_a_state_of_another_table_of_operations_is_refused(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one operation more, the same numbers draw others for every view."""
    config = tiny(augment="randaugment")
    state = fastaug.build_loader(config).state_dict()
    monkeypatch.setattr(randaugment, "NAMES", (*randaugment.NAMES, "emboss"))
    with raises(CheckpointError, "RandAugment 16 17"):
        fastaug.build_loader(config).load_state_dict(state)
    plain = fastaug.build_loader(tiny())
    plain.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"seed": 5}, "--seed 0 5"),
        ({"views": 4}, "--views 2 4 8"),
        ({"batch_size": 24}, "8 12"),
        ({"augment": "randaugment"}, "--augment crop-flip randaugment"),
        ({"crop_area": (0.5, 1.0)}, "--crop-area 0.35 0.5"),
        ({"normalize": (0.5, 0.25)}, "--normalize imagenet 0.5,0.5,0.5 0.25,0.25,0.25"),
        ({"interpolation": "bilinear"}, "--interpolation bicubic bilinear"),
        ({"antialias": True}, "--antialias False True"),
        ({"last_batch": "fill"}, "--last-batch drop fill"),
    ],
)
def test_a_state_of_another_configuration_is_refused(tiny: Tiny, changes: dict, names: str) -> None:
    state = fastaug.build_loader(tiny()).state_dict()
    with raises(CheckpointError, names):
        fastaug.build_loader(tiny(**changes)).load_state_dict(state)


def test_a_state_of_other_data_is_refused(tiny: Tiny, folder: Path, tmp_path: Path) -> None:
    state = fastaug.build_loader(tiny()).state_dict()
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (other / "train/red/00.jpg").unlink()
    with raises(CheckpointError, "36 35"):
        fastaug.build_loader(tiny(data=str(other))).load_state_dict(state)


def test_without_augmentation_all_views_are_the_same(tiny: Tiny) -> None:
    for views in epoch_of(tiny(augment="none")).values():
        assert torch.equal(views[0], views[1])


@every_format
def test_shards_give_the_views_of_the_folder(
    tiny: Tiny, folder: Path, tmp_path: Path, suffix: str
) -> None:
    """The same images in a tar, in TFRecords and in RecordIO, in two shards each."""
    images = open_data(str(folder), "train")
    samples = [(images.encoded(i), int(images.labels[i])) for i in range(len(images))]
    for number, part in enumerate((samples[:20], samples[20:])):
        WRITERS[suffix](tmp_path / f"train-{number}{suffix}", part)
    WRITERS[suffix](tmp_path / f"val{suffix}", samples[:9])
    config = tiny(batch_size=24)
    expected = epoch_of(config)
    found = epoch_of(config.replace(data=str(tmp_path)))
    assert found.keys() == expected.keys()
    for index, views in expected.items():
        assert torch.equal(found[index], views)
    test = open_data(str(tmp_path), "test")
    loader = build_evaluation_loader(config, test, views=0, batch_size=4)
    assert [int(i) for b in loader for i in b.indices] == list(range(9))
    assert [int(i) for b in loader for i in b.labels] == [label for _, label in samples[:9]]


class TestEvaluationLoader:
    @pytest.mark.parametrize("views", [0, 3])
    @pytest.mark.parametrize("batch_size", [1, 7, 256])
    def test_every_image_once_in_order(
        self, tiny: Tiny, folder: Path, views: int, batch_size: int
    ) -> None:
        images = open_data(str(folder), "test")
        loader = build_evaluation_loader(tiny(), images, views=views, batch_size=batch_size)
        batches = list(loader)
        assert len(batches) == len(loader)
        assert [int(i) for b in batches for i in b.indices] == list(range(15))
        assert {b.views.shape[1] for b in batches} == {max(1, views)}

    @pytest.mark.parametrize("ranks", [2, 3])
    @pytest.mark.parametrize("views", [0, 2])
    def test_every_image_once_over_several_ranks(
        self, tiny: Tiny, folder: Path, views: int, ranks: int
    ) -> None:
        images = open_data(str(folder), "test")
        alone = views_by_image(
            list(build_evaluation_loader(tiny(), images, views=views, batch_size=8))
        )
        seen = []
        for rank in range(ranks):
            shard = build_evaluation_loader(
                tiny(), images, views=views, batch_size=8, rank=rank, ranks=ranks
            )
            for index, its_views in views_by_image(list(shard)).items():
                seen.append(index)
                assert torch.equal(its_views, alone[index])
        assert sorted(seen) == list(range(15))

    def test_test_views_are_not_those_of_training(self, tiny: Tiny, folder: Path) -> None:
        images = open_data(str(folder), "train")
        loader = build_evaluation_loader(tiny(), images, views=2, batch_size=72)
        train = epoch_of(tiny(batch_size=24))
        for index, views in views_by_image(list(loader)).items():
            assert not torch.equal(views, train[index])

    def test_a_model_without_augmentation_is_measured_on_crops(
        self, tiny: Tiny, folder: Path
    ) -> None:
        images = open_data(str(folder), "test")
        loader = build_evaluation_loader(tiny(augment="none"), images, views=2, batch_size=8)
        views = next(iter(loader)).views
        assert not torch.equal(views[:, 0], views[:, 1])


@pytest.mark.parametrize("size", [16, 24])
def test_a_wrong_size_for_padding_is_a_mistake_and_no_bad_image(
    tiny: Tiny, size: int, compiled_cache: Path
) -> None:
    """Images of 20 px; what is wrong with the flags must not be remembered of the images."""
    with raises(DataError, f"--size {size} 20"):
        list(fastaug.build_loader(tiny(crop="pad", size=size)))
    assert dict(fastaug.build_loader(tiny()).images.bad) == {}


class TestBadFiles:
    @pytest.fixture
    def data(self, folder: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / "data"))

    def test_one_that_was_bad_before_is_replaced(self, tiny: Tiny, data: Path) -> None:
        config = tiny(data=str(data), batch_size=24, max_bad=0.05)
        before = [batch.indices.tolist() for batch in fastaug.build_loader(config)]
        (data / "train/green/03.jpg").write_bytes(b"")  # image 15
        loader = fastaug.build_loader(config)
        after = [batch.indices.tolist() for batch in loader]
        differing = [
            (was, now)
            for pair in zip(before, after, strict=True)
            for was, now in zip(*pair, strict=True)
            if was != now
        ]
        assert len(differing) == 1
        assert differing[0][0] == 15
        assert 15 not in {index for batch in loader for index in batch.indices.tolist()}

    def test_an_evaluation_goes_without_it(self, tiny: Tiny, data: Path) -> None:
        (data / "test/blue/02.jpg").write_bytes(b"not an image")
        config = tiny(data=str(data), max_bad=0.1)
        loader = build_evaluation_loader(
            config, open_data(str(data), "test"), views=0, batch_size=4
        )
        assert [int(i) for b in loader for i in b.indices] == [0, 1, *range(3, 15)]
        assert len(loader) == 4

    def test_formats_that_dali_does_not_know(self, tiny: Tiny, data: Path) -> None:
        """A GIF and a 16-bit PNG are the same images to both loaders."""
        rng = np.random.default_rng(0)
        deep = rng.integers(0, 65536, (20, 20), np.uint16)
        Image.fromarray(deep).save(data / "train/red/00.png")
        (data / "train/red/00.jpg").unlink()
        frames = [
            Image.fromarray(rng.integers(0, 256, (20, 20, 3), np.uint8)).quantize(64)
            for _ in range(2)
        ]
        frames[0].save(data / "train/red/01.gif", save_all=True, append_images=frames[1:])
        (data / "train/red/01.jpg").unlink()
        config = tiny(data=str(data), augment="none", crop="pad", size=20, batch_size=24)
        views = epoch_of(config)
        levels = denormalize(views[24][0], config.view).permute(1, 2, 0).numpy()
        np.testing.assert_allclose(levels, np.repeat(deep[..., None] / 257, 3, -1), atol=0.51)
        levels = denormalize(views[25][0], config.view).permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(levels, np.asarray(frames[0].convert("RGB")))


def test_worker_count() -> None:
    assert worker_count(3) == 3
    assert 1 <= worker_count(-1) <= 8


@pytest.mark.parametrize(
    ("ranks", "expected"), [("1", 8), ("2", 7), ("4", 3), ("16", 1), ("64", 1), ("", 8), ("x", 8)]
)
def test_ranks_of_a_machine_share_its_cores(
    ranks: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "core_count", lambda: 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert worker_count(-1) == expected
    assert worker_count(5) == 5


def test_images_in_memory(tmp_path: Path, tiny: Tiny) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (20, 16, 16, 3), np.uint8)
    np.savez(tmp_path / "set.npz", images=images, labels=np.arange(20) % 2)
    config = tiny(data=str(tmp_path / "set.npz"), crop="pad", normalize="cifar", augment="none")
    (batch, _) = fastaug.build_loader(config)
    kept = [i for i in range(20) if i not in (18, 19)]  # the tenth of each class is held out
    levels = batch.views[0, 0].permute(1, 2, 0) * torch.tensor([63.0, 62.1, 66.7])
    levels += torch.tensor([125.3, 123.0, 113.9])
    np.testing.assert_allclose(levels, images[kept[int(batch.indices[0])]], atol=1e-3)


@pytest.mark.parametrize("config", ["shapes", None, {"views": 2}])
def test_a_loader_of_something_else_than_a_config(config: Any) -> None:
    with raises(ConfigError, "TrainConfig", type(config).__name__):
        fastaug.build_loader(config)
