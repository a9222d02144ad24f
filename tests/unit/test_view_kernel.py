"""The fused kernel against the float64 oracle: crops, borders, resizing, dtypes, strides."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from view_oracle import (
    INTERPOLATIONS,
    NORMALIZATION,
    PAD_MODES,
    cut,
    noise,
    normalized,
    operate,
    photograph,
    plans_of,
    view_levels,
)

import fastaug
from fastaug.config import TrainConfig
from fastaug.views.philox import TRAIN_VIEWS
from fastaug.views.plan import ViewPlans, draw_plans

MODES = [(name, antialias) for name in INTERPOLATIONS for antialias in (False, True)]
LEVELS = 3e-4
"""What fp32 may be off by, in levels of 0 to 255: a few roundings of 2**-24 * 255 each."""
modes = pytest.mark.parametrize(("interpolation", "antialias"), MODES)


def kernel_levels(images: list[np.ndarray], plans: ViewPlans, **options: object) -> np.ndarray:
    """[B, K, S, S, 3] in levels."""
    given_images = [torch.from_numpy(image) for image in images]
    views = fastaug.make_views(given_images, plans, normalize=None, **options)
    return views.permute(0, 1, 3, 4, 2).numpy()


def assert_close_to_the_oracle(
    image: np.ndarray, boxes: list[tuple[int, int, int, int]], size: int, **options: object
) -> None:
    """Every box as it is and flipped."""
    plans = plans_of([[*boxes, *boxes]], size, [[False] * len(boxes) + [True] * len(boxes)])
    made = kernel_levels([image], plans, **options)[0]
    assert made.shape == (2 * len(boxes), size, size, 3)
    for number, (view, flip) in enumerate(zip(made, plans.flips[0], strict=True)):
        box = boxes[number % len(boxes)]
        expected = view_levels(image, box, size, flip, **options)  # type: ignore[arg-type]
        about = f"box {box} of {image.shape[:2]} to {size}, flip {flip}, {options}"
        np.testing.assert_allclose(view, expected, rtol=0, atol=LEVELS, err_msg=about)


SHAPES = {  # height, width, box, size
    "one pixel": (1, 1, (0, 0, 1, 1), 8),
    "one pixel of many": (30, 20, (17, 11, 1, 1), 9),
    "the last pixel": (30, 20, (29, 19, 1, 1), 8),
    "one row": (1, 57, (0, 0, 1, 57), 16),
    "one column": (57, 1, (0, 0, 57, 1), 16),
    "a row of an image": (20, 57, (19, 3, 1, 54), 16),
    "a column of an image": (57, 20, (3, 19, 54, 1), 16),
    "two pixels": (2, 2, (0, 0, 2, 2), 33),
    "three rows": (3, 400, (0, 0, 3, 400), 24),
    "three columns": (400, 3, (0, 0, 400, 3), 24),
    "much larger": (5, 7, (0, 0, 5, 7), 160),
    "much smaller": (1000, 1000, (0, 0, 1000, 1000), 8),
    "smaller by odd numbers": (331, 247, (5, 3, 317, 241), 31),
    "half": (66, 66, (1, 1, 64, 64), 32),
    "twice": (32, 32, (0, 0, 16, 16), 32),
    "nearly the same": (40, 40, (3, 4, 32, 34), 33),
    "one side the same": (40, 90, (0, 0, 33, 81), 33),
    "the other side the same": (90, 40, (0, 0, 81, 33), 33),
    "as in ImageNet": (375, 500, (23, 86, 301, 260), 224),
}


@modes
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, interpolation: str, antialias: bool) -> None:
    height, width, box, size = SHAPES[shape]
    image = noise(len(shape), height, width)
    assert_close_to_the_oracle(image, [box], size, interpolation=interpolation, antialias=antialias)


@modes
@pytest.mark.parametrize("size", [8, 17, 64, 65])
def test_a_box_of_the_size_of_the_view_is_copied(
    size: int, interpolation: str, antialias: bool
) -> None:
    image = noise(size, size + 7, size + 9)
    plans = plans_of([[(5, 6, size, size)] * 2], size, [[False, True]])
    options: dict = {"interpolation": interpolation, "antialias": antialias}
    copied, flipped = kernel_levels([image], plans, **options)[0]
    expected = image[5 : 5 + size, 6 : 6 + size]
    np.testing.assert_array_equal(copied, expected)
    np.testing.assert_array_equal(flipped, expected[:, ::-1])


BEYOND = [  # boxes of an image of 10 x 13
    (-4, -4, 18, 21),
    (-1, 0, 10, 13),
    (0, -1, 10, 13),
    (1, 0, 10, 13),
    (0, 1, 10, 13),
    (-7, 5, 9, 8),
    (3, -40, 5, 90),  # several reflections on either side
    (-63, -55, 130, 121),
    (12, 15, 4, 3),  # wholly beyond
    (-30, 2, 7, 7),
    (5, 999, 6, 2),
    (-1, -1, 1, 1),
]


@modes
@pytest.mark.parametrize("border", PAD_MODES)
def test_boxes_beyond_the_image(border: str, interpolation: str, antialias: bool) -> None:
    options = {"border": border, "interpolation": interpolation, "antialias": antialias}
    assert_close_to_the_oracle(noise(1, 10, 13), BEYOND, 11, **options)
    # Of one pixel, one row or one column nothing can be reflected.
    for height, width in ((1, 1), (1, 13), (10, 1), (2, 2)):
        assert_close_to_the_oracle(noise(2, height, width), BEYOND, 8, **options)


@pytest.mark.parametrize("border", PAD_MODES)
def test_a_box_beyond_the_image_is_copied_exactly(border: str) -> None:
    image, box = noise(3, 32, 32), (-4, 3, 32, 32)
    (view,) = kernel_levels([image], plans_of([[box]], 32), border=border)[0]
    np.testing.assert_array_equal(view, view_levels(image, box, 32, border=border))


def test_images_that_show_a_wrong_sum_of_weights() -> None:
    """Flat ones keep their level, black is 0 exactly, grey has three equal channels."""
    boxes = [(0, 0, 61, 47), (-20, -9, 99, 77), (3, 4, 5, 6), (0, 0, 24, 24)]
    grey = np.repeat(noise(4, 61, 47)[..., :1], 3, axis=-1)
    for interpolation, antialias in MODES:
        options: dict = {"interpolation": interpolation, "antialias": antialias}
        for level in (0, 1, 128, 255):
            flat = np.full((61, 47, 3), level, np.uint8)
            views = kernel_levels([flat], plans_of([boxes], 24), **options)
            np.testing.assert_allclose(views, level, rtol=1e-6, atol=0)
        views = kernel_levels([grey], plans_of([boxes], 24), **options)
        np.testing.assert_array_equal(views[..., 0], views[..., 1])
        np.testing.assert_array_equal(views[..., 0], views[..., 2])


def test_bicubic_overshoots_without_operations() -> None:
    """Levels are neither clamped nor rounded; the network sees what the filter gives."""
    image = np.zeros((8, 8, 3), np.uint8)
    image[:, 4:] = 255
    views = kernel_levels([image], plans_of([[(0, 0, 8, 8)]], 32))
    assert views.min() < -10
    assert views.max() > 265


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_box(data: st.DataObject) -> None:
    def number(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    image = noise(number(0, 9), number(1, 70), number(1, 70))
    box = (number(-90, 90), number(-90, 90), number(1, 120), number(1, 120))
    options: dict = {
        "interpolation": data.draw(st.sampled_from(INTERPOLATIONS)),
        "antialias": data.draw(st.booleans()),
        "border": data.draw(st.sampled_from(list(PAD_MODES))),
    }
    assert_close_to_the_oracle(image, [box], number(8, 40), **options)


# --- what comes out ---


def batch(views: int, size: int = 20, layers: bool = False) -> tuple[list[Tensor], ViewPlans]:
    """Five images of five sizes, boxes inside and beyond, some flipped."""
    rng = np.random.default_rng(views)
    sizes = [(40, 50), (1, 1), (33, 7), (20, 20), (64, 128)]
    images = [torch.from_numpy(photograph(i, *of)) for i, of in enumerate(sizes)]
    boxes = [
        [
            (*(rng.integers(-6, side) for side in of), *(rng.integers(1, side + 6) for side in of))
            for _ in range(views)
        ]
        for of in sizes
    ]
    own = [("sharpness", (1.9,)), ("rotate", (21.0,)), ("equalize", ())] if layers else []
    flips = rng.random((len(sizes), views)) < 0.5
    return images, plans_of(boxes, size, flips, [[own] * views] * len(sizes))


@pytest.mark.parametrize("views", [1, 5])
def test_images_of_several_sizes_in_a_batch(views: int) -> None:
    images, plans = batch(views)
    made = fastaug.make_views(images, plans, normalize=None)
    assert made.shape == (5, views, 3, 20, 20)
    for b, k in np.ndindex(5, views):
        expected = view_levels(images[b].numpy(), plans.boxes[b, k], 20, plans.flips[b, k])
        np.testing.assert_allclose(made[b, k].permute(1, 2, 0), expected, rtol=0, atol=LEVELS)


@pytest.mark.parametrize("size", [20, 33])
@pytest.mark.parametrize("layers", [False, True])
def test_views_are_stored_channels_last(layers: bool, size: int) -> None:
    made = fastaug.make_views(*batch(3, size, layers))
    assert made.shape == (5, 3, 3, size, size)
    assert made.permute(0, 1, 3, 4, 2).is_contiguous()
    assert made.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
    assert not made.requires_grad


@pytest.mark.parametrize("kind", ["imagenet", "cifar"])
@pytest.mark.parametrize("layers", [False, True])
def test_normalization(kind: str, layers: bool) -> None:
    images, plans = batch(4, layers=layers)
    levels = fastaug.make_views(images, plans, normalize=None).permute(0, 1, 3, 4, 2).numpy()
    made = fastaug.make_views(images, plans, normalize=kind).permute(0, 1, 3, 4, 2).numpy()
    np.testing.assert_allclose(made, normalized(levels, kind), rtol=0, atol=1e-6)
    # To the last bit (level - mean) * (1 / deviation) in fp32, as the loaders do it.
    mean, deviation = np.float32(NORMALIZATION[kind])
    np.testing.assert_array_equal(made, (levels - mean) * (1 / deviation))


def test_the_defaults_are_those_of_the_paper_s_imagenet_training() -> None:
    images, plans = batch(2)
    named = fastaug.make_views(
        images,
        plans,
        interpolation="bicubic",
        antialias=False,
        border="reflect",
        normalize="imagenet",
        dtype=torch.float32,
    )
    torch.testing.assert_close(fastaug.make_views(images, plans), named, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["imagenet", None])
@pytest.mark.parametrize("size", [20, 21])
def test_half_precision_is_fp32_rounded(dtype: torch.dtype, kind: str | None, size: int) -> None:
    for layers in (False, True):
        images, plans = batch(3, size, layers)
        made = fastaug.make_views(images, plans, normalize=kind, dtype=dtype)
        assert made.dtype == dtype
        expected = fastaug.make_views(images, plans, normalize=kind).to(dtype)
        torch.testing.assert_close(made, expected, rtol=0, atol=0)


@pytest.mark.parametrize("layers", [False, True])
def test_any_number_of_threads_makes_the_same_views(layers: bool) -> None:
    images, plans = batch(7, 112, layers)  # large enough that five threads are worth it
    one = fastaug.make_views(images, plans, threads=1)
    for threads in (None, 2, 5):
        for _ in range(3):
            again = fastaug.make_views(images, plans, threads=threads)
            torch.testing.assert_close(again, one, rtol=0, atol=0)


def test_several_callers_at_once() -> None:
    """As loaders of training and evaluation are: each gets its own views."""
    batches = [batch(views, 64, layers) for views in (2, 3, 5) for layers in (False, True)]
    alone = [fastaug.make_views(*own, threads=1) for own in batches]
    with ThreadPoolExecutor(6) as callers:
        for _ in range(5):
            together = callers.map(lambda own: fastaug.make_views(*own, threads=3), batches)
            for made, expected in zip(together, alone, strict=True):
                torch.testing.assert_close(made, expected, rtol=0, atol=0)


def in_a_child(images: list[Tensor], plans: ViewPlans, expected: Tensor) -> None:
    torch.testing.assert_close(fastaug.make_views(images, plans, threads=3), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_after_a_fork() -> None:
    """A worker process has none of its parent's threads, and must not wait for them."""
    images, plans = batch(7, 112)
    expected = fastaug.make_views(images, plans, threads=3)  # now the parent has threads
    child = get_context("fork").Process(target=in_a_child, args=(images, plans, expected))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0


def test_inputs_are_not_changed() -> None:
    images, plans = batch(4, layers=True)
    before = [image.clone() for image in images]
    arrays = {name: value.copy() for name, value in vars(plans).items() if name != "size"}
    fastaug.make_views(images, plans)
    for image, old in zip(images, before, strict=True):
        torch.testing.assert_close(image, old, rtol=0, atol=0)
    for name, old in arrays.items():
        np.testing.assert_array_equal(getattr(plans, name), old)


@pytest.mark.parametrize("layers", [False, True])
def test_strides(layers: bool) -> None:
    """As a decoder hands images over: planar, a slice of a larger one, upside down rows left out,
    with a fourth channel that is not part of it."""
    images, plans = batch(3, layers=layers)
    expected = fastaug.make_views(images, plans)
    large = [torch.randint(0, 256, (200, 300, 4), dtype=torch.uint8) for _ in images]

    def within(image: Tensor, room: Tensor) -> Tensor:
        height, width, _ = image.shape
        place = room[11 : 11 + height, 5 : 5 + width, :3]
        return place.copy_(image)

    def every_other(image: Tensor) -> Tensor:
        height, width, _ = image.shape
        place = torch.zeros(2 * height, 3 * width, 3, dtype=torch.uint8)[::2, ::3]
        return place.copy_(image)

    forms = {
        "planar": [image.permute(2, 0, 1).contiguous().permute(1, 2, 0) for image in images],
        "transposed": [image.transpose(0, 1).contiguous().transpose(0, 1) for image in images],
        "within": [within(image, room) for image, room in zip(images, large, strict=True)],
        "rows within": [torch.cat([image, image], 1)[:, : image.shape[1]] for image in images],
        "every other": [every_other(image) for image in images],
        "one channel thrice": [image[..., :1].expand(-1, -1, 3) for image in images],
    }
    for name, own in forms.items():
        made = fastaug.make_views(own, plans)
        dense = [image.contiguous().clone() for image in own]
        same = expected if name != "one channel thrice" else fastaug.make_views(dense, plans)
        torch.testing.assert_close(made, same, rtol=0, atol=0, msg=name)


@pytest.mark.skipif("FASTAUG_PHOTOS" not in os.environ, reason="FASTAUG_PHOTOS names no folder")
@pytest.mark.parametrize("augment", ["crop-flip", "randaugment"])
def test_photographs(augment: str) -> None:
    files = sorted(Path(os.environ["FASTAUG_PHOTOS"]).rglob("*.jp*g"))
    assert files
    config = TrainConfig.from_flat(size=160, views=2, augment=augment, randaugment_layers=4)
    for place, file in enumerate(files):
        image = np.array(Image.open(file).convert("RGB"))
        sizes = np.array([image.shape[:2]])
        plans = draw_plans(config.view, config.run.seed, 0, TRAIN_VIEWS, np.array([place]), sizes)
        interpolation, antialias = MODES[place % len(MODES)]
        options: dict = {"interpolation": interpolation, "antialias": antialias}
        no_layers = replace(
            plans, operations=plans.operations[..., :0], arguments=plans.arguments[..., :0, :]
        )
        resized = kernel_levels([image], no_layers, **options)[0]
        made = kernel_levels([image], plans, **options)[0]
        for view, levels, plan in zip(made, resized, plans.of_image(0), strict=True):
            box = (plan.top, plan.left, plan.height, plan.width)
            expected = view_levels(image, box, 160, plan.flip, **options)
            np.testing.assert_allclose(levels, expected, rtol=0, atol=LEVELS, err_msg=file.name)
            layers = [(own.name, own.arguments) for own in plan.operations]
            augmented = operate(cut(levels), layers) if layers else levels
            np.testing.assert_array_equal(view, augmented, f"{file.name}: {layers}")
