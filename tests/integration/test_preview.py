"""The preview: a picture of exactly the views that training will see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fastaug
from fastaug import cli, preview
from fastaug.config import TrainConfig
from fastaug.views.reference import denormalize

Tiny = Callable[..., TrainConfig]


def draw(*flags: str, out: Path) -> np.ndarray:
    """[H, W, 3]: the picture that the flags give."""
    logdir = str(out.parent / "events")
    assert cli.run(preview.main, [*flags, "--out", str(out), "--logdir", logdir]) == 0
    return np.asarray(Image.open(out))


def find(picture: np.ndarray, part: np.ndarray) -> tuple[int, int]:
    """(top, left) of a part that occurs once in a picture."""
    windows = np.lib.stride_tricks.sliding_window_view(picture[..., 0], part.shape[:2])
    first_column = (windows[:, :, :, 0] == part[:, 0, 0]).all(-1)
    places = [
        (y, x)
        for y, x in zip(*np.nonzero(first_column), strict=True)
        if (picture[y : y + part.shape[0], x : x + part.shape[1]] == part).all()
    ]
    assert len(places) == 1
    return places[0]


@pytest.mark.parametrize("loader", ["torch", "dali"])
def test_it_shows_the_originals_and_the_views_of_the_training(
    folder: Path, tmp_path: Path, loader: str
) -> None:
    flags = ["--data", str(folder), "--size", "64", "--views", "3", "--images", "4"]
    flags += ["--loader", loader, "--augment", "randaugment", "--seed", "5"]
    picture = draw(*flags, out=tmp_path / "x.png")
    config = TrainConfig().replace(
        data=str(folder),
        size=64,
        views=3,
        batch_size=12,
        loader=loader,
        augment="randaugment",
        seed=5,
    )
    trained = fastaug.build_loader(config)
    batch = next(iter(trained))
    pixels = denormalize(batch.views, config.view).permute(0, 1, 3, 4, 2).numpy()
    tops, lefts = [], []
    for index, views in zip(batch.indices.tolist(), pixels, strict=True):
        original = trained.images.image(index)
        enlarged = original.repeat(6, 0).repeat(6, 1)  # 20 px to fit a cell of 128
        places = [find(picture, enlarged)]
        places += [find(picture, view.repeat(2, 0).repeat(2, 1)) for view in views]
        assert len({top for top, _ in places}) == 1  # a row for each image
        assert [left for _, left in places] == sorted(left for _, left in places)
        tops.append(places[0][0])
        lefts.append([left for _, left in places])
    assert tops == sorted(set(tops))
    assert all(row == lefts[0] for row in lefts)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    (event,) = events.Images("views")
    (tmp_path / "event.png").write_bytes(event.encoded_image_string)
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "event.png")), picture)


def test_a_flat_folder_and_any_number_of_views(folder: Path, tmp_path: Path) -> None:
    """One class; fewer images than asked for; views that do not divide a batch size."""
    picture = draw(
        *("--data", str(folder / "train/red"), "--views", "7", "--images", "50", "--dali"),
        out=tmp_path / "x.png",
    )
    assert picture.shape[1] > 8 * 128
    assert picture.shape[0] > 12 * 128


def test_a_recipe_gives_its_size_and_policy(folder: Path) -> None:
    config = preview.configure(["--recipe", "imagenet-nfnet-f0", "--data", str(folder)])
    assert (config.view.size, config.view.augment, config.view.views) == (224, "randaugment", 8)
    assert config.run.out == "preview.png"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--images 0", "--images must be at least 1 and at most 100, got 0"),
        ("--out missing/x.png", "--out missing/x.png: "),
        ("--out x.text", "--out x.text: cannot be written"),
        ("--data nowhere", "nowhere: "),
    ],
)
def test_mistakes(
    flags: str,
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = flags.split() if "--data" in flags else ["--data", str(folder), *flags.split()]
    assert cli.run(preview.main, given) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
