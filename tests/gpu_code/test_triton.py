"""The Triton kernel under Triton's interpreter against the literal definitions, in float64."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from covering import pairwise
from expect import missing
from literal import AVERAGES, literal_terms
from torch import Tensor

from fastaug.kernels.triton import Tile, TritonKernel

Run = Callable[..., tuple[Tensor, Tensor, Tensor | None]]

# Of the gradient, relative to its largest entry. The interpreter cuts off digits for bf16, where a
# GPU rounds: hence the whole of eps there.
GRADIENT = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-7}
DTYPES = tuple(GRADIENT)
TILE = TritonKernel().tile

# images, views, classes, tile
FITS = [(2, 3, 10, TILE), (1, 1, 1, TILE), (1, 1, 5, TILE), (1, 5, 1, TILE), (2, 2, 2, TILE)]
FITS += [(1, 3, 1000, TILE), (1, 8, 33, TILE)]
STREAMED = [(1, 3, 10, 32), (1, 1, 5, 4), (1, 4, 150, 512), (1, 5, 3, 8)]


def prepare() -> None:
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # -inf - -inf and the like, in lanes that a mask leaves out


def interpret(logits: Tensor, targets: Tensor | None, tile: int, settings: dict) -> tuple:
    kernel = TritonKernel(tile)
    assert kernel.supports(logits) is None
    return kernel.value_and_grad(logits, targets, **settings)


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """The kernel in a process of its own: an import of triton is for compiling or interpreting."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TRITON_INTERPRET", "1")
            process.submit(prepare).result()

        def run(
            logits: Tensor,
            targets: Tensor | None,
            average: str | None,
            kl_weight: float = 0.7,
            label_smoothing: float = 0.1,
            *,
            need_grad: bool = True,
            tile: int = TILE,
        ) -> tuple[Tensor, Tensor, Tensor | None]:
            settings = {
                "average": average,
                "kl_weight": kl_weight,
                "label_smoothing": label_smoothing,
                "need_grad": need_grad,
            }
            future = process.submit(interpret, logits, targets, tile, settings)
            nll, kl, grad = future.result()
            assert nll.dtype == kl.dtype == torch.float32
            assert grad is None or (grad.dtype == logits.dtype and grad.is_contiguous())
            return nll, kl, grad

        yield run


def case(images: int, views: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(images + 10 * views + 100 * classes)
    base = 2 * torch.randn(images, 1, classes)
    logits = (base + torch.randn(images, views, classes)).to(dtype)
    return logits, torch.randint(classes, (images,))


def assert_right(
    found: tuple[Tensor, Tensor, Tensor | None],
    expected: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype = torch.float32,
) -> None:
    nll, kl, grad = found
    torch.testing.assert_close(nll.double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(kl.double(), expected[1], rtol=2e-6, atol=1e-12)
    assert grad is not None
    largest = expected[2].abs().max().item()
    torch.testing.assert_close(
        grad.double(), expected[2], rtol=0, atol=GRADIENT[dtype] * largest + 1e-30
    )


@pytest.mark.parametrize(
    ("dtype", "average", "shape"), pairwise(DTYPES, (*AVERAGES, None), FITS + STREAMED), ids=str
)
def test_value_and_gradient_equal_the_literal_definition(
    run: Run, dtype: torch.dtype, average: str | None, shape: tuple[int, int, int, int]
) -> None:
    images, views, classes, tile = shape
    logits, targets = case(images, views, classes, dtype)
    y = None if average is None else targets
    settings = [(0.7, 0.1), (0.0, 0.0), (0.7, 0.0), (0.0, 0.1)]
    # A streamed tile is slow to interpret, and computes nothing else.
    for kl_weight, smoothing in settings if tile == TILE else settings[:2]:
        found = run(logits, y, average, kl_weight, smoothing, tile=tile)
        expected = literal_terms(logits, y, average, kl_weight, smoothing)
        assert_right(found, expected, dtype)


def soft_case(images: int, views: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Targets of any sum, with zeros; beyond their rows, numbers that must not count."""
    logits, _ = case(images, views, classes, dtype)
    room = torch.rand(images, classes + 3)
    return logits, (room * (room > 0.3))[:, :-3]


@pytest.mark.parametrize(
    ("dtype", "average", "shape"), pairwise(DTYPES, AVERAGES, FITS + STREAMED), ids=str
)
def test_soft_targets(
    run: Run, dtype: torch.dtype, average: str, shape: tuple[int, int, int, int]
) -> None:
    images, views, classes, tile = shape
    logits, targets = soft_case(images, views, classes, dtype)
    for kl_weight, smoothing in ((0.7, 0.1), (0.0, 0.0)):
        found = run(logits, targets, average, kl_weight, smoothing, tile=tile)
        assert_right(found, literal_terms(logits, targets, average, kl_weight, smoothing), dtype)
    nll, kl, none = run(logits, targets, average, 0.0, 0.0, tile=tile, need_grad=False)
    assert none is None
    assert torch.equal(nll, found[0])
    assert torch.equal(kl, found[1])


@pytest.mark.parametrize("tile", [TILE, 16])
@pytest.mark.parametrize("average", AVERAGES)
def test_soft_targets_and_what_is_not_finite(run: Run, average: str, tile: int) -> None:
    logits, targets = soft_case(5, 3, 6, torch.float32)
    logits[0, :, 2], targets[0, 2] = -math.inf, 0.0
    logits[1, :, 2], targets[1, 2] = -math.inf, 1e-30
    targets[2, 4] = math.nan
    logits[3, 1, 4], targets[3] = math.nan, 0.0
    targets[4] = 0.0
    nll, kl, grad = run(logits, targets, average, label_smoothing=0.0, tile=tile)
    assert grad is not None
    assert nll.isnan().tolist() == [False, False, True, True, False]
    assert nll.isinf().tolist() == [False, True, False, False, False]
    assert nll[4] == 0
    assert kl.isfinite().tolist() == [True, True, True, False, True]
    assert grad.flatten(1).isfinite().all(1).tolist() == [True, True, False, False, True]
    there = [0, 1, 3, 4, 5]
    expected = literal_terms(logits[:1, :, there], targets[:1, there], average, 0.7, 0.0)
    assert_right((nll[:1], kl[:1], grad[:1, :, there]), expected)
    assert (grad[0, :, 2] == 0).all()


def test_the_shapes_are_held_and_streamed_as_they_are_meant_to_be() -> None:
    for _, views, classes, tile in FITS:
        assert Tile.of(views, classes, tile).classes >= classes
    for _, views, classes, tile in STREAMED:
        assert Tile.of(views, classes, tile).classes < classes
    assert Tile.of(16, 1000, TILE) == (16, 1024, 16)
    assert Tile.of(16, 21841, TILE) == (16, 256, 8)


@pytest.mark.parametrize("average", ["logits", "probs"])
def test_all_of_imagenet_is_streamed(run: Run, average: str) -> None:
    logits, targets = case(1, 16, 21841, torch.float32)
    expected = literal_terms(logits, targets, average, 0.7, 0.1)
    assert_right(run(logits, targets, average), expected)


@pytest.mark.parametrize("tile", [TILE, 128])
def test_strides(run: Run, tile: int) -> None:
    logits, y = case(2, 4, 36, torch.float32)
    room = torch.full((3, 7, 41), math.nan)
    room[:2, ::2, :36] = logits
    two = torch.stack([y, y + 99], 1)
    for z, targets in [
        (room[:2, ::2, :36], two[:, 0]),
        (logits.transpose(0, 1).contiguous().transpose(0, 1), y),
        (logits.transpose(1, 2).contiguous().transpose(1, 2), y),
        (logits[:1].expand(2, 4, 36), y),
        (logits[:, :1].expand(2, 4, 36), y),
    ]:
        assert not z.is_contiguous()
        expected = literal_terms(z, targets, "probs", 0.7, 0.1)
        assert_right(run(z, targets, "probs", tile=tile), expected)


@pytest.mark.parametrize("tile", [TILE, 32])
@pytest.mark.parametrize("average", [*AVERAGES, None])
def test_values_without_a_gradient(run: Run, average: str | None, tile: int) -> None:
    logits, targets = case(3, 4, 11, torch.bfloat16)
    y = None if average is None else targets
    nll, kl, none = run(logits, y, average, need_grad=False, tile=tile)
    assert none is None
    nll_with, kl_with, _ = run(logits, y, average, tile=tile)
    assert torch.equal(nll, nll_with)
    assert torch.equal(kl, kl_with)


def test_no_images(run: Run) -> None:
    nll, kl, grad = run(torch.empty(0, 3, 4), torch.empty(0).long(), "losses")
    assert grad is not None
    assert (nll.shape, kl.shape, grad.shape) == ((0,), (0,), (0, 3, 4))


@pytest.mark.parametrize(
    ("offset", "shape", "spread"),
    pairwise(
        (0.0, 1e4),
        ((2, 2, TILE), (3, 10, 64), (8, 1000, TILE), (8, 100, 512)),
        (2e-2, 0.1, 3.0),
    ),
    ids=str,
)
def test_it_holds_its_digits_where_views_nearly_agree(
    run: Run, offset: float, shape: tuple[int, int, int], spread: float
) -> None:
    views, classes, tile = shape
    torch.manual_seed(1)
    base = torch.randn(2, 1, classes, dtype=torch.float64)
    noise = torch.randn(2, views, classes, dtype=torch.float64)
    logits = (base + spread * noise + offset).float()
    _, kl, grad = run(logits, None, None, tile=tile)
    _, kl_exact, grad_exact = literal_terms(logits, None, None, 0.7, 0.0)
    assert kl_exact.min() > min(0.01, spread**2 / 100)
    torch.testing.assert_close(kl.double(), kl_exact, rtol=2e-6, atol=0)
    assert grad is not None
    assert (grad - grad_exact).norm() < 2e-6 * grad_exact.norm()


def test_the_series_and_what_comes_beyond_it_meet(run: Run) -> None:
    """Where all log-probabilities are d away from their mean, around d = 0.5."""
    d = torch.tensor([0.2, 0.4, 0.499, 0.501, 0.6])[:, None]
    logits = torch.stack([torch.cat([d, -d], 1), torch.cat([-d, d], 1)], 1)
    kl = run(logits, None, None)[1]
    torch.testing.assert_close(
        kl.double(), literal_terms(logits, None, None, 0.0, 0.0)[1], rtol=3e-7, atol=0
    )


@pytest.mark.parametrize("tile", [TILE, 16])
@pytest.mark.parametrize("average", AVERAGES)
class TestInfinity:
    def test_a_class_at_minus_infinity_in_all_views_takes_no_part(
        self, run: Run, average: str, tile: int
    ) -> None:
        logits, y = case(2, 3, 6, torch.float32)
        gone = torch.full((2, 3, 2), -math.inf)
        masked = torch.cat([gone, logits, gone], -1)  # where it is streamed, whole tiles of it
        nll, kl, grad = run(masked, y + 2, average, label_smoothing=0.0, tile=tile)
        assert grad is not None
        assert (grad[..., :2] == 0).all()
        assert (grad[..., -2:] == 0).all()
        expected = literal_terms(logits, y, average, 0.7, 0.0)
        assert_right((nll, kl, grad[..., 2:-2]), expected)

    def test_in_some_views_only_the_kl_is_infinite(self, run: Run, average: str, tile: int) -> None:
        logits, y = case(2, 3, 6, torch.float32)
        logits[0, 1, (y[0] + 1) % 6] = -math.inf
        nll, kl, grad = run(logits, y, average, kl_weight=0.0, label_smoothing=0.0, tile=tile)
        assert kl[0] == math.inf
        assert kl[1].isfinite()
        far = logits.clone().masked_fill(logits == -math.inf, -60.0)
        expected = literal_terms(far, y, average, 0.0, 0.0)
        assert grad is not None
        torch.testing.assert_close(nll.double(), expected[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grad.double(), expected[2], rtol=0, atol=1e-6)

    def test_logits_far_apart_stay_finite(self, run: Run, average: str, tile: int) -> None:
        far = torch.tensor([[[200.0, 0.0, -200.0], [0.0, 200.0, -200.0]]]).repeat(1, 1, 2)
        y = torch.tensor([0])
        expected = literal_terms(far, y, average, 0.7, 0.1)
        for part, exact in zip(run(far, y, average, tile=tile), expected, strict=True):
            assert part is not None
            torch.testing.assert_close(part.double(), exact, rtol=1e-6, atol=1e-5)
        for part in run(far * 1e28, y, average, tile=tile):
            assert part is not None
            assert part.isfinite().all()

    def test_a_target_that_is_no_class_gives_nan(self, run: Run, average: str, tile: int) -> None:
        logits, _ = case(4, 3, 6, torch.float32)
        nll, kl, grad = run(logits, torch.tensor([-1, 5, 6, 2**32]), average, tile=tile)
        assert nll.isnan().tolist() == [True, False, True, True]
        assert kl.isfinite().all()
        assert grad is not None
        assert torch.equal(grad.isnan().all(-1).all(-1), nll.isnan())
        assert grad[1].isfinite().all()

    def test_nan_logits_give_nan(self, run: Run, average: str, tile: int) -> None:
        logits, y = case(2, 3, 6, torch.float32)
        logits[0, 1, 2] = math.nan
        nll, kl, grad = run(logits, y, average, tile=tile)
        assert grad is not None
        for part in (nll, kl, grad.flatten(1).sum(1)):
            assert part.isnan().tolist() == [True, False]


class TestSupports:
    @pytest.mark.parametrize(
        ("logits", "reason"),
        [
            (torch.zeros(1, 2, 3), "CUDA native"),
            (torch.zeros(1, 2, 3).double(), "reference"),
            (torch.zeros(1, 2, 3).long(), "fp32 fp16 bf16 torch.int64"),
            (torch.zeros(1, TILE + 1, 1), "16384 16385 reference"),
        ],
    )
    def test_it_says_why_not(self, logits: Tensor, reason: str) -> None:
        assert missing(TritonKernel().supports(logits) or "", reason) == []

    def test_without_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert TritonKernel().supports(torch.zeros(1, 2, 3)) is None
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert "pip install triton" in (TritonKernel().supports(torch.zeros(1, 2, 3)) or "")

    def test_its_sources_are_all_that_decides_its_results(self) -> None:
        assert [file.name for file in TritonKernel().sources()] == [
            "triton.py",
            "triton_program.py",
        ]
        assert all(isinstance(file, Path) and file.is_file() for file in TritonKernel().sources())
