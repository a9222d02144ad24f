"""The fused kernel's 16 operations equal the oracle in every level, and the oracle Pillow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from view_oracle import Layers, cut, noise, operate, operation, photograph, pictures, plans_of

import fastaug
from fastaug.views.randaugment import NAMES

SIZES = (8, 9, 24, 31, 32, 33, 64)
STRENGTHS = (0.0, 0.5, 0.7, 1.0)
"""Magnitudes 0, 5, 7 and 10 of 10."""
ENHANCERS = {
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "brightness": ImageEnhance.Brightness,
    "sharpness": ImageEnhance.Sharpness,
}


def arguments_of(name: str, size: int) -> list[tuple[float, ...]]:
    """Of the magnitudes, and some that no magnitude gives."""
    if name in ("auto_contrast", "equalize", "invert"):
        return [()]
    if name in ENHANCERS:
        factors = [*(0.1 + 1.8 * strength for strength in STRENGTHS), 0.0, 0.37, 0.999, 1.001, 3.3]
        return [(factor,) for factor in factors]
    if name == "cutout":
        whole, half = (0, 0, size, size), (0, 0, size, size // 2)
        empty, last = (3, 3, 3, 3), (size - 1, size - 1, size, size)
        return [whole, half, empty, last, (2, 0, 7, 5)]
    reach = 100 * size / 224
    most = {
        "rotate": 30,
        "posterize": 4,
        "solarize": 256,
        "solarize_add": 110,
        "shear_x": 0.3,
        "shear_y": 0.3,
        "translate_x": reach,
        "translate_y": reach,
    }[name]
    if name in ("posterize", "solarize", "solarize_add"):
        more = {"posterize": (1, 3, 7, 8), "solarize": (1, 255), "solarize_add": (1, 127)}[name]
        return [(value,) for value in (*(int(most * s) for s in STRENGTHS), *more)]
    more = {"rotate": (45, 90, 180, 1e-3)}.get(name, (0.5, size / 2, 3 * size))
    values = (*(most * strength for strength in STRENGTHS), *more)
    return [(sign * value,) for sign in (1, -1) for value in values]


def drawn(rng: np.random.Generator, count: int, size: int) -> Layers:
    """So many operations, each with one of its arguments."""
    names = rng.choice(NAMES, count).tolist()
    options = [arguments_of(name, size) for name in names]
    return [(name, own[rng.integers(len(own))]) for name, own in zip(names, options, strict=True)]


def by_pillow(image: np.ndarray, name: str, *args: float) -> np.ndarray:
    picture = Image.fromarray(image)
    if name in ENHANCERS:
        return np.asarray(ENHANCERS[name](picture).enhance(*args))
    if name == "posterize":  # of no bits, which ImageOps does not take, nothing is left
        return np.asarray(ImageOps.posterize(picture, int(args[0]))) if args[0] else image * 0
    if name == "solarize_add":
        table = [min(i + int(args[0]), 255) if i < 128 else i for i in range(256)]
        return np.asarray(picture.point(table * 3))
    if name == "cutout":
        picture.paste((128, 128, 128), tuple(int(edge) for edge in args))
        return np.asarray(picture)
    apply = {"auto_contrast": ImageOps.autocontrast}.get(name) or getattr(ImageOps, name)
    return np.asarray(apply(picture, *args))


def moved_by_pillow(image: np.ndarray, name: str, value: float) -> np.ndarray:
    picture, outside = Image.fromarray(image), (128, 128, 128)
    if name == "rotate":
        return np.asarray(picture.rotate(value, fillcolor=outside))
    matrix = {
        # Pillow's points are at half integers: a shear takes half of it more.
        "shear_x": (1, value, -value / 2, 0, 1, 0),
        "shear_y": (1, 0, 0, value, 1, -value / 2),
        "translate_x": (1, 0, value, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, value),
    }[name]
    method = Image.Transform.AFFINE
    return np.asarray(picture.transform(picture.size, method, matrix, fillcolor=outside))


MOVES = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")


class TestTheOracle:
    @pytest.mark.parametrize("name", [name for name in NAMES if name not in MOVES])
    def test_it_equals_pillow(self, name: str) -> None:
        for size in (9, 33, 64):
            for kind, image in pictures(size).items():
                for args in arguments_of(name, size):
                    expected = by_pillow(image, name, *args)
                    np.testing.assert_array_equal(
                        operation(image, name, *args), expected, f"{kind} {size} {args}"
                    )

    @pytest.mark.parametrize("name", MOVES)
    def test_moves_are_pillow_s_but_for_pixels_between_two(self, name: str) -> None:
        """Pillow counts in 1/65536 of a pixel and takes others where a point is half way."""
        image = noise(0, 64, 64)
        values = {"rotate": (0, 15, -21, 30), "shear_x": (0.131, -0.29), "shear_y": (0.131, -0.29)}
        for value in values.get(name, (0, 5, -7.3, 22.6)):
            other = (operation(image, name, value) != moved_by_pillow(image, name, value)).any(-1)
            assert other.mean() <= 0.01, value


# --- the kernel ---


def by_kernel(images: list[np.ndarray], layers: list[list[Layers]]) -> np.ndarray:
    """[S, S, 3] images and [B][K] layers -> [B, K, S, S, 3] levels; the box is the whole image."""
    size = len(images[0])
    boxes = [[(0, 0, size, size)] * len(own) for own in layers]
    views = fastaug.make_views(
        [torch.from_numpy(image) for image in images],
        plans_of(boxes, size, layers=layers),
        normalize=None,
    )
    return views.permute(0, 1, 3, 4, 2).numpy()


def assert_equal_to_the_oracle(images: dict[str, np.ndarray], layers: list[list[Layers]]) -> None:
    """Name the worst view, and how much of it differs: one view is a row in the report."""
    made = by_kernel(list(images.values()), layers)
    wrong = []
    for views, (kind, image), own in zip(made, images.items(), layers, strict=True):
        for view, view_layers in zip(views, own, strict=True):
            off = np.abs(view - operate(image, view_layers))
            if off.any():
                pixels = int((off > 0).any(-1).sum())
                wrong.append(f"{kind}, {view_layers}: {pixels} pixels, by up to {off.max():g}")
    assert not wrong, f"{len(wrong)} views differ:\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_equals_the_oracle(name: str, size: int) -> None:
    images = pictures(size)
    own: list[Layers] = [[(name, args)] for args in arguments_of(name, size)]
    assert_equal_to_the_oracle(images, [own] * len(images))


@pytest.mark.parametrize("size", [9, 24, 33])
@pytest.mark.parametrize("count", [2, 4])
def test_sequences_equal_the_oracle(count: int, size: int) -> None:
    rng = np.random.default_rng(count)
    images = pictures(size)
    layers = [[drawn(rng, count, size) for _ in range(40)] for _ in images]
    assert_equal_to_the_oracle(images, layers)


def test_autocontrast_of_every_range_of_levels() -> None:
    """All 32,640 pairs of a darkest and a lightest level: which of them end a level lower hangs on
    the last bit of float64, and a fused multiply-add would change it."""
    levels = np.arange(256).reshape(16, 16)
    pairs = [(low, high) for low in range(255) for high in range(low + 1, 256)]
    images = {
        f"{pairs[i : i + 3]}": np.stack(
            [levels.clip(*pair) for pair in pairs[i : i + 3]], axis=-1
        ).astype(np.uint8)
        for i in range(0, len(pairs), 3)
    }
    assert_equal_to_the_oracle(images, [[[("auto_contrast", ())]]] * len(images))


@pytest.mark.parametrize("name", sorted(ENHANCERS))
def test_blends_of_many_factors(name: str) -> None:
    images = {"noise": noise(1, 64, 64), "photograph": photograph(1, 64, 64)}
    own: list[Layers] = [[(name, (factor,))] for factor in np.linspace(0, 2, 81).tolist()]
    assert_equal_to_the_oracle(images, [own] * 2)


def test_contrast_of_means_half_way_between_two_levels() -> None:
    """Half goes up; and greys of a picture add up to more than 2**24, where fp32 would end."""
    images = {}
    for below in (0, 76, 127, 128, 200, 254):
        half = np.full((64, 64, 3), below, np.uint8)
        half[::2] += 1
        images[f"half above {below}"] = half
        less = half.copy()
        less[0, 0] -= 1
        images[f"just below the half above {below}"] = less
    large = photograph(2, 400, 400) // 2 + 120
    for image in (images, {"large": large}):
        own: list[Layers] = [[("contrast", (factor,))] for factor in (0.0, 0.1, 1.9)]
        assert_equal_to_the_oracle(image, [own] * len(image))


def test_equalize_counts_a_large_view() -> None:
    """400 x 400 pixels: more of a level than 16 bits count."""
    image = np.full((400, 400, 3), 9, np.uint8)
    image[:150] = noise(3, 150, 400)
    assert_equal_to_the_oracle({"large": image}, [[[("equalize", ())]]])


def test_flips_come_before_operations() -> None:
    image = photograph(4, 32, 32)
    layers: Layers = [("shear_x", (0.3,)), ("cutout", (0, 0, 9, 4))]
    views = fastaug.make_views(
        [torch.from_numpy(image)],
        plans_of([[(0, 0, 32, 32)] * 2], 32, [[False, True]], [[layers] * 2]),
        normalize=None,
    )
    for flip, view in enumerate(views[0].permute(0, 2, 3, 1).numpy()):
        np.testing.assert_array_equal(view, operate(image[:, ::-1] if flip else image, layers))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("antialias", [False, True])
def test_a_flat_image_keeps_its_level_before_operations(
    interpolation: str, antialias: bool
) -> None:
    """However it is resized: weights that sum to a little less than 1 would lose a level."""
    images = [torch.full((37, 53, 3), level, dtype=torch.uint8) for level in range(256)]
    boxes = [[(0, 0, 37, 53), (-9, 3, 29, 11)]] * 256
    layers: list[list[Layers]] = [[[("invert", ())]] * 2] * 256
    views = fastaug.make_views(
        images,
        plans_of(boxes, 24, layers=layers),
        interpolation=interpolation,
        antialias=antialias,
        normalize=None,
    )
    expected = 255 - torch.arange(256.0).view(256, 1, 1, 1, 1)
    torch.testing.assert_close(views, expected.expand_as(views), rtol=0, atol=0)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("antialias", [False, True])
def test_operations_act_on_the_cut_view(interpolation: str, antialias: bool) -> None:
    """On its own resized pixel values (test_view_kernel.py): near a whole value fp32
    and the oracle's float64 may be cut apart, and equalize would make much of it."""
    rng = np.random.default_rng(5)
    image = noise(5, 61, 47)  # bicubic goes below 0 and above 255 on it
    mode: dict = {"interpolation": interpolation, "antialias": antialias, "normalize": None}
    boxes = [[(3, 5, 40, 31), (-7, -9, 70, 60), (20, 20, 24, 24), (0, 0, 5, 3)] * 6]
    flips = [rng.random(24) < 0.5]
    layers = [[drawn(rng, 3, 24) for _ in range(24)]]
    images = [torch.from_numpy(image)]
    resized = fastaug.make_views(images, plans_of(boxes, 24, flips), **mode)
    views = fastaug.make_views(images, plans_of(boxes, 24, flips, layers), **mode)
    for levels, view, own in zip(resized[0], views[0], layers[0], strict=True):
        expected = operate(cut(levels.permute(1, 2, 0).numpy()), own)
        np.testing.assert_array_equal(view.permute(1, 2, 0), expected, f"{own}")
