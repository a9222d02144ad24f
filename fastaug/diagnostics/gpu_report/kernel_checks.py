"""Checks of a loss kernel on a GPU: values, strides, streams, host syncs, graphs, threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastaug.diagnostics.gpu_report.recorder import Check, SkippedCheck, needs_real_gpu
from fastaug.kernels.contract import AVERAGES, Kernel
from fastaug.kernels.objective import image_kl, loss_terms
from fastaug.kernels.reference import ReferenceKernel
from fastaug.kernels.registry import load_kernel

KERNELS = ("cuda", "triton")
"""fastaug's loss kernels for GPUs."""
# Relative to the largest entry of the gradient: half precision rounds it.
_GRADIENT = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
# The last ones do not fit into shared memory or registers, and are streamed.
_SHAPES = (
    *((5, 3, 17), (1, 1, 1), (3, 2, 2), (4, 16, 100), (4, 8, 1000)),
    *((2, 33, 70), (1, 16, 21841)),
)
_SOFT_SHAPES = ((5, 3, 17), (4, 8, 1000), (1, 16, 21841))
_APART = 2**31 + 8
_SLEEP = 500_000_000
"""Clock cycles, about 0.3 s: longer than a host that does not wait needs for its calls."""


def kernel_checks(name: str) -> Iterator[Check]:
    kernel = load_kernel(name)
    for average in AVERAGES:
        for shape in _SHAPES:
            size = "x".join(map(str, shape))
            quick = (average, shape) == ("losses", _SHAPES[0])
            check = partial(_values_and_gradients, kernel, shape, average)
            yield Check(f"values and gradients, {size}, {average}", check, quick)
            if shape in _SOFT_SHAPES:
                check = partial(_soft_targets, kernel, shape, average)
                yield Check(f"soft targets, {size}, {average}", check, quick)
    for title, method, quick in (
        ("only the regularizer, and strides", _strides, False),
        ("70,000 images, and none", _many_images_and_none, False),
        ("a target that is not a class gives NaN", _wrong_targets, True),
        ("images more than 2**31 values apart", _far_apart, False),
        ("runs on the current stream", _current_stream, True),
        ("no host sync", _no_host_sync, True),
        ("captured in a CUDA graph", _graph, True),
        ("called from another thread", _other_thread, True),
        ("logits on another GPU than the current one", _other_gpu, True),
    ):
        yield Check(title, partial(method, kernel), quick)
    if name == "cuda":
        yield Check("shared memory that launch plans count on", _shared_memory, True)


def _values_and_gradients(kernel: Kernel, shape: tuple[int, int, int], average: str) -> str:
    worst = 0.0
    for dtype in _GRADIENT:
        for number, spread in enumerate((1.0, 3e-3)):
            logits, targets = make_logits(*shape, dtype, spread)
            settings = {"average": average, "kl_weight": 0.7, "label_smoothing": 0.1 * number}
            found = run_kernel(kernel, logits.cuda(), targets.cuda(), **settings)
            worst = max(worst, _compare(found, logits, targets, **settings))
    return f"largest error: {worst:.2g} x the tolerance"


def _soft_targets(kernel: Kernel, shape: tuple[int, int, int], average: str) -> str:
    """Targets [B, C] of any sum, with zeros; then NaN in the last image."""
    images, _, classes = shape
    settings = {"average": average, "kl_weight": 0.7, "label_smoothing": 0.1}
    targets = torch.rand(images, classes, generator=torch.Generator().manual_seed(1))
    targets *= targets > 0.3
    worst = 0.0
    for dtype in _GRADIENT:
        logits, _ = make_logits(*shape, dtype)
        found = run_kernel(kernel, logits.cuda(), targets.cuda(), **settings)
        worst = max(worst, _compare(found, logits, targets, **settings))
    targets[-1, 0] = torch.nan
    nll, _, _ = run_kernel(kernel, logits.cuda(), targets.cuda(), **settings)
    assert nll.isnan().tolist() == [False] * (images - 1) + [True], nll
    return f"largest error: {worst:.2g} x the tolerance"


def _strides(kernel: Kernel) -> None:
    room, _ = make_logits(6, 5, 40)
    for logits in (room[::2, 1:, 3:20], room.transpose(0, 1), room.transpose(1, 2)):
        on_gpu = room.cuda().as_strided(logits.shape, logits.stride(), logits.storage_offset())
        on_gpu.requires_grad_()
        kl = image_kl(kernel, on_gpu)
        (grad,) = torch.autograd.grad(kl.sum(), on_gpu)
        _, true_kl, true_grad = _exact(logits, None, average=None)
        torch.testing.assert_close(kl.cpu().double(), true_kl, rtol=2e-5, atol=1e-9)
        torch.testing.assert_close(grad.cpu().double(), true_grad, rtol=1e-4, atol=1e-6)


def _many_images_and_none(kernel: Kernel) -> None:
    logits, targets = make_logits(70_000, 2, 3)
    _compare(run_kernel(kernel, logits.cuda(), targets.cuda()), logits, targets)
    nll, kl, grad = kernel.value_and_grad(
        torch.empty(0, 2, 3, device="cuda"),
        torch.empty(0, dtype=torch.int64, device="cuda"),
        average="losses",
        kl_weight=1.0,
        label_smoothing=0.0,
        need_grad=True,
    )
    assert nll.shape == kl.shape == (0,)
    assert grad is not None
    assert grad.shape == (0, 2, 3)


def _wrong_targets(kernel: Kernel) -> None:
    logits, targets = make_logits(4, 3, 10)
    targets[1], targets[3] = -1, 10
    nll, _, _ = run_kernel(kernel, logits.cuda(), targets.cuda())
    assert nll.isnan().tolist() == [False, True, False, True], nll


def _far_apart(kernel: Kernel) -> None:
    needs_real_gpu("4 GB of memory")
    if torch.cuda.mem_get_info()[0] < 2.2 * _APART:
        raise SkippedCheck("needs 5 GB of free GPU memory")
    logits, targets = make_logits(2, 2, 8, torch.float16)
    room = torch.zeros(_APART + 16, dtype=torch.float16, device="cuda")
    spread = room.as_strided((2, 2, 8), (_APART, 8, 1))
    spread.copy_(logits)
    _compare(run_kernel(kernel, spread, targets.cuda()), logits, targets)


def _current_stream(kernel: Kernel) -> None:
    """On another stream it would read the logits before they are there."""
    logits, targets = make_logits(4, 3, 10)
    source, late = logits.cuda(), torch.zeros_like(logits, device="cuda")
    on_gpu = targets.cuda()
    run_kernel(kernel, source, on_gpu)  # compiles and loads
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_SLEEP // 10)
        late.copy_(source)
        found = run_kernel(kernel, late, on_gpu)
    stream.synchronize()
    _compare(found, logits, targets)


def _no_host_sync(kernel: Kernel) -> None:
    needs_real_gpu("a stand-in has done everything when a call returns")
    for average in AVERAGES:
        logits, targets = (part.cuda() for part in make_logits(4, 16, 100))
        run_kernel(kernel, logits, targets, average=average)
        with no_host_sync():
            run_kernel(kernel, logits, targets, average=average)
            # A sync that torch does not know of would take as long as this.
            torch.cuda._sleep(_SLEEP)
            done = torch.cuda.Event()
            run_kernel(kernel, logits, targets, average=average)
            done.record()
            assert not done.query(), f"--average {average}: the host has waited for the GPU"
        torch.cuda.synchronize()


@contextmanager
def no_host_sync() -> Iterator[None]:
    """In this context, a host sync that torch knows of is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _graph(kernel: Kernel) -> None:
    logits, targets = make_logits(4, 3, 10)
    static, on_gpu = torch.zeros_like(logits, device="cuda"), targets.cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run_kernel(kernel, static, on_gpu)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run_kernel(kernel, static, on_gpu)
    static.copy_(logits)
    graph.replay()
    torch.cuda.synchronize()
    _compare(found, logits, targets)


def _other_thread(kernel: Kernel) -> None:
    logits, targets = make_logits(4, 3, 10)
    on_gpu = (logits.cuda(), targets.cuda())
    found: list[tuple[Tensor, ...]] = []
    thread = threading.Thread(target=lambda: found.append(run_kernel(kernel, *on_gpu)))
    thread.start()
    thread.join()
    _compare(found[0], logits, targets)


def _other_gpu(kernel: Kernel) -> None:
    if torch.cuda.device_count() < 2:
        raise SkippedCheck("needs two GPUs")
    logits, targets = make_logits(4, 3, 10)
    with torch.cuda.device(0):
        found = run_kernel(kernel, logits.to("cuda:1"), targets.to("cuda:1"))
        assert torch.cuda.current_device() == 0
    assert found[0].device == torch.device("cuda:1")
    _compare(found, logits, targets)


def _shared_memory() -> str:
    from fastaug.kernels.cuda import launch_plan
    from fastaug.toolchain.cuda_driver import Device

    device = Device(torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device.index)
    limit = getattr(properties, "shared_memory_per_block_optin", device.shared_limit)
    assert device.shared_limit == limit >= 49152, (device.shared_limit, limit)
    plan = launch_plan(8, 1000, device.shared_limit)
    assert plan is not None
    return f"{limit:,} bytes a block"


# --- inputs and exact results ---


def make_logits(
    images: int, views: int, classes: int, dtype: torch.dtype = torch.float32, spread: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Logits and targets on the CPU; views are `spread` apart."""
    generator = torch.Generator().manual_seed(views + classes)
    base = 2 * torch.randn(images, 1, classes, generator=generator)
    noise = torch.randn(images, views, classes, generator=generator)
    targets = torch.randint(classes, (images,), generator=generator)
    return (base + spread * noise).to(dtype), targets


def _exact(logits: Tensor, targets: Tensor | None, **settings: Any) -> tuple[Tensor, ...]:
    """nll, kl and the gradient of each image by the reference, in float64 on the CPU."""
    defaults = {"average": "losses", "kl_weight": 1.0, "label_smoothing": 0.0, "need_grad": True}
    return ReferenceKernel().value_and_grad(logits.double(), targets, **{**defaults, **settings})  # type: ignore[return-value]


def errors(
    found: tuple[Tensor, ...], logits: Tensor, targets: Tensor, **was: Any
) -> dict[str, float]:
    """Largest error of nll, kl and the gradient of the mean over images, in units of its tolerance.

    found: on any device; logits and targets: on the CPU.
    """
    nll, kl, grad = (part.cpu().double() for part in found)
    true_nll, true_kl, true_grad = _exact(logits, targets, **was)
    largest = _GRADIENT[logits.dtype] * true_grad.abs().max().item() + 1e-6
    off = {
        "nll": (nll - true_nll).abs() / (1e-5 * true_nll.abs() + 1e-6),
        "kl": (kl - true_kl).abs() / (2e-5 * true_kl.abs() + 1e-9),
        "gradient": (grad * len(logits) - true_grad).abs() / largest,
    }
    return {name: error.max().item() for name, error in off.items()}


def _compare(found: tuple[Tensor, ...], logits: Tensor, targets: Tensor, **was: Any) -> float:
    """Raise if an error is above its tolerance; return the largest in units of it."""
    worst = 0.0
    for name, error in errors(found, logits, targets, **was).items():
        assert error <= 1, f"{name} is off by {error:.3g} x its tolerance"
        worst = max(worst, error)
    return worst


def run_kernel(
    kernel: Kernel, logits: Tensor, targets: Tensor, **settings: Any
) -> tuple[Tensor, ...]:
    """On tensors that are on the GPU: nll, kl and the gradient of the loss."""
    logits = logits.detach().requires_grad_()
    defaults = {"average": "losses", "kl_weight": 1.0, "label_smoothing": 0.0}
    terms = loss_terms(kernel, logits, targets, **{**defaults, **settings})
    (grad,) = torch.autograd.grad(terms.loss, logits)
    return terms.nll, terms.kl, grad
