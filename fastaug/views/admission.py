"""The admission check of a fused view engine: its views against the reference's.

All resampling modes, the border, every operation, all dtypes and all places of a GPU's memory, in
milliseconds on small images; on a GPU, after the start of a child process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastaug.errors import DataError
from fastaug.toolchain import admission
from fastaug.toolchain.admission import AdmissionReport, compare_cases, report_file
from fastaug.views.batch import VIEW_DTYPES
from fastaug.views.config import ViewConfig
from fastaug.views.launch import Limits, limited
from fastaug.views.packed_plan import pictures_of
from fastaug.views.philox import uniforms
from fastaug.views.plan import ViewPlans
from fastaug.views.randaugment import NAMES, draw_operations, has_reference
from fastaug.views.reference import reference_views
from fastaug.views.render_spec import RenderSpec

if TYPE_CHECKING:
    from fastaug.views.engine import ViewEngine

log = logging.getLogger("fastaug")

_SIZE = 24
# In pixel values of 0 to 255: room for fp32 sums in another order. The operations are integer
# arithmetic, and must be equal.
_RESAMPLED = 0.01
# Normalized values are at most about 2: half of their last bit.
_ROUNDING = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# The tables of 24 px are 4.9 KB; a view of them is 1.7 KB.
_ONLY_TABLES = Limits(shared_bytes=6000, blocks=16, warps=12)
_MANY_WARPS = Limits(shared_bytes=2**20, blocks=16, warps=12)
_NO_SHARED = Limits(shared_bytes=0, blocks=16, warps=12)
_WIDE = 4100
# Heights and widths of images, and of boxes in them: enlarged, shrunk, narrow, one pixel.
_BOXES = (((40, 61), (9, 8)), ((97, 40), (90, 38)), ((5, 200), (3, 190)), ((30, 30), (1, 1)))


class _Case(NamedTuple):
    name: str
    images: list[Tensor]
    plans: ViewPlans
    config: ViewConfig
    tolerance: float
    """In pixel values of 0 to 255."""
    limits: Limits | None = None
    """Limits of the launch on a GPU; None: those of the GPU."""


def compare(engine: ViewEngine, device: torch.device) -> AdmissionReport:
    """Compare an engine's views with those of the reference."""
    cases = ((case.name, partial(_error, engine, case, device)) for case in _cases())
    return compare_cases(engine.name, device, cases)


def check_admission(
    engine: ViewEngine, device: torch.device, *, again: bool = False
) -> AdmissionReport:
    """compare(), or its cached report for this device and these sources unless `again`."""
    file: Path | None = None
    name = engine.name
    if not has_reference():
        name += " without operations"
        log.warning(
            "RandAugment's operations are not compared with their reference, which needs Pillow: "
            "pip install pillow"
        )
    with suppress(OSError, DataError):
        file = report_file([*engine.sources(), Path(__file__)], name, device)
    return admission.check(compare, engine, device, file=file, again=again)


def _error(engine: ViewEngine, case: _Case, device: torch.device) -> tuple[float, str]:
    """The largest difference from the reference in units of the tolerance, infinite for NaN."""
    images = [image.to(device) for image in case.images]
    pictures, kept = pictures_of(images)
    spec = RenderSpec.of(case.config)
    with limited(case.limits):
        found = engine.start(pictures, case.plans, spec, threads=1, kept=kept).finish()
    expected = torch.stack(
        [
            reference_views(image.numpy(), case.plans.of_image(place), case.config)
            for place, image in enumerate(case.images)
        ]
    ).permute(0, 1, 4, 2, 3)
    if found.shape != expected.shape or found.dtype != spec.dtype:
        raise ValueError(f"{found.dtype} of shape {list(found.shape)}")
    off = (found.cpu().float() - expected).abs()
    tolerance = case.tolerance * max(spec.factor) + _ROUNDING[spec.dtype]
    return (off / tolerance).nan_to_num(torch.inf).max().item(), "a pixel"


def _cases() -> Iterator[_Case]:
    dtypes = tuple(VIEW_DTYPES)
    number = 0
    for interpolation in ("bilinear", "bicubic"):
        for antialias in (False, True):
            config = ViewConfig(
                size=_SIZE,
                interpolation=interpolation,
                antialias=antialias,
                views_dtype=dtypes[number % 3],  # type: ignore[arg-type]
            )
            number += 1
            sizes, boxes = zip(*_BOXES, strict=True)
            plans = _plans([[(1, 1, *box), (0, 0, *box)] for box in boxes])
            name = f"{interpolation}{', antialiased' if antialias else ''}, {config.views_dtype}"
            yield _Case(name, [_picture(*size) for size in sizes], plans, config, _RESAMPLED)
    config = ViewConfig(size=_SIZE, crop="pad", normalize="cifar")
    plans = _plans([[(-4, 3, _SIZE, _SIZE), (2, -4, _SIZE, _SIZE)]])
    yield _Case("reflected border", [_picture(_SIZE, _SIZE)], plans, config, 0)
    # Wide enough that the tables exceed the 48 KB of shared memory that every kernel may have.
    plans, config = _plans([[(0, 0, 3, _WIDE)]]), ViewConfig(size=_SIZE)
    yield _Case("wide", [_picture(3, _WIDE)], plans, config, _RESAMPLED, _MANY_WARPS)
    if not has_reference():
        return
    for magnitude in (3.0, 8.0):
        yield _operations(magnitude)
    # As views of 224 px: buffers in global memory, and a block makes one view after another.
    for dtype in dtypes:
        yield _operations(8.0, dtype=dtype, limits=_ONLY_TABLES)
    # As boxes that are tens of thousands of pixels wide. Rows of 21 pixels are not whole words.
    yield _operations(8.0, size=21, limits=_NO_SHARED)


def _operations(
    magnitude: float,
    size: int = _SIZE,
    dtype: str = "fp32",
    limits: Limits | None = None,
) -> _Case:
    """Every operation, by itself and after another one."""
    config = ViewConfig(
        size=size,
        augment="randaugment",
        randaugment_layers=2,
        views_dtype=dtype,  # type: ignore[arg-type]
    )
    numbers = uniforms(0, 0, 0, np.arange(2), len(NAMES), 6).reshape(2, len(NAMES), 2, 3)
    numbers[..., 1, 0] = (np.arange(len(NAMES)) + 0.5) / len(NAMES)
    numbers[0, :, 0, 0] = 0.5 / len(NAMES)  # auto_contrast, which changes little
    operations, arguments = draw_operations(numbers, "nfnet", magnitude, size)
    boxes = np.tile(np.array([0, 0, size, size], np.int32), (2, len(NAMES), 1))
    flips = np.arange(2 * len(NAMES)).reshape(2, -1) % 2 == 0
    plans = ViewPlans(boxes, flips, operations, arguments, size)
    pictures = [_picture(size, size), _picture(size, size) // 2 + 40]
    name = f"operations of magnitude {magnitude:g}, {dtype}"
    if limits is not None:
        name += f", {limits.shared_bytes} bytes of shared memory, {limits.blocks} blocks"
    return _Case(name, pictures, plans, config, 0, limits)


def _plans(boxes: list) -> ViewPlans:
    """Plans with boxes [B][K] and every other view flipped."""
    shape = np.shape(boxes)[:2]
    flips = np.arange(shape[0] * shape[1]).reshape(shape) % 2 == 1
    nothing = np.zeros((*shape, 0), np.int32), np.zeros((*shape, 0, 4))
    return ViewPlans(np.array(boxes, np.int32), flips, *nothing, _SIZE)


def _picture(height: int, width: int) -> Tensor:
    """Waves and noise, over all pixel values."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    waves = torch.stack([x * 7 + y, x - y * 5, x * y], dim=-1) / 9
    noise = torch.from_numpy(uniforms(1, 0, 0, np.arange(height), 1, 3 * width)).float()
    values = 127 + 90 * waves.sin() + 70 * (noise.view(height, width, 3) - 0.5)
    return values.clamp(0, 255).to(torch.uint8)
