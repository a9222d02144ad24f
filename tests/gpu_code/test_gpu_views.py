"""The fused view kernel on a GPU, for those who have one: pytest -m gpu."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import fastaug
from fastaug.config import TrainConfig
from fastaug.views.admission import compare
from fastaug.views.cuda import CudaViews
from fastaug.views.packed_plan import pictures_of
from fastaug.views.plan import ViewPlans
from fastaug.views.render_spec import BORDERS, INTERPOLATIONS, RenderSpec

pytestmark = pytest.mark.gpu
Tiny = Callable[..., TrainConfig]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CLOSE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Of values around 2: a CPU without fused multiply-add rounds sums otherwise."""


def noise(count: int, height: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(height)
    shape = (count, height, width, 3)
    return list(torch.randint(256, shape, dtype=torch.uint8, generator=generator))


def on_gpu(images: list[Tensor]) -> list[Tensor]:
    return [image.cuda() for image in images]


def test_it_is_admitted() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    report = compare(CudaViews(device), device)
    assert report.admitted, str(report)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("size", [8, 33, 224])
def test_resized_views_are_those_of_the_cpu(size: int, interpolation: str, antialias: bool) -> None:
    images = noise(3, 375, 500) + noise(2, 50, 40)
    plan = fastaug.plan_views(images, views=5, size=size)
    for dtype in DTYPES:
        options: dict = {"interpolation": interpolation, "antialias": antialias, "dtype": dtype}
        found = fastaug.make_views(on_gpu(images), plan, **options)
        assert found.is_cuda
        assert found.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
        expected = fastaug.make_views(images, plan, **options)
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=CLOSE[dtype])


@pytest.mark.parametrize("border", BORDERS)
def test_boxes_beyond_the_image(border: str) -> None:
    images = noise(2, 30, 33)
    boxes = np.array([[(-4, 3, 32, 32), (-90, -50, 300, 200), (25, 20, 32, 32)]] * 2, np.int32)
    nothing = np.zeros((2, 3, 0), np.int32), np.zeros((2, 3, 0, 4))
    plan = ViewPlans(boxes, np.arange(6).reshape(2, 3) % 2 == 1, *nothing, 32)
    found = fastaug.make_views(on_gpu(images), plan, border=border)
    expected = fastaug.make_views(images, plan, border=border)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [32, 96, 224, 500])
def test_operations_are_those_of_the_cpu(size: int) -> None:
    """Of boxes that are copied: levels are whole numbers, and equal. Small views are made in shared
    memory, large ones in global memory, by fewer blocks than there are views."""
    images = noise(40, size, size)
    options = {"augment": "randaugment", "randaugment_layers": 4, "crop_area": (1.0, 1.0)}
    plan = fastaug.plan_views(images, views=16, size=size, **options)
    plan.boxes[:] = (0, 0, size, size)
    found = fastaug.make_views(on_gpu(images), plan, normalize=None)
    assert torch.equal(found.cpu(), fastaug.make_views(images, plan, normalize=None))


def test_images_that_come_late_are_waited_for_and_none_is_lost() -> None:
    """On a stream of its own, the kernel would read them before they are there; and their memory
    would be given to others while it still reads them."""
    device = torch.device("cuda", torch.cuda.current_device())
    engine, images = CudaViews(device), noise(4, 100, 90)
    plan, form = fastaug.plan_views(images, views=8, size=64), RenderSpec()
    expected = fastaug.make_views(images, plan)
    source = on_gpu(images)
    for _ in range(2):  # the first one compiles and loads
        late = [torch.zeros_like(image) for image in source]
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        for to, image in zip(late, source, strict=True):
            to.copy_(image)
        pictures, kept = pictures_of(late)
        started = engine.start(pictures, plan, form, threads=0, kept=kept)
        del late, kept
        reused = [torch.full_like(image, 255) for image in source for _ in range(4)]
        found = started.finish()
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-4)
        del reused


def test_nothing_waits_for_the_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    engine, images = CudaViews(device), on_gpu(noise(4, 100, 90))
    plan = fastaug.plan_views(images, views=8, size=64, augment="randaugment")
    pictures, kept = pictures_of(images)
    engine.start(pictures, plan, RenderSpec(), threads=0, kept=kept).finish()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(500_000_000)
        engine.start(pictures, plan, RenderSpec(), threads=0, kept=kept).finish()
        done = torch.cuda.Event()
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.parametrize("augment", ["crop-flip", "randaugment"])
def test_a_data_set_in_memory_lives_on_the_gpu(augment: str, tiny: Tiny, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    sets = {
        f"{split}{name}": values
        for split, count in (("", 64), ("test_", 16))
        for name, values in (
            ("images", random.integers(0, 256, (count, 32, 32, 3), np.uint8)),
            ("labels", np.arange(count) % 4),
        )
    }
    np.savez(tmp_path / "set.npz", **sets)
    config = tiny(
        data=str(tmp_path / "set.npz"),
        loader="dali",
        views_engine="fused",
        crop="pad",
        size=32,
        augment=augment,
        normalize="cifar",
    )
    ours, theirs = (
        list(fastaug.build_loader(config.replace(device=device))) for device in ("cuda", "cpu")
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.views.is_cuda
        assert torch.equal(one.views.cpu(), other.views)
        assert torch.equal(one.labels.cpu(), other.labels)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_both_engines_of_the_loader_make_the_same_views(dtype: str, tiny: Tiny) -> None:
    config = tiny(loader="dali", device="cuda", views_dtype=dtype, precision="bf16")
    fused, operators = (
        list(fastaug.build_loader(config.replace(views_engine=name))) for name in ("fused", "dali")
    )
    for one, other in zip(fused, operators, strict=True):
        assert torch.equal(one.indices, other.indices)
        # 0.15 of a level, and the rounding of bf16.
        torch.testing.assert_close(one.views.float(), other.views.float(), rtol=0, atol=2e-2)
