"""The loss kernels on a GPU, for those who have one: pytest -m gpu."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from literal import AVERAGES, literal_terms
from torch import Tensor

import fastaug
from fastaug.kernels.contract import Kernel
from fastaug.kernels.cuda import CudaKernel, launch_plan
from fastaug.kernels.triton import TritonKernel
from fastaug.toolchain.cuda_driver import Device

pytestmark = pytest.mark.gpu

KERNELS: dict[str, Kernel] = {"cuda": CudaKernel(), "triton": TritonKernel()}
each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
# Relative to the largest entry of the gradient: half precision rounds it.
GRADIENT = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
# The last ones do not fit into shared memory or registers, and are streamed.
SHAPES = [(1, 1, 1), (3, 2, 2), (5, 3, 17), (4, 16, 100), (4, 8, 1000), (2, 33, 70), (1, 16, 21841)]


def make(
    images: int, views: int, classes: int, dtype: torch.dtype = torch.float32, spread: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Logits and targets on the CPU; views are `spread` apart."""
    generator = torch.Generator().manual_seed(views + classes)
    base = 2 * torch.randn(images, 1, classes, generator=generator)
    noise = torch.randn(images, views, classes, generator=generator)
    targets = torch.randint(classes, (images,), generator=generator)
    return (base + spread * noise).to(dtype), targets


def compare(
    found: tuple[Tensor, Tensor, Tensor], logits: Tensor, targets: Tensor, **was: Any
) -> None:
    """nll, kl and the gradient of the mean over images, with float64 on the CPU."""
    average, kl_weight = was.get("average", "losses"), was.get("kl_weight", 1.0)
    nll, kl, grad = (part.cpu() for part in found)
    true_nll, true_kl, true_grad = literal_terms(
        logits, targets, average, kl_weight, was.get("label_smoothing", 0.0)
    )
    torch.testing.assert_close(nll.double(), true_nll, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kl.double(), true_kl, rtol=2e-5, atol=1e-9)
    largest = true_grad.abs().max().item()
    torch.testing.assert_close(
        grad.double() * len(logits),
        true_grad,
        rtol=0,
        atol=GRADIENT[logits.dtype] * largest + 1e-6,
    )


def run(kernel: Kernel, logits: Tensor, targets: Tensor, **settings: Any) -> tuple:
    """On tensors that are on the GPU: nll, kl and the gradient of the loss."""
    logits = logits.detach().requires_grad_()
    terms = fastaug.objective(logits, targets, kernel=kernel, **settings)
    (grad,) = torch.autograd.grad(terms.loss, logits)
    return terms.nll, terms.kl, grad


@each_kernel
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(kernel: Kernel, shape: tuple[int, int, int], average: str) -> None:
    for dtype in GRADIENT:
        for number, spread in enumerate((1.0, 3e-3)):
            logits, targets = make(*shape, dtype, spread)
            settings = {"average": average, "kl_weight": 0.7, "label_smoothing": 0.1 * number}
            found = run(kernel, logits.cuda(), targets.cuda(), **settings)
            compare(found, logits, targets, **settings)


@each_kernel
def test_it_is_admitted(kernel: Kernel) -> None:
    report = fastaug.check_kernel(kernel, "cuda")
    assert report.admitted, report


def test_a_fault_in_the_admission_check_leaves_the_gpu_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index outside of its tensor is a device-side assertion, which ends a CUDA context."""
    (tmp_path / "faulting_kernel.py").write_text(
        """
import torch
from fastaug.kernels.reference import ReferenceKernel

class Faulting(ReferenceKernel):
    name = "faulting"

    def value_and_grad(self, logits, *arguments, **settings):
        torch.zeros(4, device=logits.device)[torch.tensor([9], device=logits.device)].sum().item()
        return super().value_and_grad(logits, *arguments, **settings)

kernel = Faulting()
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    report = fastaug.check_kernel("faulting_kernel:kernel", "cuda")
    assert not report.admitted
    assert torch.arange(5, device="cuda").sum().item() == 10


@each_kernel
def test_only_the_regularizer_and_strides(kernel: Kernel) -> None:
    room, _ = make(6, 5, 40)
    for logits in (room[::2, 1:, 3:20], room.transpose(0, 1), room.transpose(1, 2)):
        on_gpu = room.cuda().as_strided(logits.shape, logits.stride(), logits.storage_offset())
        on_gpu.requires_grad_()
        kl = fastaug.pairwise_kl(on_gpu, kernel=kernel)
        (grad,) = torch.autograd.grad(kl.sum(), on_gpu)
        _, true_kl, true_grad = literal_terms(logits, None, None, 1.0, 0.0)
        torch.testing.assert_close(kl.cpu().double(), true_kl, rtol=2e-5, atol=1e-9)
        torch.testing.assert_close(grad.cpu().double(), true_grad, rtol=1e-4, atol=1e-6)


@each_kernel
def test_many_images_and_none(kernel: Kernel) -> None:
    logits, targets = make(70_000, 2, 3)
    compare(run(kernel, logits.cuda(), targets.cuda()), logits, targets)
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


@each_kernel
def test_a_target_that_is_no_class_gives_nan(kernel: Kernel) -> None:
    logits, targets = make(4, 3, 10)
    targets[1], targets[3] = -1, 10
    terms = fastaug.objective(logits.cuda(), targets.cuda(), kernel=kernel)
    assert terms.nll.isnan().tolist() == [False, True, False, True]


@each_kernel
def test_images_may_lie_more_than_2_31_numbers_apart(kernel: Kernel) -> None:
    apart = 2**31 + 8
    if torch.cuda.mem_get_info()[0] < 2.2 * apart:
        pytest.skip("needs 5 GB of memory on the GPU")
    logits, targets = make(2, 2, 8, torch.float16)
    room = torch.zeros(apart + 16, dtype=torch.float16, device="cuda")
    spread = room.as_strided((2, 2, 8), (apart, 8, 1))
    spread.copy_(logits)
    compare(run(kernel, spread, targets.cuda()), logits, targets)


@each_kernel
def test_it_runs_on_the_current_stream(kernel: Kernel) -> None:
    """On another stream it would read the logits before they are there."""
    logits, targets = make(4, 16, 100)
    source, late = logits.cuda(), torch.zeros_like(logits, device="cuda")
    targets_there = targets.cuda()
    run(kernel, source, targets_there)  # compiles and loads
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(source)
        found = run(kernel, late, targets_there)
    stream.synchronize()
    compare(found, logits, targets)


@contextmanager
def no_host_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_kernel
@pytest.mark.parametrize("average", AVERAGES)
def test_nothing_waits_for_the_gpu(kernel: Kernel, average: str) -> None:
    logits, targets = (part.cuda() for part in make(4, 16, 100))
    run(kernel, logits, targets, average=average)
    with no_host_sync():
        run(kernel, logits, targets, average=average)
        # A sync that torch does not know of would take as long as this.
        torch.cuda._sleep(500_000_000)
        done = torch.cuda.Event()
        run(kernel, logits, targets, average=average)
        done.record()
        assert not done.query()
    torch.cuda.synchronize()


@each_kernel
def test_it_can_be_captured_in_a_graph(kernel: Kernel) -> None:
    logits, targets = make(4, 16, 100)
    static, targets_there = torch.zeros_like(logits, device="cuda"), targets.cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(kernel, static, targets_there)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(kernel, static, targets_there)
    static.copy_(logits)
    graph.replay()
    torch.cuda.synchronize()
    compare(found, logits, targets)


@each_kernel
def test_any_thread_may_call_it(kernel: Kernel) -> None:
    logits, targets = make(4, 16, 100)
    on_gpu = (logits.cuda(), targets.cuda())
    found: list[tuple] = []
    thread = threading.Thread(target=lambda: found.append(run(kernel, *on_gpu)))
    thread.start()
    thread.join()
    compare(found[0], logits, targets)


@each_kernel
def test_logits_may_be_on_another_gpu_than_the_current_one(kernel: Kernel) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    logits, targets = make(4, 16, 100)
    with torch.cuda.device(0):
        found = run(kernel, logits.to("cuda:1"), targets.to("cuda:1"))
        assert torch.cuda.current_device() == 0
    assert found[0].device == torch.device("cuda:1")
    compare(found, logits, targets)


def test_the_gpu_has_the_shared_memory_that_plans_count_on() -> None:
    device = Device(torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device.index)
    limit = getattr(properties, "shared_memory_per_block_optin", device.shared_limit)
    assert device.shared_limit == limit >= 49152
    assert launch_plan(8, 1000, device.shared_limit) is not None
