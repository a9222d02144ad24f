"""The native kernel, compiled for several instruction sets, against the literal definitions."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from covering import pairwise
from expect import raises
from literal import AVERAGES, literal_kl, literal_terms
from torch import Tensor

from fastaug.errors import ConfigError, KernelUnavailableError
from fastaug.kernels import native
from fastaug.kernels.registry import load_kernel
from fastaug.runtime.device import cpp_compiler
from fastaug.toolchain import build, cpp

pytestmark = pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler here")
SOURCE = build.source_folder() / "objective.cpp"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# of the gradient, relative to its largest value
GRAD_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
CHUNKS = "-DFASTAUG_TILE_BYTES=65536"  # of 16 views, 512 classes: others come in chunks
SETS = {
    "native": ("-march=native",),
    "chunks": ("-march=native", CHUNKS),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "baseline": (CHUNKS,),
}
if platform.machine() != "x86_64":
    del SETS["avx2"]


@pytest.fixture(scope="module", params=SETS)
def kernel(request: pytest.FixtureRequest) -> Iterator[native.NativeKernel]:
    """The kernel as it is compiled for this CPU, and for lesser ones."""
    flags = [flag for flag in cpp.FLAGS if flag != "-march=native"] + [*SETS[request.param]]
    compiler = [str(cpp_compiler()), *flags, str(SOURCE), "-o"]
    sources = sorted(SOURCE.parent.iterdir())

    def compile_it(file: Path) -> None:
        subprocess.run([*compiler, str(file)], check=True)

    file = build.built(f"test-objective-{build.digest(sources, *compiler)}.so", compile_it)
    function = native._open(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_library", lambda: (function, native._openmp()))
        yield native.NativeKernel()


def spread_logits(shape: tuple[int, int, int], spread: float, dtype: torch.dtype) -> Tensor:
    """Views of an image that differ by about `spread`, at any strides of images and views."""
    images, views, classes = shape
    room = torch.full((views + 1, images, classes + 5), torch.nan, dtype=dtype)
    values = 3 * torch.randn(1, images, classes) + spread * torch.randn(views, images, classes)
    room[:-1, :, 1:-4] = values
    return room[:-1, :, 1:-4].transpose(0, 1)


# a vector is 4 to 16 classes
SHAPES = [(3, 1, 1), (2, 2, 2), (3, 3, 16), (2, 5, 37), (2, 16, 100), (2, 8, 1000), (1, 16, 2500)]


@pytest.mark.parametrize(
    ("dtype", "average", "shape"), pairwise(DTYPES, (*AVERAGES, None), SHAPES), ids=str
)
def test_values_and_gradients_equal_the_literal_definition(
    kernel: native.NativeKernel,
    dtype: torch.dtype,
    average: str | None,
    shape: tuple[int, int, int],
) -> None:
    torch.manual_seed(0)
    y = torch.randint(shape[2], shape[:1])
    for spread, kl_weight, smoothing in ((3e-3, 0.7, 0.0), (1.0, 1.0, 0.1), (6.0, 0.0, 0.1)):
        z = spread_logits(shape, spread, dtype)
        settings = {"average": average, "kl_weight": kl_weight, "label_smoothing": smoothing}
        expected = literal_terms(z, y, average, kl_weight, smoothing)
        nll, kl, grad = kernel.value_and_grad(z, y, need_grad=True, **settings)
        torch.testing.assert_close(nll.double(), expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(kl.double(), expected[1], rtol=1e-5, atol=1e-12)
        off = (grad.double() - expected[2]).abs().amax()
        # p - q has the rounding of p; fp16 has no numbers below 6e-8
        floor = 1e-12 if average is None and dtype != torch.float16 else 6e-8
        assert off <= GRAD_TOLERANCE[dtype] * expected[2].abs().amax() + floor
        # the values alone, and the mean over images, are the same numbers
        alone = kernel.value_and_grad(z, y, need_grad=False, **settings)
        torch.testing.assert_close(alone, (nll, kl, None), rtol=1e-6, atol=1e-12)
        mean, *_, mean_grad = kernel.mean_and_grad(z, y, average, kl_weight, smoothing)
        torch.testing.assert_close(mean, (nll + kl_weight * kl).mean(), rtol=1e-6, atol=1e-7)
        if dtype == torch.float32:
            torch.testing.assert_close(mean_grad, grad / len(z), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("views", "classes"), [(2, 2), (2, 10), (8, 10), (16, 100), (8, 1000)])
def test_a_kl_of_1e_5_nats_keeps_five_digits(
    kernel: native.NativeKernel, views: int, classes: int
) -> None:
    torch.manual_seed(1)
    z = spread_logits((500, views, classes), 4e-3, torch.float32)
    kl = kernel.value_and_grad(
        z, None, average=None, kl_weight=1.0, label_smoothing=0.0, need_grad=False
    )[1]
    exact = literal_kl(z.double())
    shown = exact > 1e-6
    assert shown.sum() > 100
    assert exact[shown].median() < 2e-5
    torch.testing.assert_close(kl.double()[shown], exact[shown], rtol=1e-5, atol=0)


@pytest.mark.parametrize("average", AVERAGES)
def test_soft_targets(kernel: native.NativeKernel, average: str) -> None:
    torch.manual_seed(6)
    for dtype, shape, smoothing in zip(DTYPES * 3, SHAPES, (0.0, 0.1) * 4, strict=False):
        z = spread_logits(shape, 1.0, dtype)
        # Of any sum, with zeros; beyond the row, a number that must not count.
        room = torch.rand(shape[0], shape[2] + 3)
        targets = (room * (room > 0.3))[:, :-3]
        expected = literal_terms(z, targets, average, 0.7, smoothing)
        settings = {"average": average, "kl_weight": 0.7, "label_smoothing": smoothing}
        nll, kl, grad = kernel.value_and_grad(z, targets, need_grad=True, **settings)
        torch.testing.assert_close(nll.double(), expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(kl.double(), expected[1], rtol=1e-5, atol=1e-12)
        off = (grad.double() - expected[2]).abs().amax()
        assert off <= GRAD_TOLERANCE[dtype] * expected[2].abs().amax() + 6e-8
        alone = kernel.value_and_grad(z, targets, need_grad=False, **settings)
        torch.testing.assert_close(alone, (nll, kl, None), rtol=1e-6, atol=1e-12)
        mean, *_, mean_grad = kernel.mean_and_grad(z, targets, average, 0.7, smoothing)
        torch.testing.assert_close(mean, (nll + 0.7 * kl).mean(), rtol=1e-6, atol=1e-7)
        if dtype == torch.float32:
            torch.testing.assert_close(mean_grad, grad / len(z), rtol=1e-6, atol=1e-12)


def test_21841_classes_in_16_views(kernel: native.NativeKernel) -> None:
    torch.manual_seed(2)
    z, y = spread_logits((1, 16, 21841), 1.0, torch.float32), torch.tensor([21840])
    for average in AVERAGES:
        found = kernel.value_and_grad(
            z, y, average=average, kl_weight=1.0, label_smoothing=0.1, need_grad=True
        )
        for is_, should in zip(found, literal_terms(z, y, average, 1.0, 0.1), strict=True):
            torch.testing.assert_close(
                is_.double(), should, rtol=1e-5, atol=1e-5 * should.abs().max().item()
            )


@pytest.mark.parametrize("average", AVERAGES)
def test_a_common_offset_changes_nothing(kernel: native.NativeKernel, average: str) -> None:
    torch.manual_seed(3)
    z = (3 * torch.randn(2, 1, 50) + torch.randn(2, 4, 50) + 1e4).requires_grad_(False)
    y = torch.tensor([3, 49])
    found = kernel.value_and_grad(
        z, y, average=average, kl_weight=1.0, label_smoothing=0.1, need_grad=True
    )
    for is_, should in zip(found, literal_terms(z, y, average, 1.0, 0.1), strict=True):
        torch.testing.assert_close(is_.double(), should, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("average", [*AVERAGES, None])
def test_a_class_that_no_view_has_takes_no_part(
    kernel: native.NativeKernel, average: str | None
) -> None:
    torch.manual_seed(4)
    z, y = torch.randn(2, 4, 33), torch.tensor([3, 5])
    z[:, :, [0, 17, 32]] = -torch.inf
    there = [c for c in range(33) if c not in (0, 17, 32)]
    settings = {"average": average, "kl_weight": 1.0, "label_smoothing": 0.0, "need_grad": True}
    nll, kl, grad = kernel.value_and_grad(z, y, **settings)
    rest = torch.tensor([there.index(c) for c in y.tolist()])
    expected = literal_terms(z[:, :, there], rest, average, 1.0, 0.0)
    torch.testing.assert_close(nll.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kl.double(), expected[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(grad[:, :, there].double(), expected[2], rtol=1e-4, atol=1e-6)
    assert grad[:, :, [0, 17, 32]].abs().max() < 1e-30


@pytest.mark.parametrize("average", AVERAGES)
def test_what_is_infinite_or_no_number_stays_so(kernel: native.NativeKernel, average: str) -> None:
    z, y = torch.zeros(5, 2, 20), torch.zeros(5, dtype=torch.int64)
    z[0, 0, 7] = -torch.inf  # in one view only: its KL is infinite
    z[1, 1, 3] = torch.nan
    z[2, 0] = -torch.inf
    z[3, :, 0] = -torch.inf  # the target
    nll, kl, _ = kernel.value_and_grad(
        z, y, average=average, kl_weight=1.0, label_smoothing=0.0, need_grad=True
    )
    assert kl[0] == torch.inf
    assert nll[0].isfinite()
    assert nll[1].isnan()
    assert nll[2].isnan()
    assert nll[3] == torch.inf
    torch.testing.assert_close(nll[4], torch.tensor(20.0).log())


@pytest.fixture
def own() -> native.NativeKernel:
    return load_kernel("native")  # type: ignore[return-value]


class TestCalls:
    def settings(self, **changes: object) -> dict:
        common = {"average": "losses", "kl_weight": 1.0, "label_smoothing": 0.1, "need_grad": True}
        return common | changes

    @pytest.mark.parametrize("openmp", [True, False])
    def test_threads_do_not_change_a_bit(
        self, own: native.NativeKernel, openmp: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not openmp:
            function, _ = native._library()
            monkeypatch.setattr(native, "_library", lambda: (function, 0))
        torch.manual_seed(0)
        z, y = torch.randn(40, 8, 500), torch.randint(500, (40,))
        alone = own.value_and_grad(z, y, **self.settings())
        torch.set_num_threads(4)
        try:
            together = own.value_and_grad(z, y, **self.settings())
        finally:
            torch.set_num_threads(1)
        torch.testing.assert_close(together, alone, rtol=0, atol=0)

    def test_torch_lends_its_threads_on_linux(self) -> None:
        if platform.system() == "Linux":
            assert native._openmp()

    def test_classes_that_do_not_lie_side_by_side(self, own: native.NativeKernel) -> None:
        torch.manual_seed(0)
        z, y = torch.randn(3, 20, 4).transpose(1, 2), torch.tensor([1, 19, 7, 0])[::2][:2]
        torch.testing.assert_close(
            own.value_and_grad(z[:2], y, **self.settings()),
            own.value_and_grad(z[:2].contiguous(), y.clone(), **self.settings()),
            rtol=0,
            atol=0,
        )

    def test_other_defaults_of_torch_change_nothing(self, own: native.NativeKernel) -> None:
        z, y = torch.randn(3, 2, 7), torch.tensor([0, 6, 3])
        expected = own.value_and_grad(z, y, **self.settings())
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                found = own.value_and_grad(z, y, **self.settings())
                mean, *_ = own.mean_and_grad(z, y, "losses", 1.0, 0.1)
        finally:
            torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert (mean.dtype, mean.device.type) == (torch.float32, "cpu")

    def test_no_images(self, own: native.NativeKernel) -> None:
        z, y = torch.empty(0, 4, 7), torch.empty(0, dtype=torch.int64)
        nll, kl, grad = own.value_and_grad(z, y, **self.settings())
        assert nll.shape == kl.shape == (0,)
        assert grad is not None
        assert grad.shape == (0, 4, 7)

    @pytest.mark.parametrize("target", [-1, 7, 2**40])
    def test_a_target_that_is_no_class(self, own: native.NativeKernel, target: int) -> None:
        y = torch.tensor([0, 6, target])
        with raises(ConfigError, f"0 6 {target} image 2"):
            own.value_and_grad(torch.zeros(3, 2, 7), y, **self.settings())

    def test_what_it_does_not_take(self, own: native.NativeKernel) -> None:
        assert "use reference" in str(own.supports(torch.zeros(1, 2, 3, dtype=torch.float64)))
        assert "only on the CPU" in str(own.supports(torch.zeros(1, 2, 3, device="meta")))
        assert own.supports(torch.zeros(1, 2, 3)) is None


class TestBuild:
    @pytest.fixture
    def load(self, own_cache: Path) -> Callable[[], Path]:
        return native._find

    def test_it_is_compiled_once(
        self, load: Callable[[], object], caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "fastaug"):
            load()
            load()
        assert [line for line in caplog.messages if "compiling" in line] == [
            f"compiling the native loss kernel with {Path(cpp_compiler() or '').name} (only once)"
        ]

    def test_without_a_compiler(
        self, load: Callable[[], object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
        with raises(KernelUnavailableError, "g++ clang++"):
            load()

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            ("exit 1", ""),
            ('[ "$1" = --version ] || { echo "x.h:3: error: no such type" >&2; exit 1; }', "type"),
        ],
    )
    def test_a_compiler_that_fails(
        self,
        load: Callable[[], object],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        script: str,
        reason: str,
    ) -> None:
        compiler = tmp_path / "bad-g++"
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        with raises(KernelUnavailableError, reason):
            load()

    def test_another_source_is_another_library(self, tmp_path: Path) -> None:
        file = tmp_path / "a.h"
        names = set()
        for content in ("1", "2"):
            file.write_text(content)
            names |= {build.digest([file], "-O3"), build.digest([file], "-O2")}
        assert len(names) == 4

    def test_a_cache_that_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("FASTAUG_CACHE", str(tmp_path / "file"))
        made = build.built("some-name", lambda path: path.write_text("made") and None)
        assert made.read_text() == "made"
        assert not made.is_relative_to(tmp_path)

    def test_a_build_that_fails_leaves_nothing(self, own_cache: Path) -> None:
        def fail(path: Path) -> None:
            path.write_text("half")
            raise KernelUnavailableError("no")

        with pytest.raises(KernelUnavailableError):
            build.built("some-name", fail)
        assert os.listdir(own_cache / "kernels") == []
