"""How views are drawn: against DALI's own sampling, TensorFlow's, and for independence."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def, types
from scipy import stats

from fastaug.config import TrainConfig
from fastaug.views.philox import TRAIN_VIEWS
from fastaug.views.plan import ViewPlans, draw_plans

SHAPES = [(375, 500), (64, 64), (40, 200), (300, 90), (13, 17)]


def draw(count: int, shape: tuple[int, int], **changes: object) -> ViewPlans:
    config = TrainConfig.from_flat(
        **({"views": 1, "batch_size": 8, "crop_area": (0.08, 1.0)} | changes)
    )
    return draw_plans(
        config.view, config.run.seed, 3, TRAIN_VIEWS, np.arange(count), np.tile([shape], (count, 1))
    )


def assert_same_distribution(ours: np.ndarray, theirs: np.ndarray) -> None:
    """boxes: [N, 4] each; areas, ratios and places, by two-sample Kolmogorov-Smirnov tests."""
    for name, measure in {
        "area": lambda box: box[:, 2] * box[:, 3],
        "ratio": lambda box: box[:, 3] / box[:, 2],
        "top": lambda box: box[:, 0],
        "left": lambda box: box[:, 1],
    }.items():
        assert stats.ks_2samp(measure(ours), measure(theirs)).pvalue > 1e-4, name


@pytest.mark.parametrize("area", [(0.08, 1.0), (0.35, 1.0), (0.9, 0.95)])
@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_are_distributed_as_dali_s(shape: tuple[int, int], area: tuple) -> None:
    count = 4000

    @pipeline_def
    def dali() -> tuple:
        size = types.Constant(np.array([*shape, 3]), dtype=types.INT64)
        corner, extent = fn.random_crop_generator(
            size, random_area=list(area), random_aspect_ratio=[3 / 4, 4 / 3], num_attempts=10
        )
        return corner, extent

    pipeline = dali(batch_size=count, num_threads=1, device_id=None, seed=1)
    corners, sizes = (np.asarray(out.as_tensor()) for out in pipeline.run())
    ours = draw(count, shape, crop_area=area).boxes[:, 0]
    assert_same_distribution(ours, np.concatenate([corners, sizes], axis=1))


def tensorflow_box(rng: np.random.Generator, height: int, width: int, area: tuple) -> tuple:
    """sample_distorted_bounding_box, one box after another, from a description of its kernel."""
    for _ in range(10):
        ratio = rng.uniform(3 / 4, 4 / 3)
        least, most = (share * height * width for share in area)
        low, high = round(math.sqrt(least / ratio)), round(math.sqrt(most / ratio))
        while round(high * ratio) > width:
            high -= 1
        high = min(high, height)
        low = min(low, high)
        h = int(rng.integers(low, high + 1))
        w = round(h * ratio)
        if h * w < least:
            h += 1
            w = round(h * ratio)
        if h * w > most:
            h -= 1
            w = round(h * ratio)
        if not (least <= h * w <= most and 0 < w <= width and 0 < h <= height):
            continue
        top = int(rng.integers(0, height - h)) if h < height else 0
        left = int(rng.integers(0, width - w)) if w < width else 0
        if h * w < 0.1 * height * width:  # min_object_covered
            continue
        if (h, w) != (height, width):
            return top, left, h, w
        break
    side = round(min(height, width) * 224 / 256)
    return (height - side) // 2, (width - side) // 2, side, side


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_are_distributed_as_tensorflow_s(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    theirs = np.array([tensorflow_box(rng, *shape, (0.08, 1.0)) for _ in range(4000)])
    assert_same_distribution(draw(4000, shape, crop_sampling="tf").boxes[:, 0], theirs)


@pytest.mark.parametrize(
    ("shape", "area", "box"),
    [((64, 64), (1.0, 1.0), (4, 4, 56, 56)), ((40, 200), (0.5, 1.0), (2, 82, 35, 35))],
)
def test_tensorflow_s_last_resort_is_the_central_crop(
    shape: tuple[int, int], area: tuple, box: tuple
) -> None:
    """No box of these areas fits, or the whole image alone."""
    boxes = draw(500, shape, crop_sampling="tf", crop_area=area).boxes
    assert (boxes == box).all()


@pytest.mark.parametrize("sampling", ["dali", "tf"])
def test_boxes_lie_within_images_of_any_shape(sampling: str) -> None:
    rng = np.random.default_rng(0)
    sizes = np.concatenate([[[1, 1], [1, 500], [500, 1], [2, 3]], rng.integers(1, 90, (500, 2))])
    for area in ((0.08, 1.0), (0.001, 0.002), (1.0, 1.0)):
        config = TrainConfig.from_flat(crop_area=area, crop_sampling=sampling)
        boxes = draw_plans(
            config.view, config.run.seed, 0, TRAIN_VIEWS, np.arange(len(sizes)), sizes
        ).boxes
        assert (boxes[..., 2:] >= 1).all()
        assert (boxes[..., :2] >= 0).all()
        assert (boxes[..., :2] + boxes[..., 2:] <= sizes[:, None]).all()


@pytest.mark.parametrize("augment", ["crop-flip", "randaugment"])
@pytest.mark.parametrize(
    ("sampling", "boxes"),
    [
        ("pad", [(2, -4, 32, 32), (-4, -1, 32, 32), (-4, -4, 32, 32), (3, -1, 32, 32)]),
        ("dali", [(13, 52, 91, 120), (3, 112, 104, 106), (1, 70, 118, 94), (3, 37, 116, 116)]),
        ("tf", [(10, 103, 96, 112), (0, 57, 118, 91), (1, 29, 117, 90), (8, 51, 109, 134)]),
    ],
)
def test_views_are_those_of_earlier_versions(sampling: str, boxes: list, augment: str) -> None:
    """As the first version drew them: a run that is resumed must not see other crops."""
    how = {"crop": "pad"} if sampling == "pad" else {"crop_sampling": sampling}
    config = TrainConfig.from_flat(seed=5, augment=augment, size=32, **how)
    shape = (32, 32) if sampling == "pad" else (119, 251)
    plans = draw_plans(
        config.view, config.run.seed, 2, TRAIN_VIEWS, np.array([149]), np.array([shape])
    )
    assert plans.size == 32
    assert [tuple(box) for box in plans.boxes[0].tolist()] == boxes
    assert plans.flips[0].tolist() == [True, True, False, False]
    chosen = [[0, 3, 7, 7], [0, 10, 12, 9], [3, 14, 1, 5], [6, 4, 15, 6]]
    assert plans.operations[0].tolist() == (chosen if augment == "randaugment" else [[]] * 4)


def independent(first: np.ndarray, second: np.ndarray) -> float:
    """The p-value of the hypothesis that two draws, whole numbers from 0, are independent."""
    table = np.zeros((first.max() + 1, second.max() + 1))
    np.add.at(table, (first, second), 1)
    return stats.chi2_contingency(table).pvalue


class TestViewsAreIndependent:
    COUNT, K = 6000, 4

    @pytest.fixture(scope="class")
    @classmethod
    def plans(cls) -> ViewPlans:
        return draw(
            cls.COUNT,
            (375, 500),
            views=cls.K,
            augment="randaugment",
            crop_area=(0.2, 0.5),
            randaugment_layers=2,
        )

    def test_views_differ(self, plans: ViewPlans) -> None:
        for first, second in itertools.combinations(range(self.K), 2):
            same = (plans.boxes[:, first] == plans.boxes[:, second]).all(-1)
            assert same.mean() < 1e-3

    @pytest.fixture(scope="class")
    @classmethod
    def drawn(cls, plans: ViewPlans) -> dict[str, np.ndarray]:
        """What was drawn for each view, [COUNT, K], as whole numbers; continuous draws as their
        rank, cut into six of equal size."""

        def ranks(values: np.ndarray) -> np.ndarray:
            return np.argsort(np.argsort(values, axis=0, kind="stable"), axis=0) * 6 // cls.COUNT

        top, left, height, width = np.moveaxis(plans.boxes, -1, 0).astype(float)
        return {
            "area": ranks(height * width),
            "top": ranks(top / (375 - height + 1)),
            "left": ranks(left / (500 - width + 1)),
            "flip": plans.flips.astype(int),
            "first operation": plans.operations[..., 0],
            "second operation": plans.operations[..., 1],
            "sign": (plans.arguments[..., 1, 0] > 0).astype(int),
        }

    # The limits of the chi-square tests allow for their number.

    def test_no_two_views_know_of_each_other(self, drawn: dict[str, np.ndarray]) -> None:
        for first, second in itertools.combinations(range(self.K), 2):
            for one, other in itertools.product(drawn, drawn):
                p = independent(drawn[one][:, first], drawn[other][:, second])
                assert p > 1e-6, (first, one, second, other)

    def test_the_draws_of_a_view_do_not_know_of_each_other(
        self, drawn: dict[str, np.ndarray]
    ) -> None:
        for one, other in itertools.combinations(drawn, 2):
            if (one, other) != ("second operation", "sign"):  # some operations have none
                assert independent(drawn[one][:, 0], drawn[other][:, 0]) > 1e-6, (one, other)

    def test_the_next_image_is_another_draw(self, drawn: dict[str, np.ndarray]) -> None:
        for name, values in drawn.items():
            assert independent(values[:-1, 0], values[1:, 0]) > 1e-6, name

    @pytest.mark.parametrize(("policy", "count"), [("nfnet", 16), ("dali", 14)])
    def test_every_operation_is_as_likely(self, policy: str, count: int) -> None:
        changes = {"augment": "randaugment", "randaugment_policy": policy, "loader": "dali"}
        chosen = draw(5000, (40, 40), **changes).operations
        counts = np.bincount(chosen.ravel(), minlength=count)
        assert len(counts) == count
        assert stats.chisquare(counts).pvalue > 1e-4
        signs = draw(5000, (40, 40), **changes).arguments[..., 0]
        if policy == "dali":
            assert stats.binomtest(int((signs > 0).sum()), signs.size).pvalue > 1e-4
