"""The graphs that a GPU would get, which cannot be built here: walked, operator by operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import nvidia.dali.ops as dali_ops
import pytest
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import Pipeline

from fastaug.config import TrainConfig
from fastaug.pipelines.dali_views import view_pipeline
from fastaug.pipelines.decoder import decode_pipeline


class Operator(NamedTuple):
    name: str
    """In DALI's registry."""
    device: str
    sources: list[str]
    """Devices where its inputs were made."""
    inputs: list[str]
    """Devices where it finds its positional inputs, which a GPU takes on the GPU."""
    arguments: list[str]
    """Devices where it finds its named inputs, which are always on the host."""


def operators(pipeline: Pipeline) -> Iterator[Operator]:
    """Each operator of a graph."""
    waiting, seen = list(pipeline._graph_out), set()
    while waiting:
        operator = waiting.pop().source
        if id(operator) in seen:
            continue
        seen.add(id(operator))
        edges = [
            edge
            for given in operator.inputs
            for edge in (given if isinstance(given, list) else [given])
        ]
        waiting += edges
        name = getattr(operator._op, "schema_name", None) or type(operator._op).__name__
        devices, positional = [edge.device for edge in edges], operator._spec.NumRegularInput()
        yield Operator(
            name,
            operator._op.device,
            [edge.source._op.device for edge in edges],
            devices[:positional],
            devices[positional:],
        )


def misplaced(pipeline: Pipeline) -> list[str]:
    """Operators that DALI does not have for the device, or with an input on the wrong one."""
    registry = {
        "cpu": dali_ops.cpu_ops(),
        "gpu": dali_ops.gpu_ops(),
        "mixed": dali_ops.mixed_ops(),
    }
    wrong = []
    for name, device, sources, inputs, arguments in operators(pipeline):
        if name not in registry[device]:
            wrong.append(f"no {name} for {device}")
        if device != "gpu" and {"gpu", "mixed"} & set(sources):
            wrong.append(f"{name} on {device} after a GPU")
        if (device == "gpu" and "cpu" in inputs) or "gpu" in arguments:
            wrong.append(f"{name} on {device} with an input on the other one")
    return wrong


GPU = {"batch_size": 4, "num_threads": 1, "device_id": 0}
POLICIES = [
    {"augment": "none"},
    {},
    {"crop": "pad"},
    {"views_dtype": "fp16", "precision": "fp16", "decode_memory": 16},
    {"views_dtype": "bf16", "precision": "bf16", "interpolation": "bilinear", "antialias": True},
    {"augment": "randaugment"},
    {"augment": "randaugment", "randaugment_policy": "dali", "loader": "dali"},
]


def test_a_gpu_decodes_with_the_same_settings() -> None:
    (images,) = decode_pipeline("gpu", **GPU)._graph_out
    settings = images.source._op._init_args
    assert settings["jpeg_fancy_upsampling"] is True  # a CPU does so anyway
    assert settings["adjust_orientation"] is False


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("changes", POLICIES, ids=str)
class TestGpuPlacement:
    @pytest.mark.parametrize("decoded_on", ["cpu", "gpu"])
    def test_every_operator_has_a_place(self, changes: dict, decoded_on: str) -> None:
        config = TrainConfig.from_flat(**changes)
        views = view_pipeline(config.resolved_view, "gpu", decoded_on, **GPU)
        padded = config.view.size if config.view.crop == "pad" else None
        decoding = decode_pipeline("gpu", padded_size=padded, **GPU)
        assert misplaced(views) == []
        assert misplaced(decoding) == []
        places = {name: device for name, device, *_ in operators(decoding)}
        assert places["decoders__Image"] == "mixed"
        assert [out.device for out in (*views._graph_out, *decoding._graph_out)] == ["gpu", "gpu"]

    def test_all_work_on_pixels_is_on_the_gpu(self, changes: dict) -> None:
        """What stays on the host are the plans: their inputs, subscripts and conditions."""
        views = view_pipeline(TrainConfig.from_flat(**changes).resolved_view, "gpu", "gpu", **GPU)
        on_host = {name for name, device, *_ in operators(views) if device == "cpu"}
        assert on_host <= {
            *("ExternalSource", "_TensorSubscript", "_ArithmeticGenericOp", "Cast", "Reshape"),
            *("_conditional__Split", "_conditional__Merge", "Constant"),
            *("transforms__Shear", "transforms__Translation"),
        }

    def test_the_same_operators_run_on_the_cpu(self, changes: dict) -> None:
        on_cpu = {**GPU, "device_id": None}
        config = TrainConfig.from_flat(**changes)
        ours = sorted(
            name
            for name, *_ in operators(view_pipeline(config.resolved_view, "cpu", "cpu", **on_cpu))
        )
        gpu = sorted(
            name for name, *_ in operators(view_pipeline(config.resolved_view, "gpu", "gpu", **GPU))
        )
        assert ours == gpu


class TestTheWalkFindsMistakes:
    @staticmethod
    def graph(device: str) -> Pipeline:
        @pipeline_def(**GPU)
        def define() -> DataNode:
            data = fn.external_source(name="data", device="gpu", dtype=types.UINT8, ndim=3)
            flipped = fn.flip(data)
            return fn.rotate(flipped.cpu() if device == "cpu" else flipped, angle=10.0)

        return define()

    def test_an_operator_that_a_gpu_does_not_have(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert misplaced(self.graph("gpu")) == []
        has = set(dali_ops.gpu_ops())
        monkeypatch.setattr(dali_ops, "gpu_ops", lambda: has - {"Flip"})
        assert misplaced(self.graph("gpu")) == ["no Flip for gpu"]

    def test_an_input_that_was_left_on_the_host(self) -> None:
        @pipeline_def(**GPU)
        def define() -> DataNode:
            data = fn.external_source(name="data", device="gpu", dtype=types.UINT8, ndim=3)
            return fn.filter(data, types.Constant(np.ones((3, 3), np.float32)))

        assert misplaced(define()) == ["Filter on gpu with an input on the other one"]

    def test_a_graph_that_goes_back_to_the_host(self) -> None:
        assert misplaced(self.graph("cpu")) == ["Rotate on cpu after a GPU"]
