"""The Triton kernel as it is compiled for GPUs, ahead of time, and run on the PTX emulator."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import pairwise
from emulator import emulator
from literal import AVERAGES, literal_terms
from torch import Tensor

from fastaug.kernels.triton import TritonKernel

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from fastaug.kernels import triton_program  # noqa: E402

ARCHITECTURES = (80, 90, 100, 120)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILE = TritonKernel().tile
# rounding to the nearest, of the largest entry
GRADIENT = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


class Device:
    """A GPU that is not there, as far as Triton asks before it compiles."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_device(self) -> int:
        return self.architecture  # Triton keeps the kernels of each device apart

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


class Launcher:
    """Stands in for the program: compiles it just as a launch does, and may run it on the emulator.

    TritonKernel is called as it is, so that what is tested is what it launches: the specialization,
    the grid, the number of warps, the arguments.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, architecture: int) -> None:
        self.program = triton_program.objective_program
        self.compiled: Any = None
        self.statistics: Any = None
        self.emulate: dict | None = None
        monkeypatch.setattr(driver, "_active", Device(architecture))
        monkeypatch.setattr(triton_program, "objective_program", self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **settings: Any) -> None:
            self.compiled = self.program.warmup(*args, grid=grid, **settings)
            if self.emulate is not None:
                self.run(grid, args)

        return launch

    def run(self, grid: tuple[int, ...], args: tuple) -> None:
        kernel = self.compiled
        types = list(kernel.src.signature.values())[: len(args)]
        args = tuple(
            pointer(arg) for arg, kind in zip(args, types, strict=True) if kind != "constexpr"
        )
        self.statistics = (
            emulator()
            .Module(kernel.asm["ptx"])
            .launch(
                kernel.metadata.name,
                grid=grid,
                block=(32 * kernel.metadata.num_warps,),
                args=args,
                shared_bytes=kernel.metadata.shared,
                schedule="warp",
                **(self.emulate or {}),
            )
        )


def pointer(arg: Any) -> Any:
    """A tensor as a pointer into its storage; numbers as they are."""
    if not isinstance(arg, Tensor):
        return arg
    storage = torch.empty(0, dtype=torch.uint8).set_(arg.untyped_storage())
    return emulator().Ptr(storage, arg.storage_offset() * arg.element_size())


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], Launcher]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return lambda architecture: Launcher(monkeypatch, architecture)


def case(images: int, views: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(images + 10 * views + 100 * classes)
    base = 2 * torch.randn(images, 1, classes)
    logits = (base + torch.randn(images, views, classes)).to(dtype)
    return logits, torch.randint(classes, (images,))


def call(
    logits: Tensor,
    targets: Tensor | None,
    average: str | None,
    kl_weight: float = 0.7,
    label_smoothing: float = 0.1,
    *,
    need_grad: bool = True,
    tile: int = TILE,
) -> tuple[Tensor, Tensor, Tensor | None]:
    return TritonKernel(tile).value_and_grad(
        logits,
        targets if average else None,
        average=average,
        kl_weight=kl_weight,
        label_smoothing=label_smoothing,
        need_grad=need_grad,
    )


@pytest.mark.parametrize(
    ("architecture", "dtype", "average"),
    pairwise(ARCHITECTURES, DTYPES, (*AVERAGES, None)),
    ids=str,
)
def test_it_compiles(
    launcher: Callable[[int], Launcher], architecture: int, dtype: torch.dtype, average: str | None
) -> None:
    gpu = launcher(architecture)
    call(*case(1, 4, 250, dtype), average)
    assert gpu.compiled.metadata.target.arch == architecture
    assert gpu.compiled.asm["cubin"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("views", "classes", "average", "spilled"),
    [(8, 1000, "probs", 0), (16, 1000, "losses", 64), (16, 21841, "probs", 0)],
)
def test_a_tile_fits_the_registers(
    launcher: Callable[[int], Launcher],
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    architecture: int,
    views: int,
    classes: int,
    average: str,
    spilled: int,
) -> None:
    """Bytes of its registers that a thread has to keep in memory; it has 128 to 255 of 4 bytes."""
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    launcher(architecture)
    call(*case(1, views, classes, torch.float32), average)
    (stores,) = re.findall(r"(\d+) bytes spill stores", capsys.readouterr().out)
    assert int(stores) <= spilled


def test_other_batches_weights_and_strides_are_not_compiled_again(
    launcher: Callable[[int], Launcher],
) -> None:
    gpu = launcher(80)
    logits, y = case(16, 3, 20, torch.float32)
    kernels = set()
    for z, weight, smoothing in [
        (logits, 0.7, 0.1),
        (logits[:1], 1, 0),
        (logits[:3], 1e-9, 0.0),
        (logits[::2], 16.0, 0.2),
        (torch.zeros(16, 3, 36)[..., :20], 1.0, 0.3),
        (torch.zeros(5, 3, 32)[..., :20], 1.0, 0.3),  # Triton likes to know multiples of 16
    ]:
        call(z, y[: len(z)], "probs", weight, smoothing)
        kernels.add(gpu.compiled.hash)
    assert len(kernels) == 1


@pytest.mark.parametrize("tile", [TILE, 64])
def test_offsets_are_of_64_bits(launcher: Callable[[int], Launcher], tile: int) -> None:
    gpu = launcher(80)
    call(*case(1, 3, 20, torch.float32), "losses", tile=tile)
    products = re.findall(r"arith\.muli .* : (\S+)", gpu.compiled.asm["ttir"])
    assert len(products) >= 4
    assert all("i64" in kind for kind in products)


def run_checked(gpu: Launcher, *args: Any, approximate: bool = True, **settings: Any) -> tuple:
    """On the emulator, warps in random order; approximate: exp and the like err as they may."""
    gpu.emulate = {"approx_ulp": int(approximate)}
    if approximate:
        # A number that several threads hold errs in each its own way. Where all of them write it
        # to one place, as Triton lets them, this is taken for a race.
        gpu.emulate["race"] = None
    found = call(*args, **settings)
    assert not gpu.statistics["races"]
    assert not gpu.statistics["global_races"]
    assert not gpu.statistics["warnings"]
    return found


def assert_right(found: tuple, expected: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> None:
    nll, kl, grad = found
    torch.testing.assert_close(nll.double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(kl.double(), expected[1], rtol=2e-6, atol=1e-12)
    largest = expected[2].abs().max().item()
    torch.testing.assert_close(
        grad.double(), expected[2], rtol=0, atol=GRADIENT[dtype] * largest + 2e-7
    )


F32, F16, BF16 = DTYPES


@pytest.mark.parametrize(
    ("shape", "tile", "warps", "dtype", "average", "settings", "architecture"),
    [
        ((2, 3, 10), TILE, 1, F32, "losses", (0.7, 0.1), 80),
        ((3, 2, 2), TILE, 1, F32, "probs", (0.7, 0.0), 90),
        ((1, 1, 1), TILE, 1, BF16, "logits", (0.7, 0.1), 100),
        ((2, 5, 1), TILE, 1, F16, "probs", (0.7, 0.1), 120),
        ((2, 1, 7), TILE, 1, F16, "losses", (0.7, 0.1), 80),
        ((2, 8, 100), TILE, 2, BF16, None, (0.7, 0.0), 120),
        ((2, 16, 100), TILE, 4, F32, "logits", (0.3, 0.0), 80),  # a race if fp is fused
        ((2, 6, 250), TILE, 4, F32, "logits", (0.0, 0.1), 80),
        ((1, 3, 1001), TILE, 8, F16, "logits", (0.7, 0.1), 90),
        ((1, 8, 1000), TILE, 16, BF16, "probs", (0.7, 0.1), 80),
        ((1, 16, 1000), TILE, 16, F32, "losses", (0.7, 0.0), 100),
        ((1, 64, 40), TILE, 8, F32, "probs", (0.7, 0.1), 80),  # views lie in several warps
        ((2, 3, 30), 64, 1, F32, "logits", (0.7, 0.1), 80),  # from here on streamed
        ((1, 5, 300), 1024, 1, BF16, "probs", (0.7, 0.1), 90),
        ((1, 20, 50), 1024, 1, F16, None, (0.7, 0.0), 120),
        ((1, 16, 300), 4096, 2, F32, "losses", (0.0, 0.1), 80),
        ((1, 9, 1030), TILE, 8, F32, "probs", (0.7, 0.1), 100),
        ((1, 3, 4099), TILE, 8, BF16, "logits", (0.7, 0.0), 80),
    ],
    ids=str,
)
def test_compiled_code_is_right(
    launcher: Callable[[int], Launcher],
    shape: tuple[int, int, int],
    tile: int,
    warps: int,
    dtype: torch.dtype,
    average: str | None,
    settings: tuple[float, float],
    architecture: int,
) -> None:
    gpu = launcher(architecture)
    logits, targets = case(*shape, dtype)
    expected = literal_terms(logits, targets, average, *settings)
    for approximate in (False, True):
        found = run_checked(
            gpu, logits, targets, average, *settings, tile=tile, approximate=approximate
        )
        assert_right(found, expected, dtype)
    assert gpu.compiled.metadata.num_warps == warps


@pytest.mark.parametrize(
    ("shape", "tile", "dtype", "average", "settings", "architecture"),
    [
        ((2, 3, 10), TILE, F32, "losses", (0.7, 0.1), 80),
        ((1, 1, 1), TILE, BF16, "logits", (0.7, 0.1), 100),
        ((2, 16, 100), TILE, F32, "logits", (0.3, 0.0), 80),
        ((2, 6, 250), TILE, F16, "probs", (0.7, 0.1), 90),
        ((1, 8, 1000), TILE, BF16, "losses", (0.7, 0.0), 120),
        ((2, 3, 30), 64, F32, "logits", (0.7, 0.1), 80),  # from here on streamed
        ((1, 5, 300), 1024, BF16, "probs", (0.7, 0.1), 90),
        ((1, 16, 300), 4096, F32, "losses", (0.0, 0.1), 120),
    ],
    ids=str,
)
def test_compiled_code_with_soft_targets(
    launcher: Callable[[int], Launcher],
    shape: tuple[int, int, int],
    tile: int,
    dtype: torch.dtype,
    average: str,
    settings: tuple[float, float],
    architecture: int,
) -> None:
    gpu = launcher(architecture)
    logits, _ = case(*shape, dtype)
    room = torch.rand(shape[0], shape[2] + 3)
    targets = (room * (room > 0.3))[:, :-3]  # of any sum, with zeros
    expected = literal_terms(logits, targets, average, *settings)
    for approximate in (False, True):
        found = run_checked(
            gpu, logits, targets, average, *settings, tile=tile, approximate=approximate
        )
        assert_right(found, expected, dtype)
    read = gpu.statistics["global"]["unique_read"]
    assert read == logits.nbytes + 4 * shape[0] * shape[2]


@pytest.mark.parametrize("tile", [TILE, 128])
def test_compiled_code_with_strides(launcher: Callable[[int], Launcher], tile: int) -> None:
    gpu = launcher(80)
    logits, y = case(2, 4, 36, torch.float32)
    expected = literal_terms(logits, y, "losses", 0.7, 0.1)
    for start, width, aligned in [(0, 40, 1), (4, 44, 1), (1, 40, 0), (0, 41, 0), (1, 41, 0)]:
        room = torch.full((3, 7, width), torch.nan)
        z = room[:2, ::2, start : start + 36]
        z[:] = logits
        assert_right(run_checked(gpu, z, y, "losses", tile=tile), expected, torch.float32)
        vectors = "ld.global.v" in gpu.compiled.asm["ptx"]
        assert vectors == (aligned and tile == TILE)
        assert gpu.compiled.metadata.shared < 256  # no exchange to bring other vectors about


@pytest.mark.parametrize(("views", "classes", "tile"), [(2, 2, TILE), (3, 10, 64), (8, 100, TILE)])
def test_compiled_code_holds_its_digits_where_views_nearly_agree(
    launcher: Callable[[int], Launcher], views: int, classes: int, tile: int
) -> None:
    gpu = launcher(80)
    torch.manual_seed(1)
    base = torch.randn(4, 1, classes, dtype=torch.float64)
    noise = torch.randn(4, views, classes, dtype=torch.float64)
    for spread in (2e-2, 0.1, 3.0):
        for offset in (0.0, 1e4):
            logits = (base + spread * noise + offset).float()
            _, kl, grad = run_checked(gpu, logits, None, None, tile=tile)
            _, kl_exact, grad_exact = literal_terms(logits, None, None, 0.7, 0.0)
            some = kl_exact > 1e-5
            assert some.any()
            torch.testing.assert_close(kl[some].double(), kl_exact[some], rtol=3e-6, atol=0)
            assert (grad - grad_exact).norm() < 3e-6 * grad_exact.norm()


@pytest.mark.parametrize("tile", [TILE, 16])
@pytest.mark.parametrize("average", AVERAGES)
def test_compiled_code_and_what_is_not_finite(
    launcher: Callable[[int], Launcher], average: str, tile: int
) -> None:
    logits, y = case(5, 3, 6, torch.float32)
    y[:] = 2
    logits[1, :, 4] = -torch.inf
    logits[2, 1, 4] = -torch.inf
    logits[3, 1, 4] = torch.nan
    y[4] = 6
    nll, kl, grad = run_checked(launcher(80), logits, y, average, 0.0, 0.0, tile=tile)
    assert nll.isnan().tolist() == [False, False, False, True, True]
    assert torch.equal(grad.isnan().all(-1).any(-1), nll.isnan())
    assert kl.isfinite().tolist() == [True, True, False, False, True]
    assert kl[2] == torch.inf
    expected = literal_terms(
        logits[:3].masked_fill(logits[:3] == -torch.inf, -60), y[:3], average, 0.0, 0.0
    )
    torch.testing.assert_close(nll[:3].double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad[:3].double(), expected[2], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "average"),
    [
        ((2, 4, 250), F32, "probs"),
        ((2, 3, 501), F32, "logits"),
        ((1, 8, 1000), F32, "losses"),
        ((1, 8, 1000), BF16, "probs"),
        ((1, 16, 1000), F16, "losses"),
    ],
    ids=str,
)
def test_memory_is_read_once_and_written_once(
    launcher: Callable[[int], Launcher],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    average: str,
) -> None:
    gpu = launcher(80)
    logits, y = case(*shape, dtype)
    images = shape[0]
    for need_grad in (True, False):
        run_checked(gpu, logits, y, average, need_grad=need_grad)
        moved, threads = gpu.statistics["global"], 32 * gpu.compiled.metadata.num_warps
        least = logits.nbytes * (1 + need_grad)
        # Each thread asks for the target of its image, which is one access for a warp.
        assert moved["bytes_read"] == logits.nbytes + 8 * threads * images
        assert moved["unique_read"] == logits.nbytes + 8 * images
        # nll and kl are fp32
        assert moved["bytes_written"] == logits.nbytes * need_grad + 8 * images
        assert moved["unique_read"] + moved["bytes_written"] <= 1.01 * least
        assert moved["bytes_read"] + moved["bytes_written"] <= (1.25 if need_grad else 1.5) * least
