"""RandAugment as a DALI graph: each layer applies the operation of its plan to every view.

Operations are chosen in the plan (fastaug/views/randaugment.py), so the graph contains nothing
random. NFNet's 16 operations fall into twelve families that share DALI operators. They equal
Pillow's where DALI's own are off by 1 of 255 or by half a pixel, and are faster
(benchmarks/view_pipelines.py).
"""

from __future__ import annotations

import numpy as np
from nvidia.dali import fn, math, types
from nvidia.dali.auto_aug.core import select, signed_bin
from nvidia.dali.auto_aug.rand_augment import get_rand_augment_suite
from nvidia.dali.data_node import DataNode

from fastaug.errors import KernelUnavailableError
from fastaug.views.config import ViewConfig
from fastaug.views.plan import ViewPlans
from fastaug.views.randaugment import DALI_NAMES, OPERATIONS, REFERENCE_SIZE, unchanged_mask

FILL = 128
NUMBERS = 6
"""Maximum count of numbers for a layer of a view: a matrix."""
DALI_BINS = 31
"""Magnitudes of DALI's own policy: 0 to 30."""


def randaugment(
    views: DataNode, choices: DataNode, numbers: DataNode, config: ViewConfig
) -> DataNode:
    """views: [S, S, 3] uint8, choices: [N] int32, numbers: [N, NUMBERS] float, as from encode."""
    for layer in range(config.randaugment_layers):
        choice, own = choices[layer], numbers[layer]
        if config.randaugment_policy == "nfnet":
            views = select(list(_FAMILIES.values()), choice, views, own, config.size)
        else:
            views = _dali_layer(views, choice, own, config)
    return views


def check_families() -> None:
    """Raise KernelUnavailableError unless every operation of the table has a graph here."""
    if missing := [spec.name for spec in OPERATIONS if spec.dali not in _FAMILIES]:
        raise KernelUnavailableError(
            f"--views-engine dali cannot compute {', '.join(missing)}; use --views-engine fused"
        )


def encode(plans: ViewPlans, config: ViewConfig) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of the graph for these plans: [B*K, N] int32, [B*K, N, NUMBERS] float32."""
    operations = plans.operations.reshape(-1, config.randaugment_layers)
    arguments = plans.arguments.reshape(*operations.shape, 4)
    numbers = np.zeros((*operations.shape, NUMBERS), np.float32)
    if config.randaugment_policy == "dali":
        numbers[..., :4] = arguments
        return operations, numbers
    families = list(_FAMILIES)
    choices = np.zeros_like(operations)
    for place, spec in enumerate(OPERATIONS):
        chosen = operations == place
        values = arguments[chosen][:, : spec.arguments]
        rows = values if spec.encode is None else spec.encode(values[:, 0], plans.size)
        if spec.dali in _CONVERT:
            rows = _CONVERT[spec.dali](rows)
        choices[chosen] = families.index(spec.dali)
        numbers[chosen, : rows.shape[-1]] = rows
    choices[unchanged_mask(operations, arguments)] = families.index("identity")
    return choices, numbers


def _corner_matrix(matrix: np.ndarray) -> np.ndarray:
    """Convert to DALI's coordinates, which are those of pixel corners: shifted by half a pixel."""
    matrix = matrix.reshape(-1, 2, 3)
    matrix[..., 2] += 0.5 - 0.5 * (matrix[..., 0] + matrix[..., 1])
    return matrix.reshape(-1, 6)


def _anchor_and_shape(box: np.ndarray) -> np.ndarray:
    left, top, right, bottom = box.T
    return np.stack([top, left, bottom - top, right - left], axis=-1)


_CONVERT = {"move": _corner_matrix, "cutout": _anchor_and_shape}
"""Converts the result of OperationSpec.encode to the input of the family, where they differ."""


# --- families: views [S, S, 3] uint8, numbers [NUMBERS] on the host, S -> views ---


def _move(views: DataNode, numbers: DataNode, size: int) -> DataNode:
    return fn.warp_affine(
        views,
        matrix=fn.reshape(numbers, shape=[2, 3]),
        fill_value=FILL,
        interp_type=types.INTERP_NN,
        inverse_map=True,
    )


def _posterize(views: DataNode, numbers: DataNode, size: int) -> DataNode:
    return views & fn.cast(numbers[0], dtype=types.UINT8)


def _solarize(views: DataNode, numbers: DataNode, size: int) -> DataNode:
    threshold = fn.cast(numbers[0], dtype=types.INT16)
    return views ^ ((views >= threshold) * types.Constant(255, dtype=types.UINT8))


def _solarize_add(views: DataNode, numbers: DataNode, size: int) -> DataNode:
    addition = fn.cast(numbers[0], dtype=types.UINT8)
    return views + (views < types.Constant(128, dtype=types.UINT8)) * addition


def _brightness(views: DataNode, numbers: DataNode, size: int) -> DataNode:
    return _truncated(views * numbers[0])


def _color(views: DataNode, numbers: DataNode, size: int) -> DataNode:
    return _blended(_gray(views), views, numbers)


def _contrast(views: DataNode, numbers: DataNode, size: int) -> DataNode:
    mean = fn.reductions.mean(views, axis_names="HW", keep_dims=True)
    return _blended(_gray(mean), views, numbers)


def _sharpness(views: DataNode, numbers: DataNode, size: int) -> DataNode:
    """Pillow and TensorFlow smooth the inner pixels and keep the outermost ones."""
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13
    # On the device of the views: unlike arithmetic, fn.filter does not move its operands.
    weights = types.Constant(kernel, device=views.device)
    smooth = fn.filter(views, weights, mode="valid", dtype=types.FLOAT)
    inner = fn.slice(views, start=[1, 1], shape=[size - 2, size - 2], axes=[0, 1])
    change = fn.slice(
        math.floor(smooth + 0.5) - inner,
        start=[-1, -1],
        shape=[size, size],
        axes=[0, 1],
        out_of_bounds_policy="pad",
    )
    return _blended(views + change, views, numbers)


def _auto_contrast(views: DataNode, numbers: DataNode, size: int) -> DataNode:
    low = fn.reductions.min(views, axis_names="HW", keep_dims=True)
    high = fn.reductions.max(views, axis_names="HW", keep_dims=True)
    flat = high == low
    scale = 255.0 / (high - low + 255 * flat)
    return _truncated((views - low * (flat ^ True)) * scale)


def _cutout(views: DataNode, numbers: DataNode, size: int) -> DataNode:
    return fn.erase(views, anchor=numbers[0:2], shape=numbers[2:4], axes=[0, 1], fill_value=FILL)


_FAMILIES = {
    "identity": lambda views, numbers, size: views,
    "move": _move,
    "posterize": _posterize,
    "solarize": _solarize,
    "solarize_add": _solarize_add,
    "brightness": _brightness,
    "color": _color,
    "contrast": _contrast,
    "sharpness": _sharpness,
    "auto_contrast": _auto_contrast,
    "equalize": lambda views, numbers, size: fn.equalize(views),
    "cutout": _cutout,
}


def _blended(other: DataNode, views: DataNode, numbers: DataNode) -> DataNode:
    return _truncated(other + (views - other) * numbers[0])


def _gray(values: DataNode) -> DataNode:
    """[..., 3] -> [..., 1], rounded."""
    weights = types.Constant(np.array([0.299, 0.587, 0.114], np.float32))
    return math.floor(fn.reductions.sum(values * weights, axis_names="C", keep_dims=True) + 0.5)


def _truncated(values: DataNode) -> DataNode:
    """Float to uint8 as Pillow and TensorFlow do it: towards zero, clipped."""
    return fn.cast(math.floor(values), dtype=types.UINT8)


# --- DALI's own policy ---


def _dali_layer(
    views: DataNode, choice: DataNode, numbers: DataNode, config: ViewConfig
) -> DataNode:
    suite = get_rand_augment_suite(use_shape=True, max_translate_rel=100 / REFERENCE_SIZE)
    assert tuple(augmentation.name for augmentation in suite) == DALI_NAMES
    negative = fn.cast(numbers[0] < 0.0, dtype=types.INT32)
    return select(
        suite,
        choice,
        data=views,
        magnitude_bin=signed_bin(int(config.randaugment_magnitude), negative),
        num_magnitude_bins=DALI_BINS,
        fill_value=FILL,
        interp_type=types.INTERP_LINEAR,
        shape=types.Constant([config.size, config.size], dtype=types.INT32),
    )
