"""Plans and the views made from them, against independent numpy, torch and Pillow versions."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from fastaug.config import TrainConfig
from fastaug.data.plan import ViewPlan, central_plan, draw_plan
from fastaug.data.stream import TRAIN_VIEWS, Stream
from fastaug.data.views import NORMALISATION, denormalise, make_views, resize
from fastaug.errors import DataError


def image_of(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def plans(config: TrainConfig, height: int, width: int, count: int) -> list[ViewPlan]:
    streams = (Stream(0, 0, TRAIN_VIEWS, index) for index in range(count))
    return [draw_plan(stream, height, width, config) for stream in streams]


class TestStream:
    def test_each_part_of_the_address_counts(self) -> None:
        base = (3, 1, TRAIN_VIEWS, 4, 1)
        addresses = [base] + [(*base[:i], base[i] + 1, *base[i + 1 :]) for i in range(5)]
        assert len({Stream(*address).uniform() for address in addresses}) == 6
        assert Stream(*base).uniform() == Stream(*base).uniform()

    def test_numbers_are_uniform(self) -> None:
        drawn = [Stream(0, 0, TRAIN_VIEWS, index).uniform() for index in range(4000)]
        assert stats.kstest(drawn, "uniform").pvalue > 1e-4
        within = Stream(7, 0, TRAIN_VIEWS)
        assert stats.kstest([within.uniform() for _ in range(4000)], "uniform").pvalue > 1e-4

    def test_below_is_even(self) -> None:
        stream = Stream(0, 0, TRAIN_VIEWS)
        counts = Counter(stream.below(16) for _ in range(16_000))
        assert sorted(counts) == list(range(16))
        assert stats.chisquare(list(counts.values())).pvalue > 1e-4

    def test_permutation(self) -> None:
        order = Stream(0, 0, 0).permutation(1000)
        assert sorted(order.tolist()) == list(range(1000))
        assert (order != Stream(0, 1, 0).permutation(1000)).any()

    def test_the_numbers_are_pinned(self) -> None:
        """Other numbers would change every run that is resumed."""
        first = [Stream(0, 0, TRAIN_VIEWS).uniform(), Stream(1, 2, TRAIN_VIEWS, 3, 4).uniform()]
        np.testing.assert_allclose(first, [0.34218278474233466, 0.8231355163718505], rtol=1e-15)


class TestPlan:
    def test_resized_boxes_have_the_distribution(self) -> None:
        config = TrainConfig(crop_area=(0.25, 0.6))
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

    def test_mean_area_of_imagenet_s_crop(self) -> None:
        """facts: 0.435 at 375 x 500 with DALI's and torchvision's sampling, 0.388 with TF's."""
        drawn = plans(TrainConfig(crop_area=(0.08, 1.0)), 375, 500, 20_000)
        mean = np.mean([p.height * p.width / (375 * 500) for p in drawn])
        assert abs(mean - 0.435) < 0.005

    def test_an_image_too_long_for_any_box_gets_the_largest_centred_one(self) -> None:
        config = TrainConfig(crop_area=(0.9, 1.0))
        assert plans(config, 10, 400, 1)[0] == ViewPlan(
            0, 193, 10, 13, plans(config, 10, 400, 1)[0].flip
        )

    def test_padded_boxes_are_even_over_all_places(self) -> None:
        drawn = plans(TrainConfig(crop="pad", size=32), 32, 32, 8100)
        counts = Counter((p.top, p.left) for p in drawn)
        assert len(counts) == 81
        assert stats.chisquare(list(counts.values())).pvalue > 1e-4

    def test_pad_needs_images_of_the_view_size(self) -> None:
        with pytest.raises(DataError, match=r"\(32 x 32\), got one of 40 x 30; use --crop resized"):
            plans(TrainConfig(crop="pad", size=32), 30, 40, 1)

    @pytest.mark.parametrize(
        ("height", "width", "box"),
        [(256, 256, (16, 16, 224, 224)), (375, 500, (23, 86, 328, 328)), (1, 1, (0, 0, 1, 1))],
    )
    def test_the_central_crop(self, height: int, width: int, box: tuple) -> None:
        assert central_plan(height, width, TrainConfig(size=224)) == ViewPlan(*box)

    def test_without_augmentation_every_view_is_the_central_crop(self) -> None:
        config = TrainConfig(augment="none")
        assert plans(config, 50, 60, 3) == [central_plan(50, 60, config)] * 3


def cubic_by_hand(image: np.ndarray, size: int) -> np.ndarray:
    """Keys' cubic with a = -0.5, pixel by pixel in float64."""

    def kernel(x: float) -> float:
        x = abs(x)
        if x <= 1:
            return 1.5 * x**3 - 2.5 * x**2 + 1
        return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0

    def along(line: np.ndarray) -> np.ndarray:
        n = len(line)
        out = np.zeros((size, *line.shape[1:]))
        for i in range(size):
            x = (i + 0.5) * n / size - 0.5
            for j in range(math.floor(x) - 1, math.floor(x) + 3):
                out[i] += kernel(x - j) * line[min(max(j, 0), n - 1)]
        return out

    rows = along(image.astype(np.float64))
    return along(rows.transpose(1, 0, 2)).transpose(1, 0, 2)


class TestMakeViews:
    @pytest.mark.parametrize(("height", "width", "size"), [(13, 20, 16), (40, 9, 16), (1, 3, 8)])
    def test_resize(self, height: int, width: int, size: int) -> None:
        image = image_of(height, width)
        ours = resize(torch.from_numpy(image.astype(np.float32)), size)
        np.testing.assert_allclose(ours, cubic_by_hand(image, size), atol=1e-3)

    def test_enlarging_agrees_with_pillow(self) -> None:
        """Pillow antialiases, which changes nothing when enlarging, except at the edges."""
        image = image_of(20, 20) // 2 + 64  # no overshoot: Pillow clips between the two passes
        pillow = Image.fromarray(image).resize((60, 60), Image.Resampling.BICUBIC)
        ours = resize(torch.from_numpy(image.astype(np.float32)), 60).clamp(0, 255)
        difference = np.abs(ours.numpy() - np.asarray(pillow, np.float32))[6:-6, 6:-6]
        assert difference.max() <= 1.5  # Pillow rounds after each of its two passes

    def test_a_view_step_by_step(self) -> None:
        config = TrainConfig(size=16)
        image = image_of(30, 40)
        plan = ViewPlan(top=3, left=5, height=20, width=25, flip=True)
        crop = cubic_by_hand(image[3:23, 5:30], 16)[:, ::-1]
        mean, deviation = NORMALISATION["imagenet"]
        (view,) = make_views(image, [plan], config)
        np.testing.assert_allclose(view, (crop - mean) / deviation, atol=1e-4)

    def test_the_cifar_view_is_an_exact_crop_of_the_reflected_image(self) -> None:
        config = TrainConfig(size=32, crop="pad", normalise="cifar")
        image = image_of(32, 32)
        padded = np.asarray(
            torch.nn.functional.pad(
                torch.from_numpy(image.transpose(2, 0, 1)).float(), (4, 4, 4, 4), mode="reflect"
            )
        ).transpose(1, 2, 0)
        (view,) = make_views(image, [ViewPlan(0, 7, 32, 32, flip=True)], config)
        mean, deviation = np.array([125.3, 123.0, 113.9]), np.array([63.0, 62.1, 66.7])
        expected = (padded[0:32, 7:39][:, ::-1] - mean) / deviation
        np.testing.assert_allclose(view, expected, atol=1e-5)

    def test_the_central_cifar_view_is_the_image(self) -> None:
        config = TrainConfig(size=32, crop="pad", normalise="cifar")
        image = image_of(32, 32)
        (view,) = make_views(image, [central_plan(32, 32, config)], config)
        back = denormalise(view.permute(2, 0, 1), config)
        np.testing.assert_array_equal(back.permute(1, 2, 0), image)

    def test_randaugment_acts_on_the_clipped_view(self) -> None:
        config = TrainConfig(size=16, augment="randaugment")
        image = image_of(16, 16)
        plan = draw_plan(Stream(0, 0, TRAIN_VIEWS, 5), 16, 16, config)
        assert len(plan.operations) == 4
        (view,) = make_views(image, [plan], config)
        levels = view * torch.tensor(NORMALISATION["imagenet"][1])
        levels += torch.tensor(NORMALISATION["imagenet"][0])
        torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-3)
