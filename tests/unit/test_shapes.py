"""The built-in data set: what it holds, who makes it, and what its pictures show."""

import multiprocessing
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from expect import raises
from PIL import Image

from fastaug.data import shapes
from fastaug.data.shapes import CLASSES, ensure_shapes, picture_rng
from fastaug.data.shapes_drawing import CANVAS, SIDE, draw_picture, draw_silhouette
from fastaug.errors import DataError

SMALL = {"train": 3, "test": 2}


@pytest.fixture(scope="module")
def whole_set() -> Path:
    return ensure_shapes()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "IMAGES_PER_CLASS", SMALL)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.jpg")}


def jpeg(split: str, shape: str, number: int) -> bytes:
    buffer = BytesIO()
    draw_picture(shape, picture_rng(split, shape, number)).save(buffer, "jpeg", quality=90)
    return buffer.getvalue()


def test_layout_and_class_balance(whole_set: Path) -> None:
    expected = {
        f"{split}/{shape}/{number:04d}.jpg"
        for split, count in {"train": 200, "test": 50}.items()
        for shape in CLASSES
        for number in range(count)
    }
    files = {str(path.relative_to(whole_set)) for path in whole_set.rglob("*") if path.is_file()}
    assert len(CLASSES) == 10
    assert files == expected


def test_every_file_is_a_small_rgb_jpeg(whole_set: Path) -> None:
    for path in whole_set.rglob("*.jpg"):
        with Image.open(path) as image:
            image.load()
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (64, 64)), path


def test_no_picture_occurs_twice(whole_set: Path) -> None:
    files = contents(whole_set)
    assert len(set(files.values())) == len(files)


def test_a_picture_depends_only_on_its_name(whole_set: Path) -> None:
    names = [("train", "star", 7), ("test", "star", 7), ("test", "arrow", 49), ("train", "ring", 0)]
    for split, shape, number in reversed(names):
        file = whole_set / split / shape / f"{number:04d}.jpg"
        assert file.read_bytes() == jpeg(split, shape, number)


@pytest.mark.usefixtures("small")
def test_says_so_when_it_makes_the_set_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = ensure_shapes(tmp_path)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"fastaug: making the built-in data set, 50 images in {root}\n"

    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert ensure_shapes(tmp_path) == root
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"FASTAUG_CACHE": "own", "XDG_CACHE_HOME": "xdg"}, "own"),
        ({"FASTAUG_CACHE": "", "XDG_CACHE_HOME": "xdg"}, "xdg/fastaug"),
        ({"XDG_CACHE_HOME": ""}, "home/.cache/fastaug"),
    ],
)
@pytest.mark.usefixtures("small")
def test_cache_place(
    environment: dict[str, str], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTAUG_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in environment.items():
        monkeypatch.setenv(name, str(tmp_path / value) if value else "")
    root = ensure_shapes()
    assert root == tmp_path / place / f"shapes-v{shapes.VERSION}"
    assert len(contents(root)) == 50


def test_cache_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with raises(DataError, "FASTAUG_CACHE") as caught:
        ensure_shapes(tmp_path / "file")
    assert str(tmp_path / "file") in str(caught.value)
    assert capsys.readouterr().err == ""


# Several makers, and makers that stop half-way


def test_two_processes_make_one_whole_set(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    makers = [
        context.Process(target=shapes._make_atomically, args=(tmp_path / "set", SMALL))
        for _ in range(2)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
    assert [maker.exitcode for maker in makers] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert len(contents(tmp_path / "set")) == 50


def test_loser_of_the_race_uses_the_set_of_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "set"
    write_images = shapes._write_images

    def overtaken(unfinished: Path, images_per_class: dict[str, int]) -> None:
        write_images(unfinished, images_per_class)
        write_images(root, images_per_class)
        (root / "winner").touch()

    monkeypatch.setattr(shapes, "_write_images", overtaken)
    shapes._make_atomically(root, SMALL)
    assert (root / "winner").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError("disk full")])
def test_interrupted_maker_leaves_nothing(
    interruption: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = 0

    def draw_some(shape: str, rng: np.random.Generator) -> Image.Image:
        nonlocal drawn
        drawn += 1
        if drawn > 20:
            raise interruption
        return draw_picture(shape, rng)

    monkeypatch.setattr(shapes, "draw_picture", draw_some)
    expected = DataError if isinstance(interruption, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        ensure_shapes(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_killed_maker_leaves_no_half_set(tmp_path: Path) -> None:
    root = tmp_path / "set"
    maker = multiprocessing.get_context("fork").Process(
        target=shapes._make_atomically, args=(root, {"train": 10_000, "test": 1})
    )
    maker.start()
    deadline = time.monotonic() + 60
    while not any(tmp_path.rglob("*.jpg")) and time.monotonic() < deadline:
        time.sleep(0.02)
    maker.kill()
    maker.join()
    assert any(tmp_path.rglob("*.jpg"))
    assert not root.exists()
    shapes._make_atomically(root, SMALL)
    assert len(contents(root)) == 50


# What the pictures show

SILHOUETTES = 6
ANGLES = 36


def normalized(mask: Image.Image, angle: float, mirror: bool) -> np.ndarray:
    """The mask as 48 x 48 booleans: centroid in the middle, area a seventh of the whole."""
    y, x = np.nonzero(np.asarray(mask))
    scale = np.sqrt(len(x) * 7) / 48
    turn = scale * np.exp(1j * np.radians(angle))
    across, down = (-turn if mirror else turn), turn * 1j
    offset = complex(x.mean(), y.mean()) - 24 * (across + down)
    affine = (across.real, down.real, offset.real, across.imag, down.imag, offset.imag)
    return np.asarray(mask.transform((48, 48), Image.Transform.AFFINE, affine)) > 0


def test_classes_differ_under_rotation_flip_and_scale() -> None:
    masks = [
        draw_silhouette(shape, picture_rng("test", shape, number))
        for shape in CLASSES
        for number in range(SILHOUETTES)
    ]
    upright = np.array([normalized(mask, 0, False).ravel() for mask in masks], np.float32)
    turned = np.array(
        [
            [normalized(mask, turn * 360 / ANGLES, mirror).ravel() for mask in masks]
            for turn in range(ANGLES)
            for mirror in (False, True)
        ],
        np.float32,
    )
    common = turned @ upright.T
    either = turned.sum(-1)[:, :, None] + upright.sum(-1) - common
    overlap = (common / either).max(0)
    np.fill_diagonal(overlap, 0)

    labels = np.repeat(np.arange(len(CLASSES)), SILHOUETTES)
    same = labels[:, None] == labels
    nearest_same = np.where(same, overlap, 0).max(1)
    nearest_other = np.where(same, 0, overlap).max(1)
    assert (nearest_same > nearest_other + 0.05).all()


@pytest.mark.parametrize("shape", CLASSES)
def test_shape_is_inside_the_middle(shape: str) -> None:
    for number in range(50):
        mask = draw_silhouette(shape, picture_rng("test", shape, number))
        left, top, right, bottom = mask.getbbox() or (0, 0, 0, 0)
        assert min(left, top) > 0
        assert max(right, bottom) < CANVAS
        assert 0.25 < max(right - left, bottom - top) / CANVAS < 0.82


def test_pictures_show_the_shape_of_their_class(whole_set: Path) -> None:
    """Along the outline of its own class a picture has more edge than along that of another."""

    def outline(shape: str, rng: np.random.Generator) -> np.ndarray:
        small = np.asarray(draw_silhouette(shape, rng).resize((SIDE, SIDE)), np.float64)
        return np.hypot(*np.gradient(small)) > 20

    wins = []
    for index, shape in enumerate(CLASSES):
        other = CLASSES[index - 1]
        for number in range(20):
            file = whole_set / "test" / shape / f"{number:04d}.jpg"
            with Image.open(file) as image:
                edges = np.hypot(*np.gradient(np.asarray(image.convert("L"), np.float64)))
            own, wrong = (
                edges[outline(name, picture_rng("test", shape, number))].mean()
                for name in (shape, other)
            )
            wins.append(own > wrong)
    assert np.mean(wins) > 0.9, np.reshape(wins, (len(CLASSES), -1)).mean(1)
