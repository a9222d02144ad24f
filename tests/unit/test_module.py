"""MultiViewLoss against the paper's literal definitions in float64, in both orders of the rows."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from expect import raises
from literal import AVERAGES, literal_kl, literal_nll
from torch import Tensor

import fastaug
from fastaug.errors import ConfigError
from fastaug.kernels.native import NativeKernel

B, K, C = 5, 3, 7
ORDERS = ("images", "views")


def rows(order: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Flat logits [B*K, C] that require a gradient, targets [B], and the same logits [B, K, C] in
    float64, put together image by image."""
    torch.manual_seed(0)
    flat = (3 * torch.randn(B * K, C)).to(dtype).requires_grad_()
    step, next_view = (K, 1) if order == "images" else (1, B)
    views = [[flat[b * step + k * next_view] for k in range(K)] for b in range(B)]
    by_image = torch.stack([torch.stack(of_image) for of_image in views]).double()
    return flat, torch.tensor([6, 0, 3, 3, 1]), by_image


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("kernel", ["reference", "native"])
def test_value_and_gradient_equal_the_literal_definition(
    order: str, average: str, kernel: str
) -> None:
    logits, targets, by_image = rows(order)
    loss = fastaug.MultiViewLoss(
        K, average=average, kl_weight=0.7, label_smoothing=0.1, order=order, kernel=kernel
    )
    nll, kl = literal_nll(by_image, targets, average, 0.1), literal_kl(by_image)
    expected = (nll + 0.7 * kl).mean()
    (grad,) = torch.autograd.grad(expected, logits)
    found = loss(logits, targets)
    assert (found.shape, found.dtype) == ((), torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], grad, rtol=1e-4, atol=1e-7)
    terms = loss.terms(logits, targets)
    assert torch.equal(terms.loss, found)
    torch.testing.assert_close(terms.nll.double(), nll.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(terms.kl.double(), kl.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("order", ORDERS)
def test_the_kernel_gets_the_logits_without_a_copy(order: str) -> None:
    class Spy(NativeKernel):
        name = "spy"
        given: Tensor

        def mean_and_grad(self, logits: Tensor, *rest: object) -> tuple:
            self.given = logits
            return super().mean_and_grad(logits, *rest)

    spy = Spy()
    logits, targets, _ = rows(order)
    fastaug.MultiViewLoss(K, order=order, kernel=spy)(logits, targets)
    assert spy.given.shape == (B, K, C)
    assert spy.given.data_ptr() == logits.data_ptr()
    assert spy.given.stride() == ((K * C, C, 1) if order == "images" else (C, B * C, 1))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_autocast(order: str, dtype: torch.dtype) -> None:
    logits, targets, by_image = rows(order, dtype)
    with torch.autocast("cpu", dtype=dtype):
        loss = fastaug.MultiViewLoss(K, order=order)(logits, targets)
    expected = (literal_nll(by_image, targets, "losses", 0.0) + literal_kl(by_image)).mean()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype


@pytest.mark.parametrize("order", ORDERS)
def test_a_compiled_step_has_no_graph_break(order: str) -> None:
    loss = fastaug.MultiViewLoss(K, order=order)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for images in (5, 2, 4):  # other sizes, as of the last batch
        logits = torch.randn(images * K, C, requires_grad=True)
        targets = torch.randint(C, (images,))
        expected, found = loss(logits, targets), compiled(logits, targets)
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(value, logits) for value in (found, expected)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("order", ORDERS)
def test_soft_targets(order: str) -> None:
    """Equal to cross_entropy of all views, which have the target of their image, and the KL."""
    logits, _, by_image = rows(order)
    targets = torch.rand(B, C).softmax(-1)
    found = fastaug.MultiViewLoss(K, order=order)(logits, targets)
    per_view = targets.double().repeat_interleave(K, 0)
    nll = torch.nn.functional.cross_entropy(by_image.flatten(0, 1), per_view)
    expected = nll + literal_kl(by_image).mean()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    with raises(ConfigError, "targets"):
        fastaug.MultiViewLoss(K, order=order)(logits, per_view)


def test_one_view_is_cross_entropy() -> None:
    logits, targets = torch.randn(6, C), torch.randint(C, (6,))
    for order in ORDERS:
        loss = fastaug.MultiViewLoss(1, order=order, label_smoothing=0.2)(logits, targets)
        expected = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.2)
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_no_images(order: str) -> None:
    empty = torch.empty(0, C), torch.empty(0, dtype=torch.int64)
    assert fastaug.MultiViewLoss(K, order=order)(*empty).isnan()  # as torch: the mean of nothing


def test_it_is_copied_and_pickled_and_has_no_state() -> None:
    loss = fastaug.MultiViewLoss(K, average="probs", kl_weight=0.5, order="views")
    logits, targets, _ = rows("views")
    for copied in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(copied(logits, targets), loss(logits, targets))
    assert dict(loss.state_dict()) == {}
    assert list(loss.parameters()) == []


def test_it_shows_its_settings() -> None:
    named = fastaug.MultiViewLoss(4, kl_weight=0.5, order="views", kernel=NativeKernel())
    for text in ("views=4", "'losses'", "kl_weight=0.5", "order='views'", "kernel='native'"):
        assert text in repr(named)


def test_wrong_settings() -> None:
    with raises(ConfigError, "order images views rows"):
        fastaug.MultiViewLoss(2, order="rows")  # type: ignore[arg-type]
    for views in (0, -1, 2.0, "4"):
        with raises(ConfigError, "views", repr(views)):
            fastaug.MultiViewLoss(views)  # type: ignore[arg-type]
    with raises(ConfigError, "average losses probs logits sum"):
        fastaug.MultiViewLoss(2, average="sum")  # type: ignore[arg-type]
    with raises(ConfigError, "kl_weight -1"):
        fastaug.MultiViewLoss(2, kl_weight=-1)
    with raises(ConfigError, "label_smoothing 1"):
        fastaug.MultiViewLoss(2, label_smoothing=1)


def test_wrong_logits_and_targets() -> None:
    loss = fastaug.MultiViewLoss(K)
    targets = torch.zeros(B, dtype=torch.int64)
    with raises(ConfigError, "logits", f"[{B}, {K}, {C}]", "objective"):
        loss(torch.zeros(B, K, C), targets)
    with raises(ConfigError, "logits None"):
        loss(None, targets)
    with raises(ConfigError, "views=3 16"):
        loss(torch.zeros(16, C), targets)
    with raises(ConfigError, "targets[::3]"):
        loss(torch.zeros(B * K, C), targets.repeat_interleave(K))
    with raises(ConfigError, "targets[:5]"):
        fastaug.MultiViewLoss(K, order="views")(torch.zeros(B * K, C), targets.repeat(K))
    with raises(ConfigError, "targets", "[5]"):  # objective's own checks
        loss(torch.zeros(B * K, C), torch.tensor(0))
    with raises(ConfigError, "targets", "[5]"):
        loss(torch.zeros(B * K, C), targets[:-1])
