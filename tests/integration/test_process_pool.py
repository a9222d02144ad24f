"""make_views and the loss in a process pool, with each way of starting its processes.

The parent has used its own threads before: a forked child has none of them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from literal import literal_kl, literal_nll
from torch import Tensor

import fastaug

LONG = 100
"""Seconds that no call takes, not even the start of a process on a busy machine."""


def pictures() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(90, 70), (64, 64), (50, 120), (130, 60)] * 2
    return [torch.randint(256, (*s, 3), dtype=torch.uint8, generator=generator) for s in sizes]


def logits_and_targets() -> tuple[Tensor, Tensor]:
    """Enough for two threads of the kernel (16,384 each), too few for torch's own (32,768)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8 * 4, 600, generator=generator), torch.arange(8)


def loss_and_gradient(
    loss: fastaug.MultiViewLoss, logits: Tensor, targets: Tensor
) -> tuple[float, Tensor]:
    logits = logits.clone().requires_grad_()
    torch.set_num_threads(2)  # of the kernel; the rest is too small for torch to divide
    value = loss(logits, targets)
    (grad,) = torch.autograd.grad(value, logits)
    torch.set_num_threads(1)
    return value.item(), grad


@pytest.fixture(params=["fork", "spawn", "forkserver"])
def pool(request: pytest.FixtureRequest) -> Iterator[ProcessPoolExecutor]:
    """A pool whose parent has used OpenMP's threads and those of the view kernel."""
    context = multiprocessing.get_context(request.param)
    try:
        torch.set_num_threads(2)
        torch.rand(200_000).sin()  # in torch's threads
        images = pictures()
        plan = fastaug.plan_views(images, views=8, size=64)
        fastaug.make_views(images, plan, threads=2)
        loss_and_gradient(fastaug.MultiViewLoss(4, kernel="native"), *logits_and_targets())
        # As a DataLoader does in its workers: torch's own operators hang in a forked process.
        pool = ProcessPoolExecutor(1, context, initializer=torch.set_num_threads, initargs=(1,))
        try:
            yield pool
        finally:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)
    finally:
        torch.set_num_threads(1)


def test_make_views_and_the_loss(pool: ProcessPoolExecutor) -> None:
    images = pictures()
    plan = fastaug.plan_views(images, views=8, size=64, augment="randaugment")
    views = pool.submit(fastaug.make_views, images, plan, threads=2)
    logits, targets = logits_and_targets()
    loss = fastaug.MultiViewLoss(4, kernel="native")
    terms = pool.submit(loss_and_gradient, loss, logits, targets)
    # Rendered here by one thread, and with the literal formula.
    assert torch.equal(views.result(LONG), fastaug.make_views(images, plan, threads=1))
    exact = logits.double().requires_grad_()
    by_image = exact.unflatten(0, (8, 4))
    expected = (literal_nll(by_image, targets, "losses", 0.0) + literal_kl(by_image)).mean()
    (expected_grad,) = torch.autograd.grad(expected, exact)
    value, grad = terms.result(LONG)
    assert value == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(grad, expected_grad.float(), rtol=1e-4, atol=1e-7)
