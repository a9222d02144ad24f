"""The CUDA kernels as NVRTC compiles them, run on the PTX emulator against the literal definitions.

What is run is PTX, not the machine code that ptxas makes of it, and on no GPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from covering import pairwise
from emulated_gpu import ARCHITECTURES, SHARED_LIMIT, EmulatedKernel
from emulator import emulator
from expect import raises
from literal import AVERAGES, literal_terms
from torch import Tensor

from fastaug.kernels import cuda
from fastaug.kernels.cuda import Plan, launch_plan, shared_bytes
from fastaug.kernels.reference import ReferenceKernel

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of the gradient's norm: for half precision, what rounding to the nearest may cost.
GRADIENT = {torch.float32: 1e-5, torch.float16: 2**-11, torch.bfloat16: 2**-8}
SHAPES = [(2, 1, 1), (2, 1, 70), (3, 2, 2), (2, 3, 17), (1, 8, 1000), (2, 16, 100), (2, 33, 40)]
LITTLE = 4096
"""Shared memory in which these are streamed, 11 to 224 columns at a time."""
STREAMED = [(2, 1, 300), (1, 2, 170), (2, 3, 101), (1, 8, 100), (2, 16, 100), (1, 33, 40)]


def make(
    images: int, views: int, classes: int, dtype: torch.dtype = DTYPES[0], spread: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Logits whose views are `spread` apart, and targets, the last class among them."""
    generator = torch.Generator().manual_seed(7 * views + classes)
    base = 2 * torch.randn(images, 1, classes, generator=generator)
    noise = torch.randn(images, views, classes, generator=generator)
    targets = torch.randint(classes, (images,), generator=generator)
    targets[0] = classes - 1
    return (base + spread * noise).to(dtype), targets


def check(
    kernel: EmulatedKernel,
    logits: Tensor,
    targets: Tensor | None,
    average: str | None = "losses",
    kl_weight: float = 1.0,
    smoothing: float = 0.1,
    need_grad: bool = True,
) -> Any:
    """Runs the kernel, compares with float64, returns the emulator's statistics."""
    if average is None:
        targets = None
    settings: dict = {"average": average, "kl_weight": kl_weight, "label_smoothing": smoothing}
    nll, kl, grad = kernel.value_and_grad(logits, targets, **settings, need_grad=need_grad)
    true_nll, true_kl, true_grad = literal_terms(logits, targets, average, kl_weight, smoothing)
    torch.testing.assert_close(nll.double(), true_nll, rtol=1e-5, atol=1e-6)
    # Below 1e-5 nats, views of half precision often are the same: the true KL is 0.
    torch.testing.assert_close(kl.double(), true_kl, rtol=1e-5, atol=1e-12)
    statistics = kernel.device.launches[-1]
    if need_grad:
        assert grad is not None
        assert grad.dtype == logits.dtype
        assert grad.is_contiguous()
        off = (grad.double() - true_grad).norm()
        # One class has no gradient, and what stands for it is 1 - 1. fp16 has steps of 6e-8 at 0.
        least = 1e-6 if logits.shape[2] == 1 else 2**-25 * math.sqrt(grad.numel())
        least = least if logits.dtype == torch.float16 or logits.shape[2] == 1 else 0.0
        assert off <= GRADIENT[logits.dtype] * true_grad.norm() + least
        written = {entry["arg"]: entry["unique_written"] for entry in statistics["params"]}
        assert written[6] == grad.numel() * grad.element_size()
    else:
        assert grad is None
    return statistics


def covering(shapes: list[tuple[int, int, int]], turn: int) -> list:
    """Each average at each shape; each kernel on one architecture, on the next at the next turn."""
    cases = []
    for shape_number, shape in enumerate(shapes):
        for number, average in enumerate((*AVERAGES, None)):
            dtype = (shape_number + number) % len(DTYPES)
            architecture = ARCHITECTURES[(number + dtype + turn) % len(ARCHITECTURES)]
            kl_weight = (1.0, 0.0, 0.3)[(shape_number + number) % 3]
            smoothing = (0.0, 0.1)[(shape_number + number) % 2]
            spread = (1.0, 3e-2, 8.0)[(shape_number + 2 * number) % 3]
            case = (architecture, shape, DTYPES[dtype], average, kl_weight, smoothing, spread)
            cases.append(pytest.param(*case, id="-".join(map(str, case)).replace("torch.", "")))
    return cases


COLUMNS = "architecture, shape, dtype, average, kl_weight, smoothing, spread"


@pytest.mark.parametrize(COLUMNS, covering(SHAPES, 0))
def test_an_image_that_fits_is_read_once_and_right(
    architecture: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    average: str | None,
    kl_weight: float,
    smoothing: float,
    spread: float,
) -> None:
    logits, targets = make(*shape, dtype, spread)
    kernel = EmulatedKernel(architecture)
    moved = check(kernel, logits, targets, average, kl_weight, smoothing)["global"]
    size = logits.numel() * logits.element_size()
    # Every thread reads its image's target, all of a warp by one request.
    warps = len(logits) * launch_plan(*shape[1:], SHARED_LIMIT).threads // 32
    assert moved["bytes_read"] == size + (0 if average is None else 8 * 32 * warps)
    assert moved["bytes_written"] == size + 2 * 4 * len(logits)
    if shape[2] * logits.element_size() % 32 == 0:  # rows begin where sectors do
        assert 32 * (moved["sectors_read"] + moved["sectors_written"]) <= 1.25 * 2 * size


@pytest.mark.parametrize(COLUMNS, covering(STREAMED, 1))
def test_an_image_that_does_not_fit_is_read_three_times_and_right(
    architecture: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    average: str | None,
    kl_weight: float,
    smoothing: float,
    spread: float,
) -> None:
    logits, targets = make(*shape, dtype, spread)
    kernel = EmulatedKernel(architecture, shared_limit=LITTLE)
    moved = check(kernel, logits, targets, average, kl_weight, smoothing)["global"]
    plan = launch_plan(*shape[1:], LITTLE)
    assert plan is not None
    assert plan.width < shape[2]
    broadcast = 0 if average is None else 8 * len(logits) * plan.threads
    size = logits.numel() * logits.element_size()
    assert moved["bytes_read"] == 3 * size + broadcast
    assert moved["bytes_written"] == size + 2 * 4 * len(logits)


def make_soft(logits: Tensor) -> Tensor:
    """Targets of any sum, with zeros; beyond their rows, numbers that must not count."""
    generator = torch.Generator().manual_seed(logits.shape[2])
    room = torch.rand(len(logits), logits.shape[2] + 3, generator=generator)
    return (room * (room > 0.3))[:, :-3]


@pytest.mark.parametrize("limit", [SHARED_LIMIT, LITTLE])
@pytest.mark.parametrize(
    ("architecture", "dtype", "average", "shape"),
    pairwise(ARCHITECTURES, DTYPES, AVERAGES, [(2, 1, 1), (2, 3, 17), (2, 16, 100), (1, 2, 300)]),
    ids=str,
)
def test_soft_targets(
    architecture: str,
    dtype: torch.dtype,
    average: str,
    shape: tuple[int, int, int],
    limit: int,
) -> None:
    logits, _ = make(*shape, dtype)
    targets = make_soft(logits)
    kernel = EmulatedKernel(architecture, shared_limit=limit)
    smoothing = (0.0, 0.1)[shape[1] % 2]
    moved = check(kernel, logits, targets, average, 0.7, smoothing)["global"]
    assert moved["unique_read"] == logits.nbytes + 4 * targets.numel()
    if launch_plan(*shape[1:], limit).width == shape[2]:
        # Averaged logits need the targets again for the gradient.
        times = 2 if average == "logits" else 1
        assert moved["bytes_read"] == logits.nbytes + times * 4 * targets.numel()
    check(kernel, logits, targets, average, 0.7, smoothing, need_grad=False)


@pytest.mark.parametrize("limit", [SHARED_LIMIT, 600])
@pytest.mark.parametrize("average", AVERAGES)
def test_soft_targets_and_what_is_not_finite(average: str, limit: int) -> None:
    logits, _ = make(5, 3, 40)
    targets = make_soft(logits)
    logits[0, :, 2], targets[0, 2] = -math.inf, 0.0
    logits[1, :, 2], targets[1, 2] = -math.inf, 1e-30
    targets[2, 4] = math.nan
    logits[3, 1, 4], targets[3] = math.nan, 0.0
    targets[4] = 0.0
    kernel = EmulatedKernel("compute_80", shared_limit=limit)
    settings: dict = {"average": average, "kl_weight": 1.0, "label_smoothing": 0.0}
    nll, kl, grad = kernel.value_and_grad(logits, targets, **settings, need_grad=True)
    assert grad is not None
    assert nll.isnan().tolist() == [False, False, True, True, False]
    assert nll.isinf().tolist() == [False, True, False, False, False]
    assert nll[4] == 0
    assert kl.isfinite().tolist() == [True, True, True, False, True]
    assert grad.flatten(1).isfinite().all(1).tolist() == [True, True, False, False, True]
    expected = ReferenceKernel().value_and_grad(
        logits.double(), targets, **settings, need_grad=True
    )
    for ours, right in zip((nll, kl, grad), expected, strict=True):
        for image in (0, 4):
            torch.testing.assert_close(ours[image].double(), right[image], rtol=1e-5, atol=1e-6)


def test_any_order_of_the_warps_with_soft_targets() -> None:
    logits, _ = make(1, 17, 40)
    for limit, seed in ((SHARED_LIMIT, 0), (LITTLE, 1)):
        kernel = EmulatedKernel("compute_80", shared_limit=limit, schedule="warp", seed=seed)
        check(kernel, logits, make_soft(logits), "logits")


def test_many_classes_on_a_large_gpu() -> None:
    logits, targets = make(1, 16, 21841, spread=3e-2)
    check(EmulatedKernel("compute_90"), logits, targets, "logits")


@pytest.mark.parametrize(
    ("shape_and_seed", "average", "limit"),
    pairwise(
        [((1, 3, 101), 0), ((1, 3, 101), 1), ((1, 17, 40), 2)],
        [*AVERAGES, None],
        [SHARED_LIMIT, LITTLE],
    ),
    ids=str,
)
def test_any_order_of_the_warps(shape_and_seed: tuple, average: str | None, limit: int) -> None:
    shape, seed = shape_and_seed
    logits, targets = make(*shape)
    kernel = EmulatedKernel("compute_80", shared_limit=limit, schedule="warp", seed=seed)
    check(kernel, logits, targets, average)


@pytest.mark.parametrize(
    ("warps", "width"), [(1, 45), (2, 45), (5, 45), (16, 45), (1, 7), (3, 32), (16, 44), (4, 1)]
)
def test_any_number_of_warps_and_any_width(
    warps: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, targets = make(2, 6, 45)
    plan = Plan(32 * warps, width, shared_bytes(6, width, warps))
    monkeypatch.setattr(cuda, "_plan", lambda *_: plan)
    check(EmulatedKernel("compute_80"), logits, targets, "logits")


@pytest.mark.parametrize("limit", [SHARED_LIMIT, LITTLE])
def test_the_plan_asks_for_the_shared_memory_that_is_used_and_no_more(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, targets = make(1, 6, 200)
    plan = launch_plan(6, 200, limit)
    assert plan is not None
    less = plan._replace(shared_bytes=plan.shared_bytes - 4)
    monkeypatch.setattr(cuda, "_plan", lambda *_: less)
    with pytest.raises(emulator().OutOfBounds, match="shared"):
        check(EmulatedKernel("compute_80", shared_limit=limit), logits, targets, "logits")


@pytest.mark.parametrize("limit", [SHARED_LIMIT, 256])
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 16, 100), (2, 3, 40)], ids=str)
def test_a_small_kl_keeps_its_digits(shape: tuple[int, int, int], limit: int) -> None:
    """1e-5 nats, where the shorter form has no digit right; and identical views have none."""
    limit = max(limit, launch_plan(*shape[1:], SHARED_LIMIT).shared_bytes // 3)
    for spread in (1e-2, 3e-3, 0.0):
        logits, targets = make(*shape, spread=spread)
        kernel = EmulatedKernel("compute_80", shared_limit=limit)
        check(kernel, logits, targets)
        check(kernel, logits + 1e4, targets)


def test_the_series_for_small_differences_ends_where_it_may() -> None:
    """Views that differ by just less than SMALL, where the last term of the series counts most."""
    apart = 0.158 * torch.tensor([2, -1, -1])
    logits = apart[:, None] * (-1) ** torch.arange(50).expand(1, 1, 50)
    settings: dict = {"average": None, "kl_weight": 1.0, "label_smoothing": 0.0}
    *_, grad = EmulatedKernel(approx_ulp=0).value_and_grad(logits, None, **settings, need_grad=True)
    *_, true_grad = literal_terms(logits, None, None, 1.0, 0.0)
    assert grad is not None
    assert (grad - true_grad).norm() <= 5e-7 * true_grad.norm()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_half_precision_gradient_is_the_nearest(dtype: torch.dtype) -> None:
    settings: dict = {"average": "losses", "kl_weight": 1.0, "need_grad": True}
    logits, targets = make(2, 3, 101, dtype)
    kernel = EmulatedKernel("compute_80", approx_ulp=0)
    *_, exact = kernel.value_and_grad(logits.float(), targets, **settings, label_smoothing=0.1)
    *_, grad = kernel.value_and_grad(logits, targets, **settings, label_smoothing=0.1)
    assert exact is not None
    assert grad is not None
    assert torch.equal(grad, exact.to(dtype))
    # Halfway between two numbers, the even one: the gradient of one view of two equal logits is
    # -+(1 - smoothing) / 2, here 1 and 3 halves of a last place above a quarter.
    last_place = torch.finfo(dtype).eps
    for halves in (1, 3):
        between = 0.25 * (1 + halves * last_place / 2)
        *_, grad = kernel.value_and_grad(
            torch.zeros(1, 1, 2, dtype=dtype),
            torch.tensor([0]),
            **settings,
            label_smoothing=1 - 2 * between,
        )
        assert grad is not None
        expected = torch.tensor([[[-between, between]]], dtype=torch.float64)
        assert torch.equal(grad, expected.to(dtype))


@pytest.mark.parametrize("average", [*AVERAGES, None])
def test_values_without_a_gradient(average: str | None) -> None:
    logits, targets = make(2, 16, 100)
    for limit, times in ((SHARED_LIMIT, 1), (LITTLE, 2)):
        kernel = EmulatedKernel("compute_80", shared_limit=limit)
        moved = check(kernel, logits, targets, average, need_grad=False)["global"]
        broadcast = 0 if average is None else 8 * 2 * 512
        assert moved["bytes_read"] == 4 * times * logits.numel() + broadcast
        assert moved["bytes_written"] == 2 * 4 * 2


@pytest.mark.parametrize("limit", [SHARED_LIMIT, 600])
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("gone", [slice(None), slice(1, 3)], ids=["in all views", "in some views"])
def test_classes_at_minus_infinity(gone: slice, average: str, limit: int) -> None:
    logits, _ = make(2, 4, 40)
    logits[0, gone, 3:7] = -math.inf
    targets = torch.tensor([2, 3])
    settings: dict = {"average": average, "label_smoothing": 0.0, "need_grad": True}
    settings["kl_weight"] = 1.0 if gone == slice(None) else 0.0  # an infinite KL has no gradient
    kernel = EmulatedKernel("compute_80", shared_limit=limit)
    ours = kernel.value_and_grad(logits, targets, **settings)
    expected = ReferenceKernel().value_and_grad(logits.double(), targets, **settings)
    for our, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(our.double(), right, rtol=1e-5, atol=1e-6)


def test_a_wrong_target_or_nan_spoils_only_its_own_image() -> None:
    logits, targets = make(5, 3, 40)
    targets[1:4] = torch.tensor([-1, 40, 2**32])
    logits[4, 1, 5] = math.nan
    for limit in (SHARED_LIMIT, 600):
        kernel = EmulatedKernel("compute_80", shared_limit=limit)
        nll, kl, grad = kernel.value_and_grad(
            logits, targets, average="logits", kl_weight=1.0, label_smoothing=0.1, need_grad=True
        )
        assert nll.isnan().tolist() == [False, True, True, True, True]
        assert kl.isnan().tolist() == [False, False, False, False, True]
        assert grad is not None
        assert not grad[0].isnan().any()
        assert grad[4].isnan().all()


ROOM, TARGETS = make(4, 6, 50)


@pytest.mark.parametrize(
    "logits",
    [
        ROOM[::2, 1:, 3:20],
        ROOM.transpose(0, 1)[:4, :, :17],
        ROOM[:, :1, :17].expand(-1, 3, -1),
        ROOM.transpose(1, 2)[..., :5],
    ],
    ids=["slice", "images and views transposed", "one view for all", "classes transposed"],
)
def test_strides_are_taken_as_they_are(logits: Tensor) -> None:
    targets = TARGETS.repeat_interleave(2)[::2][: len(logits)] % logits.shape[2]
    statistics = check(EmulatedKernel("compute_80"), logits, torch.stack([targets] * 2, 1)[:, 0])
    # The kernel is given the very memory of the logits; only neighbors must be neighbors.
    copied = statistics["params"][0]["nbytes"] != 4 * ROOM.numel()
    assert copied == (logits.stride(2) != 1)


@pytest.mark.parametrize("classes", [48, 44])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_whole_packs_change_no_bit(dtype: torch.dtype, classes: int) -> None:
    """Logits that begin at a multiple of 16 bytes are loaded in packs, others one by one; at 44
    classes of half precision, only every second row does, and ends with half a pack."""
    logits, targets = make(2, 3, classes, dtype)
    apart = torch.empty(1 + logits.numel(), dtype=dtype)[1:].view(logits.shape).copy_(logits)
    kernel = EmulatedKernel("compute_80", approx_ulp=0)
    settings: dict = {"average": "logits", "kl_weight": 1.0, "label_smoothing": 0.1}
    packed, unpacked = (
        kernel.value_and_grad(given, targets, **settings, need_grad=True)
        for given in (logits, apart)
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(packed, unpacked, strict=True))
    read, read_apart = (launch["global"]["loads"] for launch in kernel.device.launches)
    assert read < read_apart


def test_images_may_lie_far_apart() -> None:
    """32 bits would wrap around to the first image."""
    logits, targets = make(2, 2, 4)
    kernel = EmulatedKernel("compute_80")
    launch = kernel.device.launch

    def far(*launched: Any) -> None:
        *how, arguments = launched
        launch(*how, (arguments[0], 2**33, *arguments[2:]))

    kernel.device.launch = far  # type: ignore[method-assign]
    with pytest.raises(emulator().OutOfBounds, match="block \\(1,0,0\\)"):
        check(kernel, logits, targets)


def test_no_images_and_unfit_views() -> None:
    kernel = EmulatedKernel("compute_80", shared_limit=LITTLE)
    nll, kl, grad = kernel.value_and_grad(
        torch.empty(0, 3, 5, dtype=torch.bfloat16),
        torch.empty(0, dtype=torch.int64),
        average="probs",
        kl_weight=1.0,
        label_smoothing=0.0,
        need_grad=True,
    )
    assert kernel.device.launches == []
    assert nll.shape == kl.shape == (0,)
    assert grad is not None
    assert grad.shape == (0, 3, 5)
    assert grad.dtype == torch.bfloat16
    with raises(cuda.KernelUnavailableError, "400 4096"):
        check(kernel, *make(1, 400, 3))
