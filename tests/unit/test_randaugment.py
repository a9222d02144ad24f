"""The 16 operations against the numpy oracle, written from the formulas; how they are drawn."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from scipy import stats
from view_oracle import OPERATION_CASES as CASES
from view_oracle import operation as oracle
from view_oracle import photograph

from fastaug.config import TrainConfig
from fastaug.toolchain.build import source_folder
from fastaug.views.philox import TRAIN_VIEWS
from fastaug.views.plan import draw_plans
from fastaug.views.randaugment import NAMES, OPERATIONS, Operation, apply_operations

# name -> arguments at magnitude 5 on a 224 px view, from the table of the paper's source
AT_FIVE = {
    "auto_contrast": (),
    "equalize": (),
    "invert": (),
    "rotate": (15.0,),
    "posterize": (2,),
    "solarize": (128,),
    "solarize_add": (55,),
    "color": (1.0,),
    "contrast": (1.0,),
    "brightness": (1.0,),
    "sharpness": (1.0,),
    "shear_x": (0.15,),
    "shear_y": (0.15,),
    "translate_x": (50.0,),
    "translate_y": (50.0,),
}


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_an_operation_equals_the_oracle(name: str, arguments: tuple) -> None:
    image = photograph(0, 24, 24)
    ours = apply_operations(image, (Operation(name, arguments),))
    np.testing.assert_array_equal(ours, oracle(image, name, *arguments))


def test_the_cases_cover_every_operation() -> None:
    assert {name for name, _ in CASES} == set(NAMES)
    assert len(NAMES) == 16


def test_the_kernel_has_the_operations_of_the_table() -> None:
    """By name, in both directions; the codes themselves show in the pixels."""
    header = (source_folder() / "operations.h").read_text()
    enum = re.search(r"enum Operation \{(.+?)\};", header, re.DOTALL)
    second = re.search(r"bool needs_second_buffer\(int operation\) \{(.+?)\}", header, re.DOTALL)
    assert enum
    assert second
    names = re.findall(r"\w+", enum[1])
    assert names[0] == "NOTHING"
    assert set(names[1:]) == {spec.kernel for spec in OPERATIONS}
    assert set(re.findall(r"[A-Z_]{2,}", second[1])) == {
        spec.kernel for spec in OPERATIONS if spec.needs_second_buffer
    }
    assert set(names) == {name for name in names if f"case {name}:" in header} | {"NOTHING"}


def test_a_flat_image_survives_every_operation() -> None:
    flat = np.full((24, 24, 3), 77, np.uint8)
    for name, arguments in CASES:
        assert apply_operations(flat, (Operation(name, arguments),)).shape == flat.shape


def test_the_input_is_not_changed() -> None:
    image = photograph(0, 24, 24)
    before = image.copy()
    for name, arguments in CASES:
        apply_operations(image, (Operation(name, arguments),))
    np.testing.assert_array_equal(image, before)


def drawn(count: int, size: int = 224, magnitude: float = 5) -> list[Operation]:
    """Four operations for each of so many images, one image after another."""
    config = TrainConfig.from_flat(
        augment="randaugment",
        size=size,
        views=1,
        randaugment_layers=4,
        randaugment_magnitude=magnitude,
    )
    sizes = np.full((count, 2), 300)
    plans = draw_plans(config.view, config.run.seed, 0, TRAIN_VIEWS, np.arange(count), sizes)
    return [o for place in range(count) for o in plans.of_image(place)[0].operations]


def test_the_arguments_at_magnitude_five() -> None:
    for operation in drawn(500):
        if operation.name == "cutout":
            left, top, right, bottom = operation.arguments
            assert 20 <= right - left <= 40
            assert 20 <= bottom - top <= 40
        else:
            assert tuple(abs(a) for a in operation.arguments) == pytest.approx(
                AT_FIVE[operation.name]
            )


@pytest.mark.parametrize(
    ("magnitude", "posterize", "color", "rotate"),
    [(0, 0, 0.1, 0), (7, 2, 1.36, 21), (10, 4, 1.9, 30)],
)
def test_the_level_formulas(magnitude: float, posterize: int, color: float, rotate: float) -> None:
    by_name = {operation.name: operation for operation in drawn(300, magnitude=magnitude)}
    assert by_name["posterize"].arguments == (posterize,)
    assert by_name["color"].arguments == pytest.approx((color,))
    assert abs(by_name["rotate"].arguments[0]) == pytest.approx(rotate)


def test_translate_and_cutout_scale_with_the_view() -> None:
    small = {operation.name: operation for operation in drawn(300, size=56)}
    assert abs(small["translate_x"].arguments[0]) == pytest.approx(12.5)
    left, _, right, _ = small["cutout"].arguments
    assert right - left <= 10


def test_operations_and_signs_are_drawn_evenly() -> None:
    operations = drawn(4000)
    counts = Counter(operation.name for operation in operations)
    assert len(counts) == 16
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4
    signs = [operation.arguments[0] > 0 for operation in operations if operation.name == "rotate"]
    assert abs(np.mean(signs) - 0.5) < 0.05
    # Independent of the layer before: all pairs are equally likely.
    names = [operation.name for operation in operations]
    pairs = Counter(zip(names[0::4], names[1::4], strict=True))
    assert stats.chisquare([pairs[a, b] for a in NAMES for b in NAMES]).pvalue > 1e-4
