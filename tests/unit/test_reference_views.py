"""Plans and the views made from them, against independent numpy, torch and Pillow versions."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from expect import raises
from PIL import Image
from scipy import stats

from fastaug.config import TrainConfig
from fastaug.errors import DataError
from fastaug.normalization import NORMALIZATION
from fastaug.views.philox import TRAIN_VIEWS, philox, uniforms, uniforms_at
from fastaug.views.plan import ViewPlan, draw_plans
from fastaug.views.randaugment import Operation
from fastaug.views.reference import denormalize, reference_views, resize


def image_of(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def plans(config: TrainConfig, height: int, width: int, count: int) -> list[ViewPlan]:
    """Of the first view of so many images."""
    sizes = np.tile([[height, width]], (count, 1))
    drawn = draw_plans(config.view, config.run.seed, 0, TRAIN_VIEWS, np.arange(count), sizes)
    return [drawn.of_image(place)[0] for place in range(count)]


class TestStream:
    @pytest.mark.parametrize(
        ("counter", "key", "words"),
        [
            ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
            ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
            (
                (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
                (0xA4093822, 0x299F31D0),
                "d16cfe09 94fdcceb 5001e420 24126ea1",
            ),
        ],
    )
    def test_philox_gives_the_known_answers(self, counter: tuple, key: tuple, words: str) -> None:
        """Of the generator's authors (Random123). Other numbers would change resumed runs."""
        found = philox([np.array([word], np.uint64) for word in counter], key)
        assert " ".join(f"{word:08x}" for word in found[0]) == words

    def test_each_part_of_the_address_counts(self) -> None:
        base = (3, 1, TRAIN_VIEWS)
        addresses = [base] + [(*base[:i], base[i] + 1, *base[i + 1 :]) for i in range(3)]
        drawn = [uniforms(*address, np.array([4, 5]), 3, 6) for address in addresses]
        assert len(set(np.concatenate(drawn, axis=None).tolist())) == 4 * 2 * 3 * 6

    def test_a_number_depends_only_on_its_address(self) -> None:
        many = uniforms(3, 1, TRAIN_VIEWS, np.arange(10), 4, 9)
        few = uniforms(3, 1, TRAIN_VIEWS, np.array([7]), 2, 5)
        np.testing.assert_array_equal(few[0], many[7, :2, :5])

    @pytest.mark.parametrize(
        "places", [[range(3)], [range(4), range(41, 53)], [range(7, 8), range(1, 9), range(6, 6)]]
    )
    def test_numbers_at_some_places_are_those_of_all(self, places: list[range]) -> None:
        address = (3, 1, TRAIN_VIEWS, np.array([7, 2]), 2)
        everything = uniforms(*address, 60)
        found = uniforms_at(*address, *places)
        for wanted, numbers in zip(places, found, strict=True):
            np.testing.assert_array_equal(numbers, everything[..., list(wanted)])

    def test_numbers_are_uniform(self) -> None:
        across = uniforms(0, 0, TRAIN_VIEWS, np.arange(4000), 1, 1)[:, 0, 0]
        within = uniforms(7, 0, TRAIN_VIEWS, np.zeros(1), 1, 4000)[0, 0]
        for numbers in (across, within):
            assert stats.kstest(numbers, "uniform").pvalue > 1e-4
            assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.06


class TestPlan:
    def test_resized_boxes_have_the_distribution(self) -> None:
        config = TrainConfig.from_flat(crop_area=(0.25, 0.6))
        drawn = plans(config, 375, 500, 3000)
        areas = np.array([p.height * p.width / (375 * 500) for p in drawn])
        log_ratios = np.log([p.width / p.height for p in drawn])
        for p in drawn:
            assert 0 <= p.top <= 375 - p.height
            assert 0 <= p.left <= 500 - p.width
        # No box of these areas and ratios is refused at this shape, so both stay as drawn.
        assert stats.kstest(areas, stats.uniform(0.25, 0.35).cdf).pvalue > 1e-4
        edge = math.log(4 / 3)
        assert stats.kstest(log_ratios, stats.uniform(-edge, 2 * edge).cdf).pvalue > 1e-4
        assert abs(np.mean([p.flip for p in drawn]) - 0.5) < 0.04
        slack = [p.left / (500 - p.width) for p in drawn if p.width < 450]
        assert abs(np.mean(slack) - 0.5) < 0.03

    @pytest.mark.parametrize(("sampling", "expected"), [("dali", 0.435), ("tf", 0.388)])
    def test_mean_area_of_imagenet_s_crop(self, sampling: str, expected: float) -> None:
        """At 375 x 500; both figures are of emulations by others than this code."""
        config = TrainConfig.from_flat(crop_area=(0.08, 1.0), crop_sampling=sampling)
        drawn = plans(config, 375, 500, 20_000)
        mean = np.mean([p.height * p.width / (375 * 500) for p in drawn])
        assert abs(mean - expected) < 0.005

    def test_an_image_too_long_for_any_box_gets_the_largest_of_an_allowed_ratio(self) -> None:
        drawn = plans(TrainConfig.from_flat(crop_area=(0.9, 1.0)), 10, 400, 500)
        assert {(p.top, p.height, p.width) for p in drawn} == {(0, 10, 13)}
        assert {p.left for p in drawn} <= set(range(388))
        assert np.std([p.left for p in drawn]) > 90  # anywhere along the strip

    def test_padded_boxes_are_even_over_all_places(self) -> None:
        drawn = plans(TrainConfig.from_flat(crop="pad", size=32), 32, 32, 8100)
        counts = Counter((p.top, p.left) for p in drawn)
        assert set(counts) == {(top, left) for top in range(-4, 5) for left in range(-4, 5)}
        assert {(p.height, p.width) for p in drawn} == {(32, 32)}
        assert stats.chisquare(list(counts.values())).pvalue > 1e-4

    def test_pad_needs_images_of_the_view_size(self) -> None:
        with raises(DataError, "32 40 30 --crop"):
            plans(TrainConfig.from_flat(crop="pad", size=32), 30, 40, 1)

    @pytest.mark.parametrize(
        ("height", "width", "box"),
        [(256, 256, (16, 16, 224, 224)), (375, 500, (23, 86, 328, 328)), (1, 1, (0, 0, 1, 1))],
    )
    def test_the_central_crop(self, height: int, width: int, box: tuple) -> None:
        assert plans(TrainConfig.from_flat(size=224, augment="none"), height, width, 1) == [
            ViewPlan(*box)
        ]

    def test_without_augmentation_every_view_is_the_central_crop(self) -> None:
        config = TrainConfig.from_flat(augment="none", views=3, batch_size=3)
        drawn = draw_plans(
            config.view, config.run.seed, 0, TRAIN_VIEWS, np.arange(2), np.array([[50, 60]] * 2)
        )
        assert drawn.of_image(0) == drawn.of_image(1) == [ViewPlan(3, 8, 44, 44)] * 3


MODES = [(name, wide) for name in ("bilinear", "bicubic") for wide in (False, True)]
"""--interpolation and --antialias."""
SHAPES = [(13, 20, 16), (40, 9, 16), (1, 3, 8), (61, 50, 8), (16, 40, 16)]
"""Heights and widths of crops, and the sides of their views: enlarged, shrunk, or one of each."""


def filter_weight(name: str, x: float) -> float:
    """The triangle, and Keys' cubic as its paper has it for any a, here -1/2."""
    x, a = abs(x), -0.5
    if name == "bilinear":
        return max(0.0, 1 - x)
    if x < 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def by_hand(image: np.ndarray, size: int, name: str, antialias: bool) -> np.ndarray:
    """The resized image from the definition, pixel by pixel in float64."""

    def along(line: np.ndarray) -> np.ndarray:
        n = len(line)
        widen = n / size if antialias and n > size else 1
        out = np.zeros((size, *line.shape[1:]))
        for i in range(size):
            center, total = (i + 0.5) * n / size, 0.0
            for j in range(-3 * n - 3, 4 * n + 3):  # far more than any filter reaches
                weight = filter_weight(name, (j + 0.5 - center) / widen)
                out[i] += weight * line[min(max(j, 0), n - 1)]
                total += weight
            out[i] /= total
        return out

    rows = along(image.astype(np.float64))
    return along(rows.transpose(1, 0, 2)).transpose(1, 0, 2)


def resized(image: np.ndarray, size: int, name: str, antialias: bool) -> np.ndarray:
    return resize(torch.from_numpy(image.astype(np.float32)), size, name, antialias).numpy()


@pytest.mark.parametrize(("name", "antialias"), MODES)
class TestResize:
    @pytest.mark.parametrize(("height", "width", "size"), SHAPES)
    def test_by_hand(self, height: int, width: int, size: int, name: str, antialias: bool) -> None:
        image = image_of(height, width)
        expected = by_hand(image, size, name, antialias)
        np.testing.assert_allclose(resized(image, size, name, antialias), expected, atol=1e-3)

    def test_a_side_that_fits_is_copied(self, name: str, antialias: bool) -> None:
        image = image_of(16, 16)
        np.testing.assert_array_equal(resized(image, 16, name, antialias), image)

    @pytest.mark.parametrize(("side", "size"), [(20, 60), (90, 32), (300, 41)])
    def test_pillow_s(self, side: int, size: int, name: str, antialias: bool) -> None:
        """Away from the edges, where Pillow leaves out what lies beyond. It antialiases always,
        which changes nothing when enlarging."""
        image = image_of(side, side)
        channels = [Image.fromarray(image[..., c].astype(np.float32)) for c in range(3)]
        how = Image.Resampling[name.upper()]
        pillow = np.stack([np.asarray(c.resize((size, size), how)) for c in channels], axis=-1)
        margin = 3 * max(1, size // side)
        inner = np.s_[margin:-margin, margin:-margin]
        difference = np.abs(resized(image, size, name, antialias) - pillow)[inner]
        if antialias or size > side:
            assert difference.max() < 1e-3
        else:
            assert difference.max() > 10


class TestReferenceViews:
    @pytest.mark.parametrize(("name", "antialias"), MODES)
    def test_a_view_step_by_step(self, name: str, antialias: bool) -> None:
        config = TrainConfig.from_flat(size=16, interpolation=name, antialias=antialias)
        image = image_of(30, 40)
        plan = ViewPlan(top=3, left=5, height=20, width=25, flip=True)
        crop = by_hand(image[3:23, 5:30], 16, name, antialias)[:, ::-1]
        mean, deviation = NORMALIZATION["imagenet"]
        (view,) = reference_views(image, [plan], config.view)
        np.testing.assert_allclose(view, (crop - mean) / deviation, atol=1e-4)

    def test_the_cifar_view_is_an_exact_crop_of_the_reflected_image(self) -> None:
        config = TrainConfig.from_flat(size=32, crop="pad", normalize="cifar")
        image = image_of(32, 32)
        padded = np.asarray(
            torch.nn.functional.pad(
                torch.from_numpy(image.transpose(2, 0, 1)).float(), (4, 4, 4, 4), mode="reflect"
            )
        ).transpose(1, 2, 0)
        (view,) = reference_views(image, [ViewPlan(-4, 3, 32, 32, flip=True)], config.view)
        mean, deviation = np.array([125.3, 123.0, 113.9]), np.array([63.0, 62.1, 66.7])
        expected = (padded[0:32, 7:39][:, ::-1] - mean) / deviation
        np.testing.assert_allclose(view, expected, atol=1e-5)

    def test_the_central_cifar_view_is_the_image(self) -> None:
        config = TrainConfig.from_flat(size=32, crop="pad", normalize="cifar")
        image = image_of(32, 32)
        (central,) = plans(config.replace(augment="none"), 32, 32, 1)
        (view,) = reference_views(image, [central], config.view)
        back = denormalize(view.permute(2, 0, 1), config.view)
        np.testing.assert_array_equal(back.permute(1, 2, 0), image)

    @pytest.mark.parametrize(("name", "antialias"), MODES)
    def test_randaugment_acts_on_whole_clipped_levels(self, name: str, antialias: bool) -> None:
        """Cut, not rounded, as TensorFlow casts."""
        config = TrainConfig.from_flat(
            size=16, augment="randaugment", interpolation=name, antialias=antialias
        )
        image = image_of(23, 13) // 64 * 85  # 0, 85, 170, 255: bicubic goes beyond both ends
        levels = by_hand(image, 16, name, antialias)
        if name == "bicubic":
            assert levels.min() < -1
            assert levels.max() > 256
        (view,) = reference_views(image, [inverted(0, 0, 23, 13)], config.view)
        found = 255 - denormalize(view.permute(2, 0, 1), config.view).permute(1, 2, 0).numpy()
        sure = np.abs(levels - np.rint(levels)) > 0.004
        assert sure.mean() > 0.9
        expected = np.floor(levels.clip(0, 255))
        np.testing.assert_array_equal(found[sure], expected[sure])

    @pytest.mark.parametrize(("name", "antialias"), MODES)
    def test_flat_images_keep_their_level_before_randaugment(
        self, name: str, antialias: bool
    ) -> None:
        config = TrainConfig.from_flat(
            size=16, augment="randaugment", interpolation=name, antialias=antialias
        )
        for level in range(1, 255, 3):
            image = np.full((60, 47, 3), level, np.uint8)
            boxes = [(0, 0, 60, 47), (2, 3, 13, 11), (5, 1, 37, 9)]
            views = reference_views(image, [inverted(*box) for box in boxes], config.view)
            assert (denormalize(views.permute(0, 3, 1, 2), config.view) == 255 - level).all()


def inverted(*box: int) -> ViewPlan:
    """The operation that changes every level, and is its own inverse."""
    return ViewPlan(*box, operations=(Operation("invert"),))
