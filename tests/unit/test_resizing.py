"""Progressive resizing: the size of each epoch, and what the settings refuse."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from expect import raises
from torch import nn

from fastaug import cli
from fastaug.config import TrainConfig
from fastaug.engine.preflight import check_before_start
from fastaug.errors import ConfigError
from fastaug.models import build
from fastaug.models.build import check_configured_model
from fastaug.models.config import ModelConfig
from fastaug.views.config import ViewConfig
from fastaug.views.resizing import size_of_epoch, sizes_of_training, view_of_epoch


@pytest.mark.parametrize(
    ("first", "last", "epochs", "expected"),
    [
        (128, 224, 10, [128] * 3 + [160] * 3 + [192] * 2 + [224] * 2),
        (16, 32, 5, [16, 16, 24, 24, 32]),
        (100, 240, 6, [100, 128, 160, 192, 240, 240]),  # the ends are as given
        (128, 224, 2, [128, 224]),
        (128, 224, 1, [224]),
        (64, 64, 3, [64] * 3),
        (0, 224, 3, [224] * 3),
    ],
)
def test_sizes_by_hand(first: int, last: int, epochs: int, expected: list[int]) -> None:
    config = ViewConfig(initial_size=first, size=last)
    assert [size_of_epoch(config, epoch, epochs) for epoch in range(epochs)] == expected
    assert sizes_of_training(config, epochs) == sorted(set(expected))
    assert size_of_epoch(config, epochs + 5, epochs) == last
    for epoch, size in enumerate(expected):
        assert view_of_epoch(config, epoch, epochs) == ViewConfig(size=size)


@pytest.mark.parametrize("last", [32, 100, 127, 128, 224, 300])
@pytest.mark.parametrize("epochs", [2, 3, 7, 10, 90, 201])
def test_sizes_grow_from_the_first_to_the_last(last: int, epochs: int) -> None:
    unit = 8 if last < 128 else 32
    for first in range(8, last, 9):
        config = ViewConfig(initial_size=first, size=last)
        sizes = [size_of_epoch(config, epoch, epochs) for epoch in range(epochs)]
        assert sizes[0] == first
        assert sizes == sorted(sizes)
        assert all(size in (first, last) or size % unit == 0 for size in sizes)
        at_full_size = sizes.count(last)
        assert epochs / 5 <= at_full_size < epochs / 5 + 1


def test_a_view_of_an_epoch_reaches_worker_processes() -> None:
    """Those of images on a network are not forked: what they use is pickled."""
    config = ViewConfig(initial_size=16, size=32)
    copy = pickle.loads(pickle.dumps(partial(view_of_epoch, config, epochs=5)))
    assert copy(2).size == 24


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"initial_size": 224, "size": 128}, "--initial-size 224 --size 128"),
        ({"initial_size": 7}, "--initial-size 7 8"),
        ({"size": "128:224"}, "--size 128:224 initial_size"),
        ({"initial_size": -16}, "--initial-size -16"),
        ({"initial_size": 16, "crop": "pad"}, "--size 16:32 --crop pad"),
    ],
)
def test_a_wrong_first_size(changes: dict, named: str) -> None:
    with raises(ConfigError, named):
        TrainConfig.from_flat(**changes)


GROWING = TrainConfig.from_flat(initial_size=16, size=64)


def parsed(flags: str, default: TrainConfig) -> tuple[int, int]:
    view = cli.parse_training(TrainConfig, flags.split(), prog="train", default=default).view
    return view.initial_size, view.size


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("--size 128:224", (128, 224)),
        ("--size=128:224", (128, 224)),
        ("--views 2 --size 128:224 --batch-size 8", (128, 224)),
        ("--initial-size 128 --size 224", (128, 224)),
        ("--size 224 --initial-size=128", (128, 224)),
    ],
)
def test_two_sizes_on_the_command_line(flags: str, sizes: tuple[int, int]) -> None:
    assert parsed(flags, TrainConfig()) == parsed(flags, GROWING) == sizes


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("", (16, 64)),
        ("--size 48", (0, 48)),
        ("--size=64", (0, 64)),
        ("--initial-size 32", (32, 64)),
        ("--size 48 --initial-size 24", (24, 48)),
    ],
)
def test_one_size_replaces_both_of_the_default(flags: str, sizes: tuple[int, int]) -> None:
    assert parsed(flags, GROWING) == sizes


@pytest.mark.parametrize(
    "value", ["128:", "128-224", ":224", "a:b", "128:224:256", "12.5:224", "-128:224"]
)
@pytest.mark.parametrize("flag", ["--size ", "--size="])
def test_a_malformed_pair_of_sizes(flag: str, value: str) -> None:
    with raises(ConfigError, "--size FIRST:LAST", value):
        parsed(flag + value, TrainConfig())


@pytest.mark.parametrize("flags", ["--size 224:128", "--size 4:32"])
def test_a_wrong_pair_of_sizes(flags: str) -> None:
    with raises(ConfigError, flags):
        parsed(flags, TrainConfig())


@pytest.mark.parametrize(
    "model", ["nf_resnet26", "resnet18", "wrn-10-1", "timm/vit_tiny_patch16_224"]
)
def test_networks_that_take_any_size(model: str) -> None:
    check_configured_model(ModelConfig(model=model), [128, 160, 224])


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("timm/swin_tiny_patch4_window7_224", [128, 224]),
        ("timm/mixer_s32_224", [128, 224]),
        ("timm/vit_small_patch14_dinov2", [112, 160, 224]),  # 160 is not a multiple of 14
    ],
)
def test_networks_that_cannot_take_a_size(model: str, sizes: list[int]) -> None:
    check_configured_model(ModelConfig(model=model), sizes[-1:])
    refused = sizes[-2]
    with raises(ConfigError, model, f"{refused} --size {sizes[0]}:{sizes[-1]}"):
        check_configured_model(ModelConfig(model=model), sizes)


def test_a_network_that_cannot_take_the_last_size() -> None:
    model = "timm/vit_tiny_patch16_224"
    with raises(ConfigError, model, "40 --size 32:40"):
        check_configured_model(ModelConfig(model=model), [32, 40])


class OnlyOnDevices(nn.Module):
    """Runs on any device but meta."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images[: int(images.sum().item())]


def test_a_network_that_cannot_run_on_the_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_model", lambda *args, **options: OnlyOnDevices())
    check_configured_model(ModelConfig(), [16, 32])


@pytest.mark.parametrize(
    ("model", "size", "nearest"),
    [
        ("timm/vit_tiny_patch16_224", 40, "32 48"),
        ("timm/vit_tiny_patch16_224", 8, "16"),
        ("timm/vit_small_patch14_dinov2", 224 + 16, "238 252"),
        ("timm/mixer_s32_224", 48, "32 64"),
    ],
)
def test_a_size_that_patches_do_not_cover(model: str, size: int, nearest: str) -> None:
    """timm's networks ignore the pixels that are left."""
    with torch.device("meta"):
        network = build.build_model(model, 2, image_size=size)
    with raises(ConfigError, model, f"--size {size} {nearest}"):
        build.check_patches(model, network, size)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("timm/vit_tiny_patch16_224", 48),
        ("timm/vit_small_patch14_dinov2", 224),
        ("timm/resnet18", 33),
        ("wrn-10-1", 33),
    ],
)
def test_a_size_of_which_no_pixel_is_ignored(model: str, size: int) -> None:
    with torch.device("meta"):
        network = build.build_model(model, 2, image_size=size)
    build.check_patches(model, network, size)


def test_patches_are_checked_when_a_new_run_starts(tmp_path: Path) -> None:
    config = TrainConfig.from_flat(model="timm/test_vit", size=40)
    with raises(ConfigError, "--size 40 timm/test_vit 16"):
        check_before_start(config, tmp_path / "run", is_new=True)
    check_before_start(config, tmp_path / "run", is_new=False)
