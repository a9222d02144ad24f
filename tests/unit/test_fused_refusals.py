"""What plan_views and make_views refuse, each with one line; and whose plans are drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from expect import raises
from torch import Tensor

import fastaug
from fastaug.errors import ConfigError, FastaugError
from fastaug.views.randaugment import OPERATIONS

SIZES = ((40, 30), (9, 50), (20, 20), (33, 64), (12, 7))
IMAGES = [
    torch.full((*size, 3), 40 * number, dtype=torch.uint8) for number, size in enumerate(SIZES)
]
POSTERIZE = [spec.name for spec in OPERATIONS].index("posterize")
PLANS = fastaug.plan_views(IMAGES, views=2, size=16)
REFUSED: dict[str, tuple[list[Tensor], dict]] = {
    "float images": ([image.float() for image in IMAGES], {}),
    "planar images": ([image.permute(2, 0, 1) for image in IMAGES], {}),
    "grey images": ([image[..., 0] for image in IMAGES], {}),
    "four channels": ([image.repeat(1, 1, 2)[..., :4] for image in IMAGES], {}),
    "no pixels": ([image[:0] for image in IMAGES], {}),
    "fewer images than plans": (IMAGES[:4], {}),
    "more images than plans": ([*IMAGES, IMAGES[0]], {}),
    "no images": ([], {}),
    "an unknown interpolation": (IMAGES, {"interpolation": "nearest"}),
    "an unknown border": (IMAGES, {"border": "wrap"}),
    "an unknown normalization": (IMAGES, {"normalize": "mnist"}),
    "a dtype of no kernel": (IMAGES, {"dtype": torch.float64}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(case: str) -> None:
    images, options = REFUSED[case]
    with pytest.raises((FastaugError, ValueError)) as caught:
        fastaug.make_views(images, PLANS, **options)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "box",
    [
        (0, 0, 20_000, 20_000),
        (0, 0, 1, 2_000_000),
        (2**31 - 1, 0, 10, 10),
        (0, -(2**31), 10, 10),
    ],
)
def test_a_box_that_is_too_large_or_far_away_is_refused(box: tuple[int, ...]) -> None:
    boxes = PLANS.boxes.copy()
    boxes[1, 0] = box
    with raises(FastaugError, f"{box[3]} {box[2]} {box[1]} {box[0]}"):
        fastaug.make_views(IMAGES, replace(PLANS, boxes=boxes))


@pytest.mark.parametrize("size", [0, -1, 32.5, 10**6])
def test_a_plan_of_no_size_is_refused(size: int) -> None:
    with raises(FastaugError, f"1 16,384 {size}"):
        fastaug.make_views(IMAGES, replace(PLANS, size=size))


@pytest.mark.parametrize("name", ["boxes", "flips", "operations", "arguments"])
def test_a_plan_whose_arrays_do_not_fit_each_other_is_refused(name: str) -> None:
    """The kernel would read or write beyond the shorter ones."""
    with raises(FastaugError, "boxes"):
        fastaug.make_views(IMAGES, replace(PLANS, **{name: getattr(PLANS, name)[:, :1]}))


@pytest.mark.parametrize("argument", [np.nan, -np.inf, 1e300, -(2.0**31)])
def test_arguments_that_do_not_fit_32_bits_are_refused(argument: float) -> None:
    plans = fastaug.plan_views(IMAGES, views=2, size=16, augment="randaugment")
    arguments = plans.arguments.copy()
    arguments[3, 1, 0] = argument
    operations = np.full_like(plans.operations, POSTERIZE)
    with raises(FastaugError, "1,073,741,824"):
        fastaug.make_views(IMAGES, replace(plans, operations=operations, arguments=arguments))


def test_something_else_than_a_plan_is_refused() -> None:
    with raises(FastaugError, "fastaug.plan_views dict"):
        fastaug.make_views(IMAGES, {})


def test_plans_follow_from_the_images_numbers() -> None:
    options: dict = {"views": 3, "size": 16, "augment": "randaugment"}
    all_of_them = fastaug.plan_views(IMAGES, **options)
    later = fastaug.plan_views(IMAGES[2:], indices=range(2, len(IMAGES)), **options)
    np.testing.assert_array_equal(later.boxes, all_of_them.boxes[2:])
    np.testing.assert_array_equal(later.arguments, all_of_them.arguments[2:])
    for wrong in ([0], range(-1, len(IMAGES) - 1), [2**32] * len(IMAGES), [0.5] * len(IMAGES)):
        with raises(FastaugError, f"indices {len(IMAGES)}"):
            fastaug.plan_views(IMAGES, indices=wrong, **options)


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        (IMAGES[0], "uint8"),
        (None, "NoneType"),
        (IMAGES[0].numpy(), "[40 30 3]"),
        ([], ""),
        ([IMAGES[0].permute(2, 0, 1)], "permute(1"),
        ([IMAGES[0][..., 0]], "[40 30] expand(-1"),
        ([IMAGES[0].numpy()], "torch.from_numpy(image)"),
        ([IMAGES[0].float()], "torch.float32"),
    ],
)
def test_no_plans_for_what_are_no_images(images: list, reason: str) -> None:
    with raises(FastaugError, reason):
        fastaug.plan_views(images, views=2, size=16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augmnt": "none"}, "augmnt augment"),
        ({"interpolation": "bilinear"}, "interpolation make_views"),
        ({"randaugment_policy": "dali"}, "randaugment_policy"),
        ({"size": (32, 48)}, "size square (32 48)"),
        ({"size": 32.5}, "size 32.5"),
        ({"views": 2.0}, "views 2.0"),
        ({"views": 0}, "--views 0"),
        ({"seed": 0.5}, "seed 0.5"),
        ({"crop_area": 0.5}, "--crop-area 0.5"),
        ({"crop_area": (0.1, 0.5, 1)}, "--crop-area (0.1 0.5 1)"),
        ({"augment": "randaugment", "randaugment_layers": 2.5}, "randaugment_layers 2.5"),
        ({"augment": "rand"}, "--augment rand randaugment"),
    ],
)
def test_wrong_options_of_a_plan(options: dict, message: str) -> None:
    with raises(ConfigError, message):
        fastaug.plan_views(IMAGES, **{"views": 2, "size": 16, **options})


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    plan = fastaug.plan_views(IMAGES, views=np.int64(2), size=np.int32(16))
    np.testing.assert_array_equal(plan.boxes, PLANS.boxes)
    assert fastaug.make_views(IMAGES, plan).shape == (5, 2, 3, 16, 16)


@pytest.mark.parametrize("threads", [0, 1.5])
def test_a_wrong_number_of_threads_is_refused(threads: int) -> None:
    with raises(ConfigError, f"threads {threads}"):
        fastaug.make_views(IMAGES, PLANS, threads=threads)


@pytest.mark.parametrize("side", [2, 3])
@pytest.mark.parametrize("length", [0, -3])
def test_a_box_without_pixels_is_refused(side: int, length: int) -> None:
    boxes = PLANS.boxes.copy()
    boxes[3, 1, side] = length
    with raises((FastaugError, ValueError), str(length)) as caught:
        fastaug.make_views(IMAGES, replace(PLANS, boxes=boxes))
    assert "\n" not in str(caught.value)


# --- real photographs ---
