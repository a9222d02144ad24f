"""The benchmarks' loaders against the pictures that they are given, and the photo-like pictures."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from image_sets import files_of, open_both
from parts import loaders
from parts.timing import Stream, UnfitError
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import resized_crop

import fastaug
from fastaug.config import TrainConfig
from fastaug.data import image_set as fastaug_images
from fastaug.data.image_set import ImageSet
from fastaug.data.storage import Files
from fastaug.diagnostics import photos
from fastaug.errors import KernelUnavailableError
from fastaug.views.plan import ViewPlans

# Superseded by a package of its own, says torchvision 0.29 of its decoders.
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
CPU = torch.device("cpu")
SIDE, COUNT = 32, 6
OURS = ("fastaug fused", "fastaug dali operators", "fastaug torch")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OTHERS = ("torchvision, one decode", "torchvision, K decodes", "timm, K decodes")
MODES = [(kind, antialias) for kind in ("bilinear", "bicubic") for antialias in (True, False)]
FFCV = pytest.param("ffcv", marks=pytest.mark.skipif("not _has_ffcv()", reason="needs ffcv"))


def _has_ffcv() -> bool:
    try:
        import ffcv  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    """Six smooth pictures, each its own, of which a decoder loses little."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    paths = tuple(root / f"{number}.jpg" for number in range(COUNT))
    for path in paths:
        picture = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
        picture = picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        picture.save(path, quality=98, subsampling="4:4:4")
    return ImageSet("files", ("a",), np.zeros(COUNT, np.int64), Files.of(paths))


@pytest.fixture(scope="module")
def array(files: ImageSet) -> ImageSet:
    return ImageSet("array", ("a",), files.labels, array=pixels(files))


def pixels(images: ImageSet) -> np.ndarray:
    return np.stack([images.image(index) for index in range(len(images))])


def settings(**changes: object) -> TrainConfig:
    """Views that are the whole image, as it is or mirrored: a square has no other crop of all."""
    values: dict = {"views": 2, "batch_size": 8, "size": SIDE, "crop_area": (1.0, 1.0)}
    values |= {"workers": 1, "randaugment_layers": 3, "precision": "bf16", "views_dtype": "fp32"}
    values |= {"interpolation": "bilinear", "antialias": True}
    return TrainConfig.from_flat(**(values | changes))


def taken(name: str, images: ImageSet, config: TrainConfig, count: int) -> list[Tensor]:
    with closing(loaders.LOADERS[name](images, config, CPU).batches()) as batches:
        found = [batch.clone() for batch in islice(batches, count)]
    assert len(found) == count
    return found


def pixel_values(batch: Tensor) -> Tensor:
    """[B, K, S, S, 3], 0 to 255, by ImageNet's constants from torchvision's documentation."""
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (batch.float().permute(0, 1, 3, 4, 2) * deviation + mean) * 255


def seen(batch: Tensor, images: ImageSet) -> tuple[Tensor, Tensor]:
    """[B, K] the index of each view's image, mirrored ones after the others, and its error."""
    levels = pixel_values(batch)
    known = torch.from_numpy(pixels(images)).float()
    known = torch.cat([known, known.flip(2)])
    off = (levels[:, :, None] - known).abs().flatten(3).amax(3)
    least = off.min(2)
    return least.indices, least.values


# --- batches ---


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", [*OURS, *OTHERS, FFCV])
def test_views_are_of_the_files(name: str, dtype: str, files: ImageSet) -> None:
    if (name, dtype) == ("ffcv", "bf16"):
        pytest.skip("ffcv has no bf16")
    config = settings(views_dtype=dtype)
    batches = taken(name, files, config, 12)
    flipped = set()
    for batch in batches:
        assert batch.shape == (4, 2, 3, SIDE, SIDE)
        assert batch.dtype == DTYPES[dtype]
        assert batch.permute(0, 1, 3, 4, 2).is_contiguous()
        which, off = seen(batch, files)
        # Pixel values by which JPEG decoders may differ, FFCV's with its fast DCT by more.
        assert off.max() < (16 if name == "ffcv" else 3)
        assert (which[:, 0] % COUNT == which[:, 1] % COUNT).all()
        flipped |= set(which.flatten().tolist())
    assert flipped == set(range(2 * COUNT))  # all images, as they are and mirrored


@pytest.mark.parametrize("name", [*OURS, *OTHERS])
def test_views_of_images_in_memory(name: str, array: ImageSet) -> None:
    for batch in taken(name, array, settings(), 3):
        which, off = seen(batch, array)
        assert off.max() < 0.01
        assert (which[:, 0] % COUNT == which[:, 1] % COUNT).all()


@pytest.mark.parametrize("name", [*OURS, *OTHERS[:2]])
def test_padded_crops(name: str, array: ImageSet) -> None:
    """Each view is a window of the image with 4 reflected pixels around it, maybe mirrored."""
    padded = np.pad(pixels(array), ((0, 0), (4, 4), (4, 4), (0, 0)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (SIDE, SIDE), axis=(1, 2))
    known = {}
    for image, top, left in np.ndindex(COUNT, 9, 9):
        window = windows[image, top, left].transpose(1, 2, 0)
        known[window.tobytes()] = (image, top, left, False)
        known[window[:, ::-1].tobytes()] = (image, top, left, True)
    places = []
    for batch in taken(name, array, settings(crop="pad"), 12):
        levels = pixel_values(batch)
        assert (levels - levels.round()).abs().max() < 0.01
        of = [[known[v.numpy().tobytes()] for v in own] for own in levels.round().to(torch.uint8)]
        assert all(first[0] == second[0] for first, second in of)
        places += [place for own in of for place in own]
    images, tops, lefts, flips = (set(values) for values in zip(*places, strict=True))
    assert (images, tops, lefts) == (set(range(COUNT)), set(range(9)), set(range(9)))
    assert flips == {False, True}


@pytest.mark.parametrize(("interpolation", "antialias"), MODES[:3])
def test_the_others_make_the_same_crop(interpolation: str, antialias: bool) -> None:
    """torchvision's resize of the same box, within it: at the edges it shares out the weights.

    Bicubic without antialiasing is another filter there (a = -0.75).
    """
    rng = np.random.default_rng(1)
    image = torch.from_numpy(rng.integers(0, 256, (97, 120, 3), np.uint8))
    boxes = [(3, 5, 80, 100), (40, 50, 20, 24), (0, 0, 97, 33), (10, 60, 90, 32)]
    nothing = np.zeros((1, 4, 0), np.int32), np.zeros((1, 4, 0, 4))
    plans = ViewPlans(np.array([boxes], np.int32), np.zeros((1, 4), bool), *nothing, SIDE)
    how: dict = {"interpolation": interpolation, "antialias": antialias}
    (views,) = fastaug.make_views([image], plans, normalize=None, **how)
    how["interpolation"] = InterpolationMode(interpolation)
    planar, inner = image.permute(2, 0, 1), slice(4, -4)
    for view, box in zip(views, boxes, strict=True):
        theirs = resized_crop(planar.float(), *box, [SIDE, SIDE], **how)
        torch.testing.assert_close(
            view[:, inner, inner], theirs[:, inner, inner], rtol=0, atol=0.01
        )
        if interpolation == "bilinear":  # bicubic bytes are clipped between the two directions
            levels = resized_crop(planar, *box, [SIDE, SIDE], **how).float()
            torch.testing.assert_close(
                view[:, inner, inner], levels[:, inner, inner], rtol=0, atol=1
            )


def test_the_others_resize_as_asked() -> None:
    for interpolation, antialias in MODES:
        config = settings(interpolation=interpolation, antialias=antialias)
        crop = loaders.torchvision_views(config.view).transforms[0]
        assert (crop.interpolation.value, crop.antialias) == (interpolation, antialias)
        if antialias:
            crop = loaders.timm_views(config.view).transforms[0]
            assert str(crop.interpolation).rpartition(".")[2].lower() == interpolation
        else:
            with pytest.raises(UnfitError, match="antialias"):
                loaders.timm_views(config.view)


@pytest.mark.parametrize("name", [*OURS, *OTHERS, FFCV])
@pytest.mark.parametrize(("views", "images"), [(1, 1), (2, 4), (3, 16), (16, 2)])
def test_any_number_of_views_and_few_images(
    name: str, views: int, images: int, files: ImageSet
) -> None:
    """16 images of 6: an epoch of fastaug's has one batch."""
    config = settings(views=views, batch_size=views * images, crop_area=(0.1, 0.9), workers=0)
    for batch in taken(name, files, config, 2 * COUNT // images + 2):
        loaders.check_batch(batch, config)


@pytest.mark.parametrize("name", [*OURS, *OTHERS])
def test_randaugment_changes_views(name: str, files: ImageSet) -> None:
    config = settings(augment="randaugment", workers=0, batch_size=16)
    (batch,) = taken(name, files, config, 1)
    _, off = seen(batch, files)
    assert (off > 3).sum() >= 8  # of 16; some operations do little


def test_randaugment_is_as_strong_as_asked() -> None:
    config = settings(augment="randaugment", randaugment_magnitude=6.0)
    policy = loaders.torchvision_views(config.view).transforms[3]
    assert (policy.num_ops, policy.magnitude, policy.num_magnitude_bins) == (3, 18, 31)
    policy = loaders.timm_views(config.view).transforms[2]
    assert (policy.num_layers, {op.magnitude for op in policy.ops}) == (3, {6})


def test_what_others_cannot_do_is_said(files: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OTHERS:
        with pytest.raises(UnfitError, match="--augment"):
            loaders.LOADERS[name](files, settings(augment="none"), CPU)
    with pytest.raises(UnfitError, match="--crop"):
        loaders.LOADERS["timm, K decodes"](files, settings(crop="pad"), CPU)
    monkeypatch.setattr(loaders, "fused_engine", no_engine)
    with pytest.raises(UnfitError, match="no compiler"):
        loaders.LOADERS["fastaug fused"](files, settings(), CPU)
    dali = settings(augment="randaugment", randaugment_policy="dali", loader="dali")
    with pytest.raises(UnfitError, match="--loader dali"):
        loaders.LOADERS["fastaug torch"](files, dali, CPU)
    monkeypatch.setitem(sys.modules, "ffcv", None)
    monkeypatch.setitem(sys.modules, "ffcv.fields", None)
    with pytest.raises(UnfitError, match="ffcv"):
        loaders.LOADERS["ffcv"](files, settings(), CPU)


def no_engine(device: torch.device) -> None:
    raise KernelUnavailableError("no compiler")


# --- the work behind them ---


@pytest.mark.parametrize(
    ("name", "decoder", "decodes"),
    [
        ("fastaug torch", (fastaug_images, "decode"), 1),
        ("torchvision, one decode", (loaders, "decode_image"), 1),
        ("torchvision, K decodes", (loaders, "decode_image"), 4),
        ("timm, K decodes", (Image, "open"), 4),
    ],
)
def test_decodes_of_an_image(
    name: str, decoder: tuple, decodes: int, files: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(views=4, workers=0)
    batches = loaders.LOADERS[name](files, config, CPU).batches()
    calls = count_calls(monkeypatch, *decoder)
    next(batches)
    assert calls.value == decodes * config.images_per_step


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str):
    """A number in shared memory, which worker processes count on."""
    calls, function = multiprocessing.Value("i", 0), getattr(owner, name)

    def counted(*args: object, **more: object) -> object:
        with calls.get_lock():
            calls.value += 1
        return function(*args, **more)

    monkeypatch.setattr(owner, name, counted)
    return calls


def decoding(loader: str) -> Callable[..., Stream]:
    return lambda *args: loaders.decode_only(*args, loader)


@pytest.mark.parametrize(
    ("build", "reads"),
    [
        *((loaders.LOADERS[name], 1) for name in (*OURS, OTHERS[0])),
        (loaders.LOADERS["timm, K decodes"], 2),
        (decoding("dali"), 1),
        (decoding("torch"), 1),
    ],
    ids=[*OURS, OTHERS[0], "timm", "dali decodes", "torch decodes"],
)
def test_works_ahead_as_it_says_and_stops(
    build: Callable, reads: int, files: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(prefetch=3)
    others = set(multiprocessing.active_children())  # of other tests
    contender = build(files, config, CPU)
    calls = count_calls(monkeypatch, ImageSet, "encoded")
    batches = contender.batches()
    next(batches)
    expected = (1 + contender.ahead) * config.images_per_step * reads
    until(lambda: calls.value >= expected)
    time.sleep(0.1)
    assert calls.value == expected
    batches.close()
    assert not set(multiprocessing.active_children()) - others
    time.sleep(0.05)  # threads go to sleep
    before = time.process_time(), calls.value
    time.sleep(0.3)
    assert time.process_time() - before[0] < 0.1
    assert calls.value == before[1]


def until(done: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.02)


def test_decoding_alone_decodes_each_image_once(
    files: ImageSet, array: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch, fastaug_images, "decode")
    batches: Iterator = decoding("torch")(files, settings(workers=0), CPU).batches()
    assert [len(batch) for batch in islice(batches, 5)] == [0] * 5
    assert calls.value == 5 * 4
    with closing(decoding("dali")(files, settings(), CPU).batches()) as batches:
        assert [len(batch) for batch in islice(batches, 5)] == [0] * 5
    with pytest.raises(UnfitError):
        decoding("dali")(array, settings(), CPU)


# --- the check ---


def test_check() -> None:
    config = settings()
    good = torch.randn(4, 2, SIDE, SIDE, 3).clamp(-2, 2).permute(0, 1, 4, 2, 3)
    loaders.check_batch(good, config)
    same = good.clone()
    same[:, 1] = same[:, 0]
    nan = good.clone()
    nan[1, 1, 2, 3, 4] = torch.nan
    for bad, said in (
        (good[:3], "shape"),
        (good.half(), "float16"),
        (good.contiguous(), "strides"),
        (nan, "nan"),
        (good * 58 + 120, "normalized"),
        (good / 58, "deviation 0.0"),
        (same, "views 0 and 1"),
    ):
        with pytest.raises(ValueError, match=said):
            loaders.check_batch(bad, config)


# --- photo-like pictures ---


def test_photos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(photos, "PER_CLASS", {"train": 6, "val": 1})
    first, second = photos.photo_folder(tmp_path / "a"), photos.photo_folder(tmp_path / "b")
    assert str(first) in capsys.readouterr().out
    assert photos.photo_folder(tmp_path / "a") == first
    assert not capsys.readouterr().out
    train, test = open_both(str(first))
    assert (len(train), len(test), train.classes) == (24, 4, photos.CLASSES)
    densities = []
    for file in files_of(train) + files_of(test):
        content = file.read_bytes()
        assert content == (second / file.relative_to(first)).read_bytes()
        with Image.open(file) as picture:
            assert (picture.format, picture.mode) == ("JPEG", "RGB")
            short, long = sorted(picture.size)
            assert 351 <= short <= 399 < 488 <= long <= 512
            densities.append(len(content) / (short * long))
    assert len(set(densities)) == 28
    assert 0.4 < np.median(densities) < 0.8  # bytes per pixel; of photographs 0.59


def test_small_images_are_cut_out_of_photos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(photos, "PER_CLASS", {"train": 2, "val": 1})
    monkeypatch.setattr(photos, "SMALL_COUNTS", {"train": 20, "test": 5})
    file = photos.cifar_like(tmp_path / "a")
    assert str(file) in capsys.readouterr().out
    assert photos.cifar_like(tmp_path / "a") == file
    assert not capsys.readouterr().out
    assert [path.name for path in file.parent.iterdir() if path.is_file()] == [file.name]
    again = photos.cifar_like(tmp_path / "b")
    train, test = open_both(str(file))
    assert (len(train), len(test), train.classes) == (20, 5, photos.CLASSES)
    assert np.array_equal(train.array, open_both(str(again))[0].array)
    assert len(np.unique(train.array.reshape(20, -1), axis=0)) == 20
    sources = sorted((photos.photo_folder(tmp_path / "a") / "train").glob("*/*.jpg"))
    for place in (0, 7, 19):
        path = sources[place % 8]
        assert train.classes[train.labels[place]] == path.parent.name
        photo = np.asarray(Image.open(path), float)
        photo = np.pad(photo, [(0, -side % 4) for side in photo.shape[:2]] + [(0, 0)], "edge")
        means = photo.reshape(len(photo) // 4, 4, -1, 4, 3).mean((1, 3))
        windows = np.lib.stride_tricks.sliding_window_view(means, (32, 32), axis=(0, 1))
        off = np.abs(windows.transpose(0, 1, 3, 4, 2) - train.array[place]).mean((2, 3, 4))
        assert off.min() < 0.5 < 5 < np.median(off)  # levels
