"""--normalize: data sets by name, and mean and deviation as numbers."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

import fastaug
from fastaug import cli, train
from fastaug.config import TrainConfig
from fastaug.errors import ConfigError
from fastaug.views.plan import ViewPlan
from fastaug.views.reference import denormalize, reference_views

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OWN = ((0.25, 0.5, 0.75), (0.125, 0.25, 1.0))
IMAGE = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
WHOLE = ViewPlan(top=0, left=0, height=16, width=16, flip=False)


def by_torchvision(mean: tuple[float, ...], deviation: tuple[float, ...]) -> np.ndarray:
    """IMAGE [16, 16, 3] as torchvision's usual transforms make it."""
    steps = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, deviation)]
    return v2.Compose(steps)(IMAGE).permute(1, 2, 0).numpy()


def reference(normalize: object) -> torch.Tensor:
    config = TrainConfig.from_flat(size=16, normalize=normalize)
    return reference_views(IMAGE, [WHOLE], config.view)[0]


def fused(normalize: object) -> torch.Tensor:
    plan = fastaug.plan_views([torch.tensor(IMAGE)], views=1, size=16, augment="none", crop="pad")
    views = fastaug.make_views([torch.tensor(IMAGE)], plan, normalize=normalize)  # type: ignore[arg-type]
    return views[0, 0].permute(1, 2, 0)


@pytest.mark.parametrize("render", [reference, fused])
@pytest.mark.parametrize(
    ("given", "mean", "deviation"),
    [
        ((MEAN, DEVIATION), MEAN, DEVIATION),
        (OWN, *OWN),
        ((0.5, 0.25), (0.5,) * 3, (0.25,) * 3),
        ((0, 1), (0.0,) * 3, (1.0,) * 3),
        ([0.5, list(DEVIATION)], (0.5,) * 3, DEVIATION),
        ((np.float32(0.5), np.array(DEVIATION)), (0.5,) * 3, DEVIATION),
    ],
)
def test_numbers_are_torchvision_s(
    render: Callable[[object], torch.Tensor], given: object, mean: tuple, deviation: tuple
) -> None:
    np.testing.assert_allclose(render(given), by_torchvision(mean, deviation), atol=2e-6)


@pytest.mark.parametrize("render", [reference, fused])
def test_imagenet_s_numbers_are_its_name_to_the_last_bit(
    render: Callable[[object], torch.Tensor],
) -> None:
    assert torch.equal(render((MEAN, DEVIATION)), render("imagenet"))


def test_pictures_get_their_pixel_values_back() -> None:
    config = TrainConfig.from_flat(size=16, normalize=OWN)
    back = denormalize(reference(OWN).permute(2, 0, 1), config.view)
    np.testing.assert_array_equal(back.permute(1, 2, 0), IMAGE)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--normalize cifar", "cifar"),
        ("--normalize=imagenet", "imagenet"),
        ("--normalize 0.5 0.25", ((0.5,) * 3, (0.25,) * 3)),
        ("--normalize 0.25,0.5,0.75 0.125,0.25,1", OWN),
        ("--normalize 0.25,0.5,0.75 0.25 --views 2", ((0.25, 0.5, 0.75), (0.25,) * 3)),
    ],
)
def test_the_flag(words: str, value: object) -> None:
    assert train.configure(words.split())[0].view.normalize == value


def test_equal_numbers_are_equal_settings_however_written() -> None:
    config, other = (TrainConfig.from_flat(normalize=n) for n in ((0.5, 0.5), ([0.5] * 3, 0.50)))
    assert config == other
    assert hash(config.view) == hash(other.view)
    assert config.differences(other) == []
    (difference,) = config.differences(TrainConfig())
    assert difference == "--normalize 0.5,0.5,0.5 0.5,0.5,0.5 (here: imagenet)"


@pytest.mark.parametrize("value", ["cifar", OWN])
def test_config_json_keeps_the_value(value: object) -> None:
    config = TrainConfig.from_flat(normalize=value)
    saved = json.loads(json.dumps(config.to_flat()))
    assert saved == config.to_flat()  # a checkpoint has the same lists
    assert TrainConfig.from_saved(saved) == config


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("mnist", ("'mnist'", "imagenet", "MEAN STD")),
        ("", ("''", "imagenet", "MEAN STD")),
        ("0.5", ("'0.5'", "MEAN STD")),
        ("0.5 x", ("'0.5 x'", "MEAN STD")),
        ("0.5,0.5 0.5", ("'0.5,0.5 0.5'", "MEAN STD")),
        ("0.5 0.5 0.5", ("'0.5 0.5 0.5'", "MEAN STD")),
        ("123.675 58.395", ("mean", "123.675", "0 to 1", "255")),
        ("0.5 58.395", ("deviation", "58.395", "255")),
        ("-0.5 0.5", ("mean", "-0.5")),
        ("0.5 0", ("deviation", "0.001 to 1", "got 0")),
        ("nan 0.5", ("mean", "nan")),
    ],
)
def test_wrong_words_are_one_line(
    words: str, named: tuple[str, ...], capsys: pytest.CaptureFixture
) -> None:
    assert cli.run(train.main, ["--normalize", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(text in line for text in ("--normalize", *named))


@pytest.mark.parametrize("value", [None, 0.5, (0.5,), ("0.5", "0.5"), "0.5 0.5", (0.5, None), {}])
def test_wrong_values_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="--normalize"):
        TrainConfig.from_flat(normalize=value)
