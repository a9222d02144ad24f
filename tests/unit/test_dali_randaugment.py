"""RandAugment as a DALI graph: each operation against the numpy oracle, in levels."""

from __future__ import annotations

import numpy as np
import pytest
from expect import raises
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.auto_aug.rand_augment import apply_rand_augment, get_rand_augment_suite
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import Pipeline
from view_oracle import OPERATION_CASES as CASES
from view_oracle import operation as oracle
from view_oracle import photograph

from fastaug.config import TrainConfig
from fastaug.errors import KernelUnavailableError
from fastaug.pipelines import randaugment as dali_randaugment
from fastaug.pipelines.randaugment import check_families, encode, randaugment
from fastaug.views.plan import ViewPlans
from fastaug.views.randaugment import (
    DALI_NAMES,
    NAMES,
    OPERATIONS,
    Operation,
    OperationSpec,
    apply_operations,
)

SIDE = 64
CPU = {"num_threads": 1, "device_id": None, "prefetch_queue_depth": 1}


@pipeline_def(enable_conditionals=True)
def graph(config: TrainConfig) -> DataNode:
    views = fn.external_source(name="views", dtype=types.UINT8, ndim=3, layout="HWC")
    choices = fn.external_source(name="choices", dtype=types.INT32, ndim=1)
    numbers = fn.external_source(name="numbers", dtype=types.FLOAT, ndim=2)
    return randaugment(views, choices, numbers, config.view)


def config_of(layers: int, **changes: object) -> TrainConfig:
    return TrainConfig.from_flat(
        size=SIDE, augment="randaugment", randaugment_layers=layers, loader="dali", **changes
    )


@pytest.fixture(scope="module")
def one_layer() -> Pipeline:
    return graph(config_of(1), batch_size=64, **CPU)


def apply(
    pipeline: Pipeline, config: TrainConfig, views: np.ndarray, layers: list[list[tuple]]
) -> np.ndarray:
    """views: [B, S, S, 3]; for each of them its operations as (place in the list, arguments)."""
    shape = (len(views), 1, config.view.randaugment_layers)
    operations, arguments = np.zeros(shape, np.int32), np.zeros((*shape, 4))
    for place, chosen in enumerate(layers):
        for layer, (operation, values) in enumerate(chosen):
            operations[place, 0, layer] = operation
            arguments[place, 0, layer, : len(values)] = values
    nothing = np.zeros((len(views), 1, 4), np.int32), np.zeros((len(views), 1), bool)
    choices, numbers = encode(ViewPlans(*nothing, operations, arguments, SIDE), config.view)
    for name, values in (("views", views), ("choices", choices), ("numbers", numbers)):
        pipeline.feed_input(name, values)
    pipeline.schedule_run()
    return np.asarray(pipeline.outputs()[0].as_tensor()).astype(int)


# Largest and mean difference in levels. auto_contrast and color: the last digit before a level is
# cut off; equalize: OpenCV's table, not Pillow's; rotate: pixels half way between two sources.
LIMITS = {"auto_contrast": (1, 0.02), "color": (1, 0.02), "equalize": (6, 3.5), "rotate": (255, 1)}


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_an_operation_equals_the_oracle(name: str, arguments: tuple, one_layer: Pipeline) -> None:
    views = np.stack([photograph(seed, SIDE, SIDE) for seed in range(4)])
    layers = [[(NAMES.index(name), arguments)]] * len(views)
    ours = apply(one_layer, config_of(1), views, layers)
    theirs = np.stack([oracle(view, name, *arguments) for view in views]).astype(int)
    difference = np.abs(ours - theirs)
    largest, mean = LIMITS.get(name, (0, 0))
    assert difference.max() <= largest
    assert difference.mean() <= mean
    if name == "rotate":
        assert (difference > 0).any(-1).mean() <= 0.005


def test_views_of_a_batch_get_their_own_operations(one_layer: Pipeline) -> None:
    """All cases side by side in one batch: each view the operation and arguments of its plan."""
    cases = [case for case in CASES if case[0] not in LIMITS]
    views = np.stack([photograph(seed, SIDE, SIDE) for seed in range(len(cases))])
    layers = [[(NAMES.index(name), arguments)] for name, arguments in cases]
    ours = apply(one_layer, config_of(1), views, layers)
    for view, found, (name, arguments) in zip(views, ours, cases, strict=True):
        np.testing.assert_array_equal(found, oracle(view, name, *arguments), err_msg=name)


def test_layers_follow_one_another() -> None:
    config = config_of(3)
    chosen = [("translate_x", (5.0,)), ("invert", ()), ("cutout", (2, 3, 9, 12))]
    view = photograph(0, SIDE, SIDE)
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        operations = [chosen[place] for place in order]
        layers = [[(NAMES.index(name), values) for name, values in operations]]
        found = apply(graph(config, batch_size=1, **CPU), config, view[None], layers)[0]
        expected = apply_operations(view, tuple(Operation(*operation) for operation in operations))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("value", [0, 77, 255])
def test_a_flat_view_survives_every_operation(value: int, one_layer: Pipeline) -> None:
    views = np.full((len(CASES), SIDE, SIDE, 3), value, np.uint8)
    layers = [[(NAMES.index(name), arguments)] for name, arguments in CASES]
    for (name, arguments), found in zip(
        CASES, apply(one_layer, config_of(1), views, layers), strict=True
    ):
        if name == "auto_contrast":
            np.testing.assert_array_equal(found, value)
        elif name not in ("equalize", "rotate"):
            np.testing.assert_array_equal(found, oracle(views[0], name, *arguments), err_msg=name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestDaliPolicy:
    """DALI's own list, its choices and signs from the plan, against DALI's own sampling."""

    MAGNITUDE = 17

    def test_the_names_are_dali_s(self) -> None:
        assert tuple(augmentation.name for augmentation in get_rand_augment_suite()) == DALI_NAMES

    @pytest.mark.parametrize("name", DALI_NAMES)
    def test_an_operation_is_dali_s_own(self, name: str) -> None:
        count = 24
        views = np.repeat(photograph(1, SIDE, SIDE)[None], count, axis=0)

        @pipeline_def(enable_conditionals=True)
        def theirs() -> DataNode:
            data = fn.external_source(name="views", dtype=types.UINT8, ndim=3, layout="HWC")
            (only,) = (a for a in get_rand_augment_suite(use_shape=True) if a.name == name)
            return apply_rand_augment([only], data, n=1, m=self.MAGNITUDE, **options)

        options: dict = {}
        if name in DALI_NAMES[:5]:
            options = {"fill_value": 128, "interp_type": types.INTERP_LINEAR}
        if name in DALI_NAMES[:2]:
            options["shape"] = [SIDE, SIDE]
        pipeline = theirs(batch_size=count, seed=3, **CPU)
        pipeline.feed_input("views", views)
        expected = np.asarray(pipeline.run()[0].as_tensor()).astype(int)
        config = config_of(1, randaugment_policy="dali", randaugment_magnitude=self.MAGNITUDE)
        place = DALI_NAMES.index(name)
        plus, minus = apply(
            graph(config, batch_size=2, **CPU),
            config,
            views[:2],
            [[(place, (s,))] for s in (1, -1)],
        )
        is_plus = (expected == plus).all((1, 2, 3))
        is_minus = (expected == minus).all((1, 2, 3))
        assert (is_plus | is_minus).all()
        signed = (plus != minus).any()
        assert signed == (name not in DALI_NAMES[9:])
        if signed:  # both signs were drawn, and tell the two apart
            assert 0 < is_plus.sum() < count
            assert not (is_plus & is_minus).any()


def test_an_operation_without_a_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_families()
    emboss = OperationSpec("emboss", lambda image: image, arguments=0)
    monkeypatch.setattr(dali_randaugment, "OPERATIONS", (*OPERATIONS, emboss))
    with raises(KernelUnavailableError, "--views-engine emboss fused"):
        check_families()
