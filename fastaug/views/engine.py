"""The fused view engine: all views of a batch by one kernel, on the device of the images."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fastaug.errors import ConfigError, DataError, KernelUnavailableError, few, suggest
from fastaug.runtime.cores import core_count
from fastaug.toolchain.admission import AdmissionReport
from fastaug.views.admission import check_admission
from fastaug.views.buffer_pool import BufferPool
from fastaug.views.config import ViewConfig
from fastaug.views.native import NativeViews
from fastaug.views.packed_plan import Pictures, check_images, check_plan, pictures_of
from fastaug.views.philox import TRAIN_VIEWS
from fastaug.views.plan import ViewPlans, draw_plans
from fastaug.views.render_spec import Border, Interpolation, Normalization, RenderSpec

log = logging.getLogger("fastaug")

# Pixel values per thread, about 100 us of work: with less, waking the thread takes longer.
_PER_THREAD = 2**18
_reports: dict[tuple[str, torch.device], AdmissionReport] = {}


class StartedViews(Protocol):
    def finish(self) -> Tensor: ...


class ViewEngine(Protocol):
    """Renders views on the device of the images."""

    name: str

    def why_not(self) -> str | None:
        """None, or why it cannot run here."""

    def sources(self) -> tuple[Path, ...]:
        """All files that decide what it computes."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The GPU stream that it works on; None on a CPU."""

    def start(
        self,
        pictures: Pictures,
        plans: ViewPlans,
        spec: RenderSpec,
        *,
        threads: int,
        kept: Any,
        wait: bool = True,
        pool: BufferPool | None = None,
    ) -> StartedViews:
        """Start making views in the background. kept: the owner of the pictures' memory.

        pool: for views in host memory; default: new memory.

        wait: for the current stream first, where the pictures may still be in the making. False if
        they are complete on the engine's own stream.
        """


def fused_engine(device: torch.device) -> ViewEngine:
    """The admitted engine of a device; KernelUnavailableError if there is none."""
    engine = engine_of(device)
    if reason := engine.why_not():
        raise KernelUnavailableError(f"fused views on {device.type}: {reason}")
    report = _reports.get((engine.name, device)) or check_admission(engine, device)
    _reports[engine.name, device] = report
    if not report.admitted:
        raise KernelUnavailableError(str(report))
    return engine


@cache
def engine_of(device: torch.device) -> ViewEngine:
    """The engine for a type of device, before why_not() and the admission check."""
    if device.type not in ("cpu", "cuda"):
        raise KernelUnavailableError(f"fused views are made on cpu and cuda, not on {device.type}")
    if device.type == "cuda":
        from fastaug.views.cuda import CudaViews

        return CudaViews(device)
    return NativeViews()


def resolve_engine(
    config: ViewConfig, device: torch.device, *, report: bool = True
) -> ViewEngine | None:
    """The engine for --views-engine; None stands for DALI's operators. report: log the choice."""
    engine, reason, level = None, "", logging.INFO
    if config.uses_dali_policy:
        reason = " (its own RandAugment policy)"
    elif config.views_engine != "dali":
        try:
            engine = fused_engine(device)
        except KernelUnavailableError as error:
            if config.views_engine == "fused":
                raise KernelUnavailableError(
                    f"{error}; use --views-engine dali, or auto"
                ) from error
            reason, level = f" ({error})", logging.WARNING
    if report:
        chosen = f"fused ({engine.name})" if engine else f"dali{reason}"
        log.log(level, "views engine: %s", chosen)
    return engine


def plan_views(
    images: Sequence[Tensor],
    *,
    views: int,
    size: int,
    indices: Sequence[int] | None = None,
    epoch: int = 0,
    seed: int = 0,
    **options: Any,
) -> ViewPlans:
    """Draw the plans of K random views of each image, determined by (seed, epoch, index, view).

    indices: positions of the images in the data set; default: their positions in the list, so that
    all batches get the same plans. options: settings of ViewConfig: augment, crop, crop_area,
    crop_sampling, randaugment_layers, randaugment_magnitude.
    """
    check_images(images)
    for name in options:
        if name not in _PLAN_OPTIONS:
            raise ConfigError(f"plan_views has no option {name!r}: {_hint(name)}")
    seed, epoch = _whole_number("seed", seed), _whole_number("epoch", epoch)
    options |= {"views": views, "size": size}
    for name in options.keys() & {"views", "size", "randaugment_layers"}:
        options[name] = _whole_number(name, options[name])
    config = ViewConfig(**options)
    sizes = np.array([image.shape[:2] for image in images], np.int32).reshape(-1, 2)
    numbers = _check_indices(range(len(images)) if indices is None else indices, len(images))
    return draw_plans(config, seed, epoch, TRAIN_VIEWS, numbers, sizes)


_PLAN_OPTIONS = (
    *("augment", "crop", "crop_area", "crop_sampling"),
    *("randaugment_layers", "randaugment_magnitude"),
)
_RENDER_OPTIONS = tuple(field.name for field in fields(RenderSpec))


def _hint(option: str) -> str:
    if option in _RENDER_OPTIONS:
        return f"{option} is an argument of make_views"
    return suggest(option, _PLAN_OPTIONS)


def _whole_number(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        why = " (views are square)" if name == "size" else ""
        raise ConfigError(f"{name} must be a whole number{why}, got {value!r}") from None


def _check_indices(indices: Sequence[int], count: int) -> np.ndarray:
    """[count] int64."""
    numbers = np.asarray(indices)
    is_whole = numbers.shape == (count,) and np.issubdtype(numbers.dtype, np.integer)
    if is_whole and numbers.min() >= 0 and numbers.max() < 2**32:
        return numbers.astype(np.int64)
    raise DataError(
        f"indices must be {count} whole numbers from 0 to 2**32 - 1, one for each image, "
        f"got {few(numbers.reshape(-1).tolist())}"
    )


def make_views(
    images: Sequence[Tensor],
    plan: ViewPlans,
    *,
    interpolation: Interpolation = "bicubic",
    antialias: bool = False,
    border: Border = "reflect",
    normalize: Normalization | None = "imagenet",
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
) -> Tensor:
    """B images [H, W, 3] uint8 and their plan -> views [B, K, 3, S, S] on the device of the images.

    The views are stored as B, K, S, S, 3, so that views.flatten(0, 1) is a channels-last batch.
    threads: number of threads on a CPU; default: one per core.
    """
    check_images(images)
    device = check_plan(images, plan)
    spec = RenderSpec(interpolation, antialias, border, normalize, dtype)
    pictures, kept = pictures_of(images)
    wanted = core_count() if threads is None else _whole_number("threads", threads)
    if wanted < 1:
        raise ConfigError(f"threads must be at least 1, got {threads}")
    work = plan.flips.size * 3 * plan.size**2
    others = min(wanted - 1, work // _PER_THREAD)
    return fused_engine(device).start(pictures, plan, spec, threads=others, kept=kept).finish()
