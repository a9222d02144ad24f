"""Targets [B, C]: against torch's cross_entropy and the literal definitions, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expect import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from literal import AVERAGES, literal_terms
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

import fastaug
from fastaug.errors import ConfigError, KernelUnavailableError
from fastaug.kernels import admission, registry
from fastaug.kernels.reference import ReferenceKernel
from fastaug.runtime.device import cpp_compiler

# Kernel -> dtype of the logits, relative and absolute error.
PRECISION: dict[str, tuple[torch.dtype, float, float]] = {
    "reference": (torch.float64, 1e-9, 1e-11),
    "native": (torch.float32, 2e-5, 4e-6),
}
if cpp_compiler() is None:
    del PRECISION["native"]
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "teacher": lambda z: z.softmax(-1),
    "any sum": lambda z: z.abs(),
    "one class": lambda z: one_hot(z.argmax(-1), z.shape[-1]).double(),
    "zeros": torch.zeros_like,
    "of both signs": lambda z: z,
}


def make(kind: str, images: int, views: int, classes: int, scale: float = 1.0) -> tuple:
    z = scale * torch.randn(images, views, classes, dtype=torch.float64)
    return z, KINDS[kind](torch.randn(images, classes, dtype=torch.float64))


@pytest.mark.parametrize("kernel", PRECISION)
@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 40)),
    kind=st.sampled_from([*KINDS]),
    scale=st.sampled_from([0.01, 1.0, 8.0]),
    seed=st.integers(0, 10_000),
    average=st.sampled_from(AVERAGES),
    kl_weight=st.sampled_from([0.0, 0.3, 1.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
)
def test_value_and_gradient_equal_the_literal_definition(
    kernel: str,
    shape: tuple[int, int, int],
    kind: str,
    scale: float,
    seed: int,
    average: str,
    kl_weight: float,
    smoothing: float,
) -> None:
    torch.manual_seed(seed)
    dtype, rtol, atol = PRECISION[kernel]
    z, targets = make(kind, *shape, scale)
    z = z.to(dtype).requires_grad_()
    terms = fastaug.objective(
        z,
        targets,
        average=average,
        kl_weight=kl_weight,
        label_smoothing=smoothing,
        kernel=kernel,
    )
    terms.loss.backward()
    nll, kl, grad = literal_terms(z, targets, average, kl_weight, smoothing)
    torch.testing.assert_close(terms.nll.double(), nll, rtol=rtol, atol=10 * atol)
    torch.testing.assert_close(terms.kl.double(), kl, rtol=rtol, atol=atol)
    loss = (nll + kl_weight * kl).mean()
    torch.testing.assert_close(terms.loss.detach().double(), loss, rtol=rtol, atol=10 * atol)
    torch.testing.assert_close(z.grad.double(), grad / len(z), rtol=rtol, atol=atol)


@pytest.mark.parametrize("kernel", PRECISION)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("average", ["losses", "logits"])
def test_it_is_torchs_cross_entropy(kernel: str, smoothing: float, kind: str, average: str) -> None:
    torch.manual_seed(0)
    dtype, rtol, atol = PRECISION[kernel]
    z, targets = make(kind, 4, 3, 9)
    z = z.to(dtype)
    ours = z.clone().requires_grad_()
    terms = fastaug.objective(
        *(ours, targets),
        average=average,
        kl_weight=0.0,
        label_smoothing=smoothing,
        kernel=kernel,
    )
    terms.loss.backward()
    theirs = z.double().requires_grad_()
    flat = theirs.mean(1) if average == "logits" else theirs.flatten(0, 1)
    rows = targets if average == "logits" else targets.repeat_interleave(3, 0)
    loss = cross_entropy(flat, rows, label_smoothing=smoothing)
    loss.backward()
    torch.testing.assert_close(terms.loss.detach().double(), loss.detach(), rtol=rtol, atol=atol)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("views", [1, 3])
def test_gradcheck(average: str, views: int) -> None:
    torch.manual_seed(0)
    z, targets = make("any sum", 3, views, 4)

    def loss(z: Tensor) -> Tensor:
        settings: dict[str, Any] = {"average": average, "kl_weight": 0.7, "label_smoothing": 0.1}
        return fastaug.objective(z, targets, **settings).loss

    assert torch.autograd.gradcheck(loss, (z.requires_grad_(),))


@pytest.mark.parametrize("kernel", PRECISION)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("average", AVERAGES)
def test_one_hot_targets_are_class_indices(kernel: str, smoothing: float, average: str) -> None:
    torch.manual_seed(0)
    z, y = torch.randn(5, 4, 37, requires_grad=True), torch.randint(37, (5,))
    found = []
    for targets in (y, one_hot(y, 37).float()):
        terms = fastaug.objective(
            z, targets, average=average, label_smoothing=smoothing, kernel=kernel
        )
        found.append((*(part.detach() for part in terms), *torch.autograd.grad(terms.loss, z)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kernel", PRECISION)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_targets_of_any_floating_dtype(kernel: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits_dtype, rtol, atol = PRECISION[kernel]
    z, targets = make("teacher", 3, 4, 10)
    z, targets = z.to(logits_dtype), targets.to(dtype)
    terms = fastaug.objective(z, targets, kernel=kernel)
    assert terms.nll.dtype == logits_dtype
    nll, _, _ = literal_terms(z, targets, "losses", 0.0, 0.0)
    torch.testing.assert_close(terms.nll.double(), nll, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kernel", PRECISION)
@pytest.mark.parametrize(
    "strided",
    [
        lambda t: t.t().contiguous().t(),
        lambda t: torch.cat([t, t + 9], 1)[:, : t.shape[1]],
        lambda t: torch.stack([t, t + 9], 1)[:, 0],
        lambda t: t[:1].expand_as(t),
    ],
    ids=["transposed", "slice of rows", "every second row", "one row for all"],
)
def test_strides_of_targets(kernel: str, strided: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    z, targets = make("any sum", 4, 3, 10)
    given = strided(targets.float())
    assert not given.is_contiguous()
    z = z.float()
    found = fastaug.objective(z, given, kernel=kernel)
    expected = literal_terms(z, given, "losses", 1.0, 0.0)
    torch.testing.assert_close(found.nll.double(), expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", PRECISION)
@pytest.mark.parametrize("average", AVERAGES)
def test_no_gradient_flows_to_targets(kernel: str, average: str) -> None:
    torch.manual_seed(0)
    teacher = torch.randn(2, 5, requires_grad=True)
    z = torch.randn(2, 3, 5, requires_grad=True)
    terms = fastaug.objective(z, teacher.softmax(-1), average=average, kernel=kernel)
    assert not terms.nll.requires_grad
    terms.loss.backward()
    assert teacher.grad is None
    assert z.grad is not None
    # A student that takes no gradient has none to pass on either.
    terms = fastaug.objective(z.detach(), teacher.softmax(-1), average=average, kernel=kernel)
    assert not terms.loss.requires_grad


@pytest.mark.parametrize("kernel", PRECISION)
@pytest.mark.parametrize("average", AVERAGES)
class TestNotFinite:
    def run(self, z: Tensor, targets: Tensor, kernel: str, average: str, **more: Any) -> tuple:
        found = registry.load_kernel(kernel)
        chosen = {"kl_weight": 1.0, "label_smoothing": 0.0, "need_grad": True, **more}
        return found.value_and_grad(z, targets, average=average, **chosen)

    def test_a_class_at_minus_infinity_that_no_target_has(self, kernel: str, average: str) -> None:
        torch.manual_seed(0)
        z, targets = torch.randn(2, 3, 20), torch.rand(2, 20)
        z[:, :, [0, 17]], targets[:, [0, 17]] = -math.inf, 0
        there = [c for c in range(20) if c not in (0, 17)]
        nll, kl, grad = self.run(z, targets, kernel, average)
        expected = literal_terms(z[:, :, there], targets[:, there], average, 1.0, 0.0)
        torch.testing.assert_close(nll.double(), expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(kl.double(), expected[1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad[:, :, there].double(), expected[2], rtol=1e-4, atol=1e-6)
        assert grad[:, :, [0, 17]].abs().max() < 1e-30

    @pytest.mark.parametrize("target", [0.5, 1e-20, 1e-30])
    def test_one_that_a_target_has_is_infinite(
        self, kernel: str, average: str, target: float
    ) -> None:
        z, targets = torch.zeros(2, 3, 20), torch.full((2, 20), 0.05)
        z[0, :, 7], targets[:, 7] = -math.inf, target
        nll, kl, grad = self.run(z, targets, kernel, average)
        assert nll.isinf().tolist() == [True, False]
        assert nll[0] > 0
        assert kl.isfinite().all()
        assert grad.isfinite().all()

    def test_in_some_views_only(self, kernel: str, average: str) -> None:
        torch.manual_seed(0)
        z, targets = torch.randn(2, 3, 20), torch.rand(2, 20)
        z[0, 1, 7], targets[0, 7] = -math.inf, 0
        nll, kl, grad = self.run(z, targets, kernel, average, kl_weight=0.0)
        assert kl.isinf().tolist() == [True, False]
        far = literal_terms(z.masked_fill(z == -math.inf, -200), targets, average, 0.0, 0.0)
        if average == "logits":  # the class is absent from the mean of the logits, too
            z[0, :, 7] = -200
            far = literal_terms(z, targets, average, 0.0, 0.0)
        torch.testing.assert_close(nll.double(), far[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad.double(), far[2], rtol=1e-4, atol=1e-6)

    def test_nan_spoils_only_its_own_image(self, kernel: str, average: str) -> None:
        torch.manual_seed(0)
        z, targets = torch.randn(4, 3, 20), torch.rand(4, 20)
        targets[1, 3] = math.nan
        z[3, 1, 5], targets[3] = math.nan, 0  # 0 times NaN is NaN
        nll, kl, grad = self.run(z, targets, kernel, average)
        assert nll.isnan().tolist() == [False, True, False, True]
        assert kl.isnan().tolist() == [False, False, False, True]
        assert grad.isnan().flatten(1).any(1).tolist() == [False, True, False, True]
        good = [0, 2]
        expected = literal_terms(z[good], targets[good], average, 1.0, 0.0)
        torch.testing.assert_close(nll[good].double(), expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad[good].double(), expected[2], rtol=1e-4, atol=1e-6)

    def test_logits_far_apart(self, kernel: str, average: str) -> None:
        z = torch.tensor([[[200.0, 0.0, -200.0], [0.0, 200.0, -200.0]]])
        targets = torch.tensor([[0.25, 0.5, 0.125]])
        found = self.run(z, targets, kernel, average)
        expected = literal_terms(z, targets, average, 1.0, 0.0)
        for part, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(part.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", PRECISION)
def test_no_images(kernel: str) -> None:
    z = torch.empty(0, 3, 4, requires_grad=True)
    terms = fastaug.objective(z, torch.empty(0, 4), kernel=kernel)
    assert terms.loss.isnan()
    assert terms.nll.shape == terms.kl.shape == (0,)
    terms.loss.backward()
    assert z.grad.shape == z.shape


def test_unlabeled_images_have_only_the_regularizer() -> None:
    torch.manual_seed(0)
    z = torch.randn(3, 4, 10, requires_grad=True)
    terms = fastaug.objective(z, torch.zeros(3, 10))
    (grad,) = torch.autograd.grad(terms.loss, z)
    (kl_grad,) = torch.autograd.grad(fastaug.pairwise_kl(z).mean(), z)
    assert terms.nll.tolist() == [0.0] * 3
    torch.testing.assert_close(grad, kl_grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("order", ["images", "views"])
def test_as_a_module(order: str) -> None:
    torch.manual_seed(0)
    z, targets = make("any sum", 3, 4, 10)
    flat = z.flatten(0, 1) if order == "images" else z.transpose(0, 1).flatten(0, 1)
    loss = fastaug.MultiViewLoss(4, order=order, average="probs")(flat, targets)
    nll, kl, _ = literal_terms(z, targets, "probs", 1.0, 0.0)
    torch.testing.assert_close(loss, (nll + kl).mean(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.zeros(2, 3), "[2, 4] [2, 3] [2]"),
        (torch.zeros(4, 2), "[2, 4] [4, 2]"),
        (torch.zeros(2, 4, 1), "[2, 4, 1]"),
        (torch.zeros(2, 4).long(), "torch.int64 [2, 4] targets.float()"),
        (torch.zeros(2, 4).bool(), "torch.bool targets.float()"),
        (torch.zeros(2, 4, dtype=torch.complex64), "torch.complex64"),
        (torch.zeros(2, 4, device="meta"), "meta cpu targets.to(logits.device)"),
    ],
)
def test_wrong_targets(targets: Tensor, message: str) -> None:
    with raises(ConfigError, message):
        fastaug.objective(torch.zeros(2, 3, 4), targets)


class Indices(ReferenceKernel):
    """Takes no soft targets, and must not be asked to."""

    name = "indices"
    soft_targets = False

    def value_and_grad(self, logits: Tensor, targets: Tensor | None, **settings: Any):
        assert targets is None or targets.dtype == torch.int64
        return super().value_and_grad(logits, targets, **settings)


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))
    monkeypatch.setattr(registry, "_found", {})
    monkeypatch.setattr(admission, "_reports", {})


@pytest.mark.usefixtures("_fresh")
class TestChoice:
    z, y, soft = torch.zeros(2, 3, 4), torch.tensor([0, 1]), torch.full((2, 4), 0.25)

    def test_auto_passes_over_a_kernel_that_takes_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernel = Indices()
        monkeypatch.setattr(registry, "_OWN", (kernel, registry._REFERENCE))
        for _ in range(2):
            assert registry.find_kernel("auto", self.z, "losses") is kernel
            assert registry.find_kernel("auto", self.z, "losses", True) is registry._REFERENCE
        assert fastaug.objective(self.z, self.soft).nll.tolist() == pytest.approx([math.log(4)] * 2)

    def test_by_name_it_is_refused(self) -> None:
        assert fastaug.objective(self.z, self.y, kernel=Indices()).loss > 0
        with raises(KernelUnavailableError, "indices soft_targets"):
            fastaug.objective(self.z, self.soft, kernel=Indices())

    def test_it_is_compared_without_them(self) -> None:
        report = fastaug.check_kernel(Indices())
        assert report.admitted
        assert report.cases == 29

    def test_each_check_comes_with_the_first_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Watched(ReferenceKernel):
            name = "watched"

            def value_and_grad(self, logits: Tensor, targets: Tensor | None, **settings: Any):
                seen.add("soft" if targets is not None and targets.ndim == 2 else "int")
                return super().value_and_grad(logits, targets, **settings)

        seen: set[str] = set()
        kernel = Watched()
        fastaug.objective(self.z, self.y, kernel=kernel)
        assert seen == {"int"}
        fastaug.objective(self.z, self.soft, kernel=kernel)
        assert seen == {"int", "soft"}


class Mutant(ReferenceKernel):
    """Right for class indices, wrong for soft targets."""

    def __init__(self, name: str) -> None:
        self.name = name

    @torch.no_grad()
    def value_and_grad(self, logits: Tensor, targets: Tensor | None, **settings: Any):
        if targets is None or targets.ndim == 1:
            return super().value_and_grad(logits, targets, **settings)
        return MUTANTS[self.name](super().value_and_grad, logits, targets, settings)


def normalized(run: Callable, z: Tensor, t: Tensor, settings: dict) -> tuple:
    return run(z, t / t.sum(-1, keepdim=True).clamp_min(1e-9), **settings)


def largest(run: Callable, z: Tensor, t: Tensor, settings: dict) -> tuple:
    return run(z, t.argmax(-1), **settings)


def without_smoothing(run: Callable, z: Tensor, t: Tensor, settings: dict) -> tuple:
    return run(z, t, **{**settings, "label_smoothing": 0.0})


def smoothed_by_the_sum(run: Callable, z: Tensor, t: Tensor, settings: dict) -> tuple:
    s = settings["label_smoothing"]
    smoothed = t * (1 - s) + s * t.sum(-1, keepdim=True) / t.shape[1]
    return run(z, smoothed, **{**settings, "label_smoothing": 0.0})


def of_the_next_image(run: Callable, z: Tensor, t: Tensor, settings: dict) -> tuple:
    return run(z, t.roll(1, 0), **settings)


def without_strides(run: Callable, z: Tensor, t: Tensor, settings: dict) -> tuple:
    rows = t.as_strided(t.shape, (t.shape[1], 1)).nan_to_num(0.3)
    return run(z, rows, **settings)


def gradient_of_a_sum_of_one(run: Callable, z: Tensor, t: Tensor, settings: dict) -> tuple:
    """p - q, where sum(q) p - q is right."""
    nll, kl, grad = run(z, t, **settings)
    if grad is not None and settings["average"] == AFFECTED:
        s = settings["label_smoothing"]
        p = z.float().mean(1).softmax(-1) if AFFECTED == "logits" else z.float().softmax(-1)
        too_little = 1 - (t * (1 - s) + s / t.shape[1]).sum(-1)
        off = p * too_little.view(-1, *[1] * (p.ndim - 1)) / z.shape[1]
        grad = (grad.float() + (off if off.ndim == 3 else off[:, None])).to(grad.dtype)
    return nll, kl, grad


AFFECTED = "logits"


def infinite_products(run: Callable, z: Tensor, t: Tensor, settings: dict) -> tuple:
    """0 * -inf is NaN."""
    nll, kl, grad = run(z, t, **settings)
    return nll + (t * z.float().log_softmax(-1).amax(1)).sum(-1) * 0, kl, grad


def no_gradient_without_mass(run: Callable, z: Tensor, t: Tensor, settings: dict) -> tuple:
    """Skips images whose targets are all 0, and with them their regularizer."""
    nll, kl, grad = run(z, t, **settings)
    return nll, kl, None if grad is None else grad * t.any(-1)[:, None, None]


MUTANTS: dict[str, Callable] = {
    mutant.__name__: mutant
    for mutant in (
        *(normalized, largest, without_smoothing, smoothed_by_the_sum, of_the_next_image),
        *(without_strides, gradient_of_a_sum_of_one, infinite_products, no_gradient_without_mass),
    )
}


@pytest.mark.usefixtures("_fresh")
class TestAdmission:
    @pytest.mark.parametrize("name", MUTANTS)
    def test_one_that_is_wrong_only_for_soft_targets_is_refused_for_them(self, name: str) -> None:
        kernel, device = Mutant(name), torch.device("cpu")
        assert admission.check_admission(kernel, device).admitted
        assert not fastaug.check_kernel(kernel).admitted
        z, y = torch.zeros(2, 3, 4), torch.tensor([0, 1])
        assert fastaug.objective(z, y, kernel=kernel).loss > 0
        with raises(KernelUnavailableError, f"{name} targets"):
            fastaug.objective(z, one_hot(y, 4).float(), kernel=kernel)

    def test_the_mutant_of_each_average(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for average in ("losses", "logits"):
            monkeypatch.setattr("test_soft_targets.AFFECTED", average)
            kernel = Mutant("gradient_of_a_sum_of_one")
            assert not admission.check_admission(
                kernel, torch.device("cpu"), soft=True, again=True
            ).admitted

    def test_what_is_changed_by_no_mutant_is_admitted(self) -> None:
        MUTANTS["none"] = lambda run, z, t, settings: run(z, t, **settings)
        try:
            assert fastaug.check_kernel(Mutant("none")).admitted
        finally:
            del MUTANTS["none"]

    def test_reports_of_both_kinds_are_cached_apart(
        self, own_cache: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Filed(Mutant):
            def sources(self) -> list:
                return [__file__]

        device = torch.device("cpu")
        for _ in range(2):
            kernel = Filed("normalized")
            assert admission.check_admission(kernel, device).admitted
            assert not admission.check_admission(kernel, device, soft=True).admitted
        assert len(list((own_cache / "kernels").glob("admission-*.json"))) == 2
        assert admission.check_admission(kernel, device, soft=True).cached
