"""The objectives in a training loop: autocast, torch.compile, DDP, accumulation, odd uses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from literal import AVERAGES, literal_kl, literal_nll
from ranks import run_ranks
from torch import Tensor, nn

import fastaug
from fastaug.kernels.reference import ReferenceKernel
from fastaug.runtime.distributed import Group

KERNELS = ("reference", "native")


def literal_loss(z: Tensor, y: Tensor) -> Tensor:
    return (literal_nll(z, y, "losses", 0.0) + literal_kl(z)).mean()


def batch(images: int = 3, views: int = 4, classes: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(images * views, 10), torch.randint(classes, (images,))


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(10, 7)


@pytest.mark.parametrize("kernel", KERNELS)
class TestAutograd:
    def test_both_functions_on_the_same_logits(self, kernel: str) -> None:
        torch.manual_seed(0)
        z = torch.randn(3, 4, 7, requires_grad=True)
        y = torch.tensor([0, 6, 3])
        total = fastaug.objective(z, y, kernel=kernel).loss
        (total + 2 * fastaug.pairwise_kl(z, kernel=kernel).sum()).backward()
        exact = z.detach().double().requires_grad_()
        (literal_loss(exact, y) + 2 * literal_kl(exact).sum()).backward()
        torch.testing.assert_close(z.grad, exact.grad.float(), rtol=1e-5, atol=1e-7)

    def test_the_same_graph_twice(self, kernel: str) -> None:
        z = torch.randn(3, 4, 7, requires_grad=True)
        loss = fastaug.objective(z, torch.tensor([0, 6, 3]), kernel=kernel).loss
        first = torch.autograd.grad(loss, z, retain_graph=True)
        second = torch.autograd.grad(3 * loss, z)
        torch.testing.assert_close(second[0], 3 * first[0])

    def test_what_is_kept_for_a_second_time_is_not_given_away(self, kernel: str) -> None:
        z = torch.randn(3, 4, 7, requires_grad=True)
        loss = fastaug.objective(z, torch.tensor([0, 6, 3]), kernel=kernel).loss
        loss.backward(retain_graph=True)
        once = z.grad.clone()
        z.grad.zero_()
        loss.backward(retain_graph=True)
        torch.testing.assert_close(z.grad, once)
        loss.backward()
        torch.testing.assert_close(z.grad, 2 * once)

    def test_a_kept_gradient_that_was_changed_is_noticed(self, kernel: str) -> None:
        z = torch.randn(3, 4, 7, requires_grad=True)
        loss = fastaug.objective(z, torch.tensor([0, 6, 3]), kernel=kernel).loss
        (grad,) = torch.autograd.grad(loss, z, retain_graph=True)
        before = grad.clone()
        grad.zero_()
        if kernel == "native":  # it was the kept one itself, and not a product
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, z)
        else:
            torch.testing.assert_close(torch.autograd.grad(loss, z)[0], before)

    def test_a_second_derivative_is_refused(self, kernel: str) -> None:
        z = torch.randn(3, 4, 7, requires_grad=True)
        loss = fastaug.objective(z, torch.tensor([0, 6, 3]), kernel=kernel).loss
        (grad,) = torch.autograd.grad(loss, z, create_graph=True, retain_graph=True)
        assert not grad.requires_grad
        (grad,) = torch.autograd.grad(loss**2, z, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    def test_accumulated_gradients(self, kernel: str, linear: nn.Linear) -> None:
        x, y = batch(images=4)

        def backward(x: Tensor, y: Tensor, share: float) -> None:
            logits = linear(x).unflatten(0, (-1, 4))
            (fastaug.objective(logits, y, kernel=kernel).loss * share).backward()

        backward(x, y, 1.0)
        whole = linear.weight.grad.clone()
        linear.zero_grad()
        for part in (slice(0, 1), slice(1, 4)):
            backward(x[part.start * 4 : part.stop * 4], y[part], (part.stop - part.start) / 4)
        torch.testing.assert_close(linear.weight.grad, whole)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast(self, kernel: str, linear: nn.Linear, dtype: torch.dtype) -> None:
        x, y = batch()
        with torch.autocast("cpu", dtype=dtype):
            logits = linear(x).unflatten(0, (-1, 4))
            assert logits.dtype == dtype
            loss = fastaug.objective(logits, y, kernel=kernel).loss
        assert loss.dtype == torch.float32
        torch.testing.assert_close(
            loss.double(), literal_loss(logits.double(), y), rtol=1e-5, atol=0
        )
        loss.backward()
        logits_of_weights = (x @ linear.weight.T + linear.bias).unflatten(0, (-1, 4))
        (grad,) = torch.autograd.grad(literal_loss(logits_of_weights.double(), y), linear.weight)
        torch.testing.assert_close(linear.weight.grad, grad.float(), rtol=0.1, atol=0.02)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_with_soft_targets(
        self, kernel: str, linear: nn.Linear, dtype: torch.dtype
    ) -> None:
        """A teacher under autocast gives targets in half precision."""
        x, _ = batch()
        with torch.autocast("cpu", dtype=dtype):
            logits = linear(x).unflatten(0, (-1, 4))
            teacher = linear(x.flip(0)).unflatten(0, (-1, 4)).mean(1).softmax(-1).to(dtype)
            loss = fastaug.objective(logits, teacher, kernel=kernel).loss
        assert loss.dtype == torch.float32
        exact = literal_loss(logits.detach().double(), teacher.detach())
        torch.testing.assert_close(loss.detach().double(), exact, rtol=1e-5, atol=0)
        loss.backward()
        assert linear.weight.grad.isfinite().all()

    def test_logits_that_are_no_block_of_memory(self, kernel: str) -> None:
        torch.manual_seed(0)
        base = torch.randn(7, 4, 6, requires_grad=True)
        z, y = base.permute(2, 1, 0)[::2], torch.tensor([0, 6, 3])
        fastaug.objective(z, y, kernel=kernel).loss.backward()
        exact = base.detach().double().requires_grad_()
        literal_loss(exact.permute(2, 1, 0)[::2], y).backward()
        torch.testing.assert_close(base.grad, exact.grad.float(), rtol=1e-5, atol=1e-7)

    def test_no_images(self, kernel: str) -> None:
        z = torch.randn(0, 4, 7, requires_grad=True)
        assert fastaug.pairwise_kl(z, kernel=kernel).shape == (0,)
        terms = fastaug.objective(z, torch.empty(0, dtype=torch.int64), kernel=kernel)
        assert terms.loss.isnan()  # as torch has it: the mean of nothing
        terms.loss.backward()
        assert z.grad.shape == z.shape


class Mine(ReferenceKernel):
    name = "mine"


class TestCompile:
    @pytest.mark.parametrize(
        "kernel", [*KERNELS, "auto", Mine()], ids=lambda k: getattr(k, "name", k)
    )
    @pytest.mark.parametrize("average", AVERAGES)
    def test_there_is_no_graph_break(
        self, kernel: str | Mine, average: str, linear: nn.Linear
    ) -> None:
        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = linear(x).unflatten(0, (-1, 4))
            terms = fastaug.objective(logits, y, average=average, kernel=kernel)
            return terms.loss + fastaug.pairwise_kl(logits, kernel=kernel).sum(), *terms[1:]

        if isinstance(kernel, Mine):
            fastaug.register_kernel("mine", kernel)
        torch.compiler.reset()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for images in (3, 5, 2):
            x, y = batch(images)
            grads = []
            for run in (step, compiled):
                linear.zero_grad()
                found = run(x, y)
                found[0].backward()
                grads.append((*found, linear.weight.grad.clone()))
            torch.testing.assert_close(grads[1], grads[0])
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, y), step(x, y))

    @pytest.mark.parametrize("kernel", [*KERNELS, "auto"])
    @pytest.mark.parametrize("average", AVERAGES)
    def test_soft_targets_without_a_graph_break(
        self, kernel: str, average: str, linear: nn.Linear
    ) -> None:
        def step(x: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits, targets = linear(x).unflatten(0, (-1, 4)), teacher.softmax(-1)
            return fastaug.objective(logits, targets, average=average, kernel=kernel)

        torch.compiler.reset()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for images, dtype in ((3, torch.float32), (5, torch.float32), (3, torch.float64)):
            x, _ = batch(images)
            teacher = torch.randn(images, 7, dtype=dtype, requires_grad=True)
            results = []
            for run in (step, compiled):
                linear.zero_grad()
                found = run(x, teacher)
                found[0].backward()
                results.append((*found, linear.weight.grad.clone()))
            torch.testing.assert_close(results[1], results[0])
            assert teacher.grad is None

    def test_a_graph_knows_a_kernel_by_its_name(self) -> None:
        z, kernel = torch.randn(2, 3, 4), Mine()  # not the one that is registered
        compiled = torch.compile(
            lambda z: fastaug.pairwise_kl(z, kernel=kernel), fullgraph=True, backend="eager"
        )
        with pytest.raises(Exception, match="register_kernel"):
            compiled(z)

    def test_the_operator_keeps_torchs_rules(self) -> None:
        z, y = torch.randn(3, 4, 7), torch.tensor([0, 6, 3])
        for targets, need_grad in ((y, True), (y, False), (torch.rand(3, 7), True)):
            arguments = (z, targets, "reference", "losses", 1.0, 0.1, need_grad)
            torch.library.opcheck(torch.ops.fastaug.value_and_grad.default, arguments)


def _gradient_of_a_share(group: Group) -> np.ndarray:
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(10, 7))
    x, y = batch(images=4)
    mine = slice(group.rank * 2, group.rank * 2 + 2)
    logits = model(x[mine.start * 4 : mine.stop * 4]).unflatten(0, (-1, 4))
    fastaug.objective(logits, y[mine]).loss.backward()
    return model.module.weight.grad.numpy()


def test_two_ranks_of_ddp_have_the_gradient_of_the_whole_batch(linear: nn.Linear) -> None:
    x, y = batch(images=4)
    exact = literal_loss(linear(x).unflatten(0, (-1, 4)).double(), y)
    (grad,) = torch.autograd.grad(exact, linear.weight)
    for found in run_ranks(2, _gradient_of_a_share):
        np.testing.assert_allclose(found, grad.numpy(), rtol=1e-5, atol=1e-7)
