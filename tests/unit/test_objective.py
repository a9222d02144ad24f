"""The objectives against the paper's literal definitions, in float64, through autograd."""

from __future__ import annotations

import math

import pytest
import torch
from expect import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from literal import AVERAGES, literal_kl, literal_nll
from torch import Tensor

import fastaug
from fastaug.errors import ConfigError
from fastaug.kernels import registry

# relative and absolute error of values and gradients against float64
TOLERANCE = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-11},
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
}


def literal_loss(
    z: Tensor, y: Tensor, average: str, kl_weight: float, smoothing: float
) -> tuple[Tensor, Tensor]:
    z = z.detach().double().requires_grad_()
    loss = (literal_nll(z, y, average, smoothing) + kl_weight * literal_kl(z)).mean()
    (grad,) = torch.autograd.grad(loss, z)
    return loss.detach(), grad


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    b, k, c = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(2, 12))
    scale = draw(st.sampled_from([0.01, 1.0, 5.0, 20.0]))
    offset = draw(st.sampled_from([0.0, 100.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    z = torch.randn(b, k, c, generator=generator, dtype=torch.float64) * scale + offset
    return z, torch.randint(c, (b,), generator=generator)


@settings(max_examples=60, deadline=None)
@given(
    case=cases(),
    average=st.sampled_from(AVERAGES),
    kl_weight=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
)
def test_value_and_gradient_equal_the_literal_definition(
    case: tuple[Tensor, Tensor], average: str, kl_weight: float, smoothing: float
) -> None:
    z, y = case
    z.requires_grad_()
    terms = fastaug.objective(z, y, average=average, kl_weight=kl_weight, label_smoothing=smoothing)
    terms.loss.backward()
    loss, grad = literal_loss(z, y, average, kl_weight, smoothing)
    tolerance = TOLERANCE[torch.float64]
    torch.testing.assert_close(terms.loss.detach(), loss, **tolerance)
    torch.testing.assert_close(
        terms.nll, literal_nll(z.detach(), y, average, smoothing), **tolerance
    )
    torch.testing.assert_close(terms.kl, literal_kl(z.detach()), **tolerance)
    torch.testing.assert_close(z.grad, grad, **tolerance)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("views", [1, 2, 5])
def test_gradcheck(average: str, views: int) -> None:
    torch.manual_seed(0)
    z = torch.randn(3, views, 4, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 3, 1])

    def loss(z: Tensor) -> Tensor:
        return fastaug.objective(z, y, average=average, kl_weight=0.7, label_smoothing=0.1).loss

    assert torch.autograd.gradcheck(loss, (z,))
    assert torch.autograd.gradcheck(fastaug.pairwise_kl, (z,))


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize(("spread", "views"), [(4e-3, 8), (0.1, 8), (3.0, 16), (3.0, 2)])
def test_fp32_holds_its_digits_where_views_nearly_agree(
    average: str, spread: float, views: int
) -> None:
    torch.manual_seed(1)
    base = torch.randn(4, 1, 100, dtype=torch.float64) * 3
    z = (base + spread * torch.randn(4, views, 100, dtype=torch.float64)).float().requires_grad_()
    y = torch.randint(100, (4,))
    terms = fastaug.objective(z, y, average=average, label_smoothing=0.1)
    terms.loss.backward()
    loss, grad = literal_loss(z, y, average, 1.0, 0.1)
    torch.testing.assert_close(terms.loss.double(), loss, **TOLERANCE[torch.float32])
    torch.testing.assert_close(z.grad.double(), grad, **TOLERANCE[torch.float32])
    # The KL alone, down to 1e-5 nats: a form that cancels is off by more than its own size here.
    torch.testing.assert_close(
        terms.kl.double(), literal_kl(z.detach().double()), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_computed_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    z = torch.randn(3, 4, 10).to(dtype).requires_grad_()
    y = torch.tensor([1, 2, 3])
    terms = fastaug.objective(z, y)
    terms.loss.backward()
    loss, grad = literal_loss(z, y, "losses", 1.0, 0.0)
    assert terms.nll.dtype == terms.kl.dtype == torch.float32
    torch.testing.assert_close(terms.loss.double(), loss, **TOLERANCE[torch.float32])
    assert z.grad.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(z.grad.double(), grad, rtol=2 * eps, atol=2 * eps * grad.abs().max())


@settings(max_examples=60, deadline=None)
@given(case=cases(), smoothing=st.sampled_from([0.0, 0.1]))
def test_identities_and_inequalities(case: tuple[Tensor, Tensor], smoothing: float) -> None:
    z, y = case
    nll = {
        average: fastaug.objective(z, y, average=average, label_smoothing=smoothing).nll
        for average in AVERAGES
    }
    # Jensen; the paper's appendix has the signs of both reversed.
    assert (nll["probs"] <= nll["losses"] + 1e-9).all()
    assert (nll["logits"] <= nll["losses"] + 1e-9).all()
    g = z.mean(1, keepdim=True).log_softmax(-1)
    gap = (g.exp() * (g - z.log_softmax(-1))).sum(-1).mean(1)
    torch.testing.assert_close(nll["losses"] - nll["logits"], gap, rtol=1e-8, atol=1e-9)
    kl = fastaug.pairwise_kl(z)
    assert (kl >= 0).all()
    torch.testing.assert_close(fastaug.pairwise_kl(z.flip(1)), kl, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(fastaug.pairwise_kl(z + 7.0), kl, rtol=1e-7, atol=1e-9)


def test_at_two_views_it_is_the_mean_of_both_directions() -> None:
    p, r = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.6, 0.3])
    z = torch.stack([p, r]).log()[None]
    both = (p * (p / r).log()).sum() + (r * (r / p).log()).sum()
    torch.testing.assert_close(fastaug.pairwise_kl(z), both[None] / 2)


@pytest.mark.parametrize("average", AVERAGES)
def test_one_view_is_cross_entropy_and_has_no_kl(average: str) -> None:
    torch.manual_seed(0)
    z = torch.randn(5, 1, 7, requires_grad=True)
    y = torch.randint(7, (5,))
    terms = fastaug.objective(z, y, average=average, kl_weight=3.0, label_smoothing=0.1)
    terms.loss.backward()
    flat = z.detach()[:, 0].clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(flat, y, label_smoothing=0.1)
    expected.backward()
    torch.testing.assert_close(terms.loss, expected)
    torch.testing.assert_close(z.grad[:, 0], flat.grad)
    assert terms.kl.tolist() == [0.0] * 5


@pytest.mark.parametrize("average", AVERAGES)
def test_equal_views_have_no_kl(average: str) -> None:
    torch.manual_seed(0)
    z = (torch.randn(4, 1, 50) * 5).expand(4, 8, 50).clone().requires_grad_()
    terms = fastaug.objective(z, torch.randint(50, (4,)), average=average)
    terms.loss.backward()
    assert (terms.kl >= 0).all()
    assert terms.kl.max() < 1e-10
    torch.testing.assert_close(z.grad, z.grad.mean(1, keepdim=True).expand_as(z), rtol=0, atol=1e-7)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("scale", [200.0, 1e4, 1e10])
def test_large_logits_stay_finite(average: str, scale: float) -> None:
    z = torch.tensor([[[scale, 0.0, -scale], [0.0, scale, -scale]]], requires_grad=True)
    terms = fastaug.objective(z, torch.tensor([0]), average=average, label_smoothing=0.1)
    terms.loss.backward()
    assert terms.loss.isfinite()
    assert z.grad.isfinite().all()
    if scale == 200.0:
        loss, _ = literal_loss(z, torch.tensor([0]), average, 1.0, 0.1)
        torch.testing.assert_close(terms.loss.double(), loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("average", AVERAGES)
def test_a_class_at_minus_infinity_in_all_views_takes_no_part(average: str) -> None:
    torch.manual_seed(0)
    z = torch.randn(3, 4, 6, dtype=torch.float64)
    masked = torch.cat([z, torch.full((3, 4, 1), -math.inf)], -1).requires_grad_()
    y = torch.tensor([0, 1, 2])
    terms = fastaug.objective(masked, y, average=average)
    terms.loss.backward()
    loss, grad = literal_loss(z, y, average, 1.0, 0.0)
    torch.testing.assert_close(terms.loss.detach(), loss, **TOLERANCE[torch.float64])
    torch.testing.assert_close(masked.grad[..., :6], grad, **TOLERANCE[torch.float64])
    assert (masked.grad[..., 6] == 0).all()


def test_a_class_at_minus_infinity_in_some_views_has_infinite_kl() -> None:
    z = torch.zeros(1, 3, 4)
    z[0, 1, 2] = -math.inf
    assert fastaug.pairwise_kl(z).item() == math.inf
    z.requires_grad_()
    terms = fastaug.objective(z, torch.tensor([0]), kl_weight=0.0)
    terms.loss.backward()
    assert terms.loss.isfinite()
    assert z.grad.isfinite().all()


def test_strided_logits_and_weighted_images() -> None:
    torch.manual_seed(0)
    z = torch.randn(6, 10, 4, dtype=torch.float64)[::2, 1::3].requires_grad_()
    weight = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    (grad,) = torch.autograd.grad((fastaug.pairwise_kl(z) * weight).sum(), z)
    copy = z.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad((literal_kl(copy) * weight).sum(), copy)
    torch.testing.assert_close(grad, expected, **TOLERANCE[torch.float64])


def test_no_gradient_is_computed_where_none_is_needed() -> None:
    asked = []

    class Spy(type(registry.load_kernel("reference"))):  # type: ignore[misc]
        name = "spy"

        def value_and_grad(self, *args, need_grad: bool, **kwargs):
            asked.append(need_grad)
            return super().value_and_grad(*args, need_grad=need_grad, **kwargs)

    z, y, spy = torch.randn(2, 3, 4), torch.tensor([0, 1]), Spy()
    fastaug.objective(z, y, kernel=spy)
    asked.clear()  # that was the admission check
    fastaug.objective(z, y, kernel=spy)
    fastaug.objective(z.requires_grad_(), y, kernel=spy)
    with torch.no_grad():
        fastaug.objective(z, y, kernel=spy)
    assert asked == [False, True, False]


@pytest.mark.parametrize(
    ("logits", "targets", "options", "message"),
    [
        ((6, 4), torch.zeros(6).long(), {}, "[6, 4]"),
        ((2, 3, 4), torch.zeros(3).long(), {}, "int64 [2] [3]"),
        ((2, 3, 4), torch.zeros(2), {}, "torch.float32"),
        ((2, 3, 4), torch.zeros(2).int(), {}, "torch.int32 targets.long()"),
        ((2, 3, 4), [0, 1], {}, "list"),
        ((2, 3, 4), torch.tensor([0, 4]), {}, "0 3 4 1"),
        ((2, 3, 4), torch.tensor([-1, 0]), {}, "0 3 -1"),
        ((2, 3, 4), torch.zeros(2).long(), {"kl_weight": -1}, "kl_weight -1"),
        ((2, 3, 4), torch.zeros(2).long(), {"kl_weight": math.nan}, "kl_weight nan"),
        ((2, 3, 4), torch.zeros(2).long(), {"kl_weight": math.inf}, "kl_weight inf"),
        ((2, 3, 4), torch.zeros(2).long(), {"kl_weight": "1"}, "kl_weight '1'"),
        ((2, 3, 4), torch.zeros(2).long(), {"label_smoothing": None}, "label_smoothing None"),
        ((2, 3, 4), torch.zeros(2).long(), {"average": "loss"}, "losses probs logits"),
        ((2, 3, 4), torch.zeros(2).long(), {"label_smoothing": 1.5}, "1 1.5"),
    ],
)
def test_wrong_arguments(logits: tuple, targets: Tensor, options: dict, message: str) -> None:
    with raises(ConfigError, message):
        fastaug.objective(torch.zeros(logits), targets, **options)


@pytest.mark.parametrize("logits", [torch.zeros(6, 4), torch.zeros(2, 0, 4), None, [[[0.0]]]])
def test_wrong_logits(logits: Tensor) -> None:
    with raises(ConfigError, "logits"):
        fastaug.pairwise_kl(logits)
    with raises(ConfigError, "logits"):
        fastaug.objective(logits, torch.zeros(2).long())
