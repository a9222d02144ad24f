"""Checks of the fused view engine on a GPU, against the engine of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastaug
from fastaug.diagnostics.gpu_report.kernel_checks import no_host_sync
from fastaug.diagnostics.gpu_report.recorder import Check, needs_real_gpu
from fastaug.views.cuda import CudaViews
from fastaug.views.engine import engine_of
from fastaug.views.packed_plan import pictures_of
from fastaug.views.plan import ViewPlans
from fastaug.views.render_spec import BORDERS, INTERPOLATIONS, RenderSpec

# For values around 2: a CPU without fused multiply-add rounds sums differently.
_CLOSE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def view_checks() -> Iterator[Check]:
    for size, interpolation, antialias in product((8, 33, 224), INTERPOLATIONS, (False, True)):
        name = f"resized to {size} px, {interpolation}{', antialiased' * antialias}"
        yield Check(name, partial(_resized, size, interpolation, antialias, tuple(_CLOSE)))
    one = partial(_resized, 8, "bicubic", False, (torch.float32,))
    yield Check("resized to 8 px, only fp32", one, quick=True)
    for border in BORDERS:
        yield Check(f"boxes beyond the image, {border}", partial(_boxes_beyond, border))
    yield Check("operations at 16 px", partial(_operations, 16, 2, 7), quick=True)
    for size in (32, 96, 224, 500):
        yield Check(f"operations at {size} px", partial(_operations, size, 40, 16))
    yield Check("images that arrive late are waited for", _late_images, quick=True)
    yield Check("no host sync", _no_host_sync, quick=True)


def _resized(
    size: int, interpolation: str, antialias: bool, dtypes: tuple[torch.dtype, ...]
) -> str:
    images = [*_noise(3, 375, 500), *_noise(2, 50, 40)] if size > 8 else _noise(2, 50, 40)
    plan = fastaug.plan_views(images, views=5, size=size)
    worst = 0.0
    for dtype in dtypes:
        close = _CLOSE[dtype]
        options: dict = {"interpolation": interpolation, "antialias": antialias, "dtype": dtype}
        found = render(_on_gpu(images), plan, **options)
        assert found.is_cuda
        assert found.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
        expected = fastaug.make_views(images, plan, **options)
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=close)
        worst = max(worst, (found.cpu().float() - expected.float()).abs().max().item() / close)
    return f"largest error: {worst:.2g} x the tolerance"


def _boxes_beyond(border: str) -> None:
    images = _noise(2, 30, 33)
    boxes = np.array([[(-4, 3, 32, 32), (-90, -50, 300, 200), (25, 20, 32, 32)]] * 2, np.int32)
    nothing = np.zeros((2, 3, 0), np.int32), np.zeros((2, 3, 0, 4))
    plan = ViewPlans(boxes, np.arange(6).reshape(2, 3) % 2 == 1, *nothing, 32)
    options: dict = {"border": border}
    found = render(_on_gpu(images), plan, **options)
    expected = fastaug.make_views(images, plan, **options)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-4)


def _operations(size: int, count: int, views: int) -> None:
    """Boxes that are only copied: pixel values are whole numbers, and equal.

    Small views are made in shared memory, large ones in global memory, by fewer blocks than there
    are views.
    """
    images = _noise(count, size, size)
    options: dict = {"augment": "randaugment", "randaugment_layers": 4, "crop_area": (1.0, 1.0)}
    plan = fastaug.plan_views(images, views=views, size=size, **options)
    plan.boxes[:] = (0, 0, size, size)
    found = render(_on_gpu(images), plan, normalize=None).cpu()
    expected = fastaug.make_views(images, plan, normalize=None)
    differing = int((found != expected).sum())
    assert not differing, f"{differing:,} of {found.numel():,} pixel values differ"


def render(images: list[Tensor], plan: ViewPlans, **options: Any) -> Tensor:
    """fastaug.make_views by the engine of the images' device, whether or not it is admitted."""
    pictures, kept = pictures_of(images)
    engine, spec = engine_of(images[0].device), RenderSpec(**options)
    return engine.start(pictures, plan, spec, threads=1, kept=kept).finish()


def _late_images() -> None:
    """On its own stream, the kernel could read images before they are there; and their memory could
    be reused while it still reads them."""
    engine, images = CudaViews(_current_gpu()), _noise(2, 50, 40)
    plan, spec = fastaug.plan_views(images, views=2, size=16), RenderSpec()
    expected = fastaug.make_views(images, plan)
    source = _on_gpu(images)
    for _ in range(2):  # the first one compiles and loads
        late = [torch.zeros_like(image) for image in source]
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        for to, image in zip(late, source, strict=True):
            to.copy_(image)
        pictures, kept = pictures_of(late)
        started = engine.start(pictures, plan, spec, threads=0, kept=kept)
        del late, kept
        reused = [torch.full_like(image, 255) for image in source for _ in range(4)]
        found = started.finish()
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-4)
        del reused


def _no_host_sync() -> None:
    needs_real_gpu("a stand-in has done everything when a call returns")
    engine, images = CudaViews(_current_gpu()), _on_gpu(_noise(4, 100, 90))
    plan = fastaug.plan_views(images, views=8, size=64, augment="randaugment")
    pictures, kept = pictures_of(images)
    engine.start(pictures, plan, RenderSpec(), threads=0, kept=kept).finish()
    with no_host_sync():
        torch.cuda._sleep(500_000_000)
        engine.start(pictures, plan, RenderSpec(), threads=0, kept=kept).finish()
        done = torch.cuda.Event()
        done.record()
        assert not done.query(), "the host has waited for the GPU"
    torch.cuda.synchronize()


def _current_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _noise(count: int, height: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(height)
    shape = (count, height, width, 3)
    return list(torch.randint(256, shape, dtype=torch.uint8, generator=generator))


def _on_gpu(images: list[Tensor]) -> list[Tensor]:
    return [image.cuda() for image in images]
