"""The view kernels as NVRTC compiles them, run on the PTX emulator: the CPU kernel's views, bit for
bit (test_fused_views.py compares those with float64). PTX, not machine code, and on no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from emulated_gpu import ARCHITECTURES, EmulatedViews
from emulator import emulator
from torch import Tensor

from fastaug.views import cuda, launch
from fastaug.views.admission import compare
from fastaug.views.launch import memory_needs, plan_launch
from fastaug.views.native import NativeViews
from fastaug.views.packed_plan import encode_layers, encode_views, pictures_of
from fastaug.views.plan import ViewPlans
from fastaug.views.randaugment import NAMES, draw_operations
from fastaug.views.render_spec import BORDERS, INTERPOLATIONS, RenderSpec

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZE = 12
LIMIT = 232448
# Of images of 31 x 27: enlarged, shrunk, narrow, copied, one pixel, the last one.
INSIDE = [(3, 5, 7, 9), (0, 0, 31, 27), (4, 0, 3, 27), (9, 8, SIZE, SIZE), (30, 26, 1, 1)]
BEYOND = [(-4, 3, SIZE, SIZE), (25, 20, 40, 31), (-90, -70, 200, 150), (40, -9, 5, 5)]


@pytest.fixture(autouse=True)
def some_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six a block, where the product would take one for views as small as these."""
    monkeypatch.setattr(launch, "NUMBERS_PER_THREAD", 2)


def noise(seed: int, height: int = 31, width: int = 27) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator)


def plans_of(
    boxes: list[tuple[int, int, int, int]], images: int = 1, layers: int = 0, size: int = SIZE
) -> ViewPlans:
    """The boxes of each image, every other one flipped; all operations are among the layers."""
    shape = (images, len(boxes))
    flips = np.arange(np.prod(shape)).reshape(shape) % 2 == 1
    numbers = np.random.default_rng(0).random((*shape, layers, 3))
    numbers[..., 0] = (np.arange(numbers[..., 0].size).reshape(*shape, layers) % 16 + 0.5) / 16
    operations, arguments = draw_operations(numbers, "nfnet", 7.0, size)
    return ViewPlans(
        np.tile(np.array(boxes, np.int32), (images, 1, 1)), flips, operations, arguments, size
    )


def check(
    engine: EmulatedViews, images: list[Tensor], plans: ViewPlans, form: RenderSpec
) -> dict[str, Any]:
    """Compares with the CPU kernel; returns the emulator's statistics."""
    pictures, kept = pictures_of(images)
    found, expected = (
        one.start(pictures, plans, form, threads=0, kept=kept).finish()
        for one in (engine, NativeViews())
    )
    assert found.dtype == form.dtype
    assert found.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, expected)
    statistics = engine.gpu.launches[-1]
    written = {entry["arg"]: entry["unique_written"] for entry in statistics["params"]}
    assert written[3] == found.numel() * found.element_size()
    return statistics


@pytest.mark.parametrize("antialias", [False, True], ids=["", "antialiased"])
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_every_way_of_resampling(interpolation: Any, antialias: bool) -> None:
    number = 2 * INTERPOLATIONS.index(interpolation) + antialias
    form = RenderSpec(interpolation, antialias, dtype=DTYPES[number % 3])
    check(EmulatedViews(ARCHITECTURES[number]), [noise(1), noise(2)], plans_of(INSIDE, 2), form)


@pytest.mark.parametrize("border", BORDERS)
def test_boxes_beyond_the_image(border: Any) -> None:
    number = BORDERS.index(border)
    form = RenderSpec(border=border, antialias=True, dtype=DTYPES[number % 3])
    images = [noise(1), noise(2, 1, 13), noise(3, 10, 11)]
    check(EmulatedViews(ARCHITECTURES[number]), images, plans_of(BEYOND, 3), form)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operation(dtype: torch.dtype) -> None:
    """By itself, of flat, dark and noisy views, and after another one."""
    flat, dark = torch.full((SIZE, SIZE, 3), 70, dtype=torch.uint8), noise(1, SIZE, SIZE) // 3
    plans = plans_of([(0, 0, SIZE, SIZE)] * len(NAMES), 3, layers=1)
    assert set(plans.operations.reshape(-1)) == set(range(len(NAMES)))
    form = RenderSpec(normalize="cifar", dtype=dtype)
    engine = EmulatedViews(ARCHITECTURES[DTYPES.index(dtype)])
    check(engine, [flat, dark, noise(2, SIZE, SIZE)], plans, form)
    if dtype == torch.float32:
        check(engine, [noise(3)], plans_of(INSIDE * 3, 1, layers=3), form)


PLACES = {  # bits of Places.in_shared, the kernel, and views that fit next to the tables
    "both views": (0b111, "all", 2),
    "one view": (0b011, "tables", 1),
    "the tables": (0b001, "tables", 0),
    "none": (0b000, "none", -1),
}


@pytest.mark.parametrize("size", [SIZE, 11])
@pytest.mark.parametrize("places", PLACES)
def test_memory_in_either_place(places: str, size: int) -> None:
    """Six views by two blocks, with boxes in global memory; rows of whole words and others."""
    in_shared, kernel, fitting = PLACES[places]
    images = [noise(1)]
    plans = plans_of([*INSIDE[:3], *BEYOND[:3]], 1, layers=4, size=size)
    form = RenderSpec("bilinear", dtype=torch.bfloat16)
    needs = memory_needs(
        encode_views(pictures_of(images)[0], plans), encode_layers(plans), form, size
    )
    assert needs.first == needs.second == 3 * size * size + 1
    assert needs.box
    aligned = launch._aligned
    limit = 0 if fitting < 0 else aligned(needs.tables(1)) + fitting * aligned(needs.first)
    engine = EmulatedViews("compute_80", shared_limit=limit, processors=2)
    plan = plan_launch(needs, 6, size, limit, 2)
    assert plan.places.in_shared == in_shared
    assert plan.blocks < 6
    check(engine, images, plans, form)
    assert engine.gpu.kernels == [f"views_bf16_{kernel}"]


@pytest.mark.parametrize(
    ("warps", "rows"), [(1, 1), (2, 3), (3, 2), (5, 3), (12, 1), (12, 8), (7, SIZE)]
)
def test_any_number_of_warps_and_rows(
    warps: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MOST_WARPS", warps)
    monkeypatch.setattr(launch, "NUMBERS_PER_THREAD", 1)
    monkeypatch.setattr(launch, "MOST_ROWS", rows)
    plans = plans_of([INSIDE[1], BEYOND[0]], 1, layers=2)
    check(EmulatedViews("compute_90"), [noise(1)], plans, RenderSpec())


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_the_warps(seed: int) -> None:
    plans = plans_of([INSIDE[0], BEYOND[1]], 1, layers=3)
    limit, processors = ((LIMIT, 1), (9000, 1), (0, 1))[seed]
    engine = EmulatedViews(
        "compute_80", shared_limit=limit, processors=processors, schedule="warp", seed=seed
    )
    check(engine, [noise(1)], plans, RenderSpec())


@pytest.mark.parametrize(("limit", "spare"), [(LIMIT, 16), (0, 13)], ids=["shared", "global"])
def test_the_plan_asks_for_the_memory_that_is_used_and_no_more(
    limit: int, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last part in shared memory is the view, of 432 bytes where 448 have a place; in global
    memory the box, of 675 bytes where 688 have."""

    def run(spared: int) -> None:
        def less(*given: Any) -> launch.Launch:
            plan = plan_launch(*given)
            if limit == 0:
                plan.places.piece -= spared
                return plan
            return plan._replace(shared_bytes=plan.shared_bytes - spared)

        monkeypatch.setattr(cuda, "plan_launch", less)
        plans = plans_of([(-4, -4, 15, 15)], layers=1)
        check(EmulatedViews("compute_80", shared_limit=limit), [noise(1)], plans, RenderSpec())

    run(0)
    run(spare)
    with pytest.raises(emulator().OutOfBounds):
        run(spare + 1)


def test_it_would_be_admitted() -> None:
    """By the comparison with the reference, which shares no code with the kernel."""
    report = compare(EmulatedViews("compute_90"), torch.device("cpu"))
    assert report.admitted, str(report)


def test_rows_of_an_image_may_lie_apart_and_images_may_be_any_number() -> None:
    room = noise(1, 40, 50)
    images = [room[3:34, 2:29], room[:31, 23:]]
    engine = EmulatedViews("compute_80")
    check(engine, images, plans_of(INSIDE[:3], 2), RenderSpec(normalize=None))
    pictures, kept = pictures_of([])
    empty = plans_of(INSIDE, 0)
    none = engine.start(pictures, empty, RenderSpec(), threads=0, kept=kept).finish()
    assert none.shape == (0, len(INSIDE), 3, SIZE, SIZE)
    assert len(engine.gpu.launches) == 1
