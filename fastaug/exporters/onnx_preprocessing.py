"""ONNX with the preprocessing inside the graph: pixels of any size in, logits out.

Only basic operators, so that every runtime computes the same: ONNX's own Resize has other rules at
the edges when it antialiases. Positions are whole numbers until the end, because fp32 would place
the pixels of a large image only to a thousandth. Needs onnx and onnxscript.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxscript
from onnx import TensorProto, compose, numpy_helper
from onnxscript import FLOAT, INT64, UINT8

from fastaug.views.preprocessing import Preprocessing

# onnxscript's types have shapes, unknown to mypy.
_PIXELS = UINT8["batch", "height", "width", 3]  # type: ignore[type-arg, name-defined, valid-type]
_IMAGES = FLOAT["batch", 3, "size", "size"]  # type: ignore[type-arg, name-defined, valid-type]
_FILTERS = {
    "bilinear": (1.0, (0.0, 0.0, -1.0, 1.0), (0.0, 0.0, 0.0, 0.0)),
    "bicubic": (2.0, (1.5, -2.5, 0.0, 1.0), (-0.5, 2.5, -4.0, 2.0)),
}
"""Radius, and cubic polynomials of the distance up to 1 and beyond, the highest power first."""


def add_preprocessing(network: onnx.ModelProto, preprocessing: Preprocessing) -> onnx.ModelProto:
    """The network with input `pixels`, uint8 [N, H, W, 3] of any size, in place of `images`."""
    (opset,) = (own.version for own in network.opset_import if own.domain in ("", "ai.onnx"))
    first = _preprocessing_graph(preprocessing, getattr(onnxscript, f"opset{opset}"))
    first.ir_version = network.ir_version
    first = compose.add_prefix(first, "preprocess_", rename_inputs=False)
    (made,) = first.graph.output
    merged = compose.merge_models(first, network, io_map=[(made.name, "images")])
    del merged.opset_import[:]  # has the same set twice
    merged.opset_import.extend(network.opset_import)
    return merged


def _preprocessing_graph(preprocessing: Preprocessing, op: Any) -> onnx.ModelProto:
    """As fastaug/exporters/preprocess.py does it. op: the operators of an opset."""
    size, double, share = preprocessing.size, 2 * preprocessing.size, preprocessing.crop_share
    radius, (near_3, near_2, near_1, near_0), far = _FILTERS[preprocessing.interpolation]
    far_3, far_2, far_1, far_0 = far
    widest = 1e9 if preprocessing.antialias else 1.0
    odd = _tensor(np.arange(1, double, 2)[:, None])
    mean, std = (
        _tensor(np.array(values, np.float32)[:, None, None])
        for values in (preprocessing.mean, preprocessing.std)
    )

    @onnxscript.script(default_opset=op)
    def preprocess(pixels: _PIXELS) -> _IMAGES:
        height = op.Squeeze(op.Shape(pixels, start=1, end=2))
        width = op.Squeeze(op.Shape(pixels, start=2, end=3))
        shorter = op.Cast(op.Min(height, width), to=FLOAT.dtype)
        side = op.Max(op.Cast(op.Round(shorter * share), to=INT64.dtype), 1)
        # The pixels that count, and their distances from the centers of the view's pixels.
        stretch = op.Clip(op.Cast(side, to=FLOAT.dtype) / size, 1.0, widest)
        reach = op.Cast(op.Ceil(radius * stretch), to=INT64.dtype)
        source = op.Range(-reach, side + reach, 1)
        center = op.Constant(value=odd) * side  # in units of 1 / double
        whole = center / double
        fraction = op.Cast(center - whole * double, to=FLOAT.dtype) / double
        steps = op.Cast(op.Unsqueeze(source, [0]) - whole, to=FLOAT.dtype)
        d = op.Min(op.Abs(steps + 0.5 - fraction) / stretch, radius)
        near = ((near_3 * d + near_2) * d + near_1) * d + near_0
        far = ((far_3 * d + far_2) * d + far_1) * d + far_0
        weight = op.Where(d <= 1.0, near, far)
        weight = weight / op.ReduceSum(weight, [1])
        # Beyond the crop, its edge pixels are repeated.
        inside = op.Clip(source, 0, side - 1)
        rows = op.Gather(pixels, inside + (height - side) / 2, axis=1)
        crop = op.Gather(rows, inside + (width - side) / 2, axis=2)
        channels = op.Cast(op.Transpose(crop, perm=[0, 3, 1, 2]), to=FLOAT.dtype)
        resized = op.MatMul(op.MatMul(weight, channels), op.Transpose(weight, perm=[1, 0]))
        return (resized - op.Constant(value=mean)) / op.Constant(value=std)

    return preprocess.to_model_proto()


def _tensor(values: np.ndarray) -> TensorProto:
    return numpy_helper.from_array(values)
