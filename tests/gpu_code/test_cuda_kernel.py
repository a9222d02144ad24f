"""The CUDA kernel as far as it goes without a GPU: plans, compilation, and calls to the driver.

test_cuda_compiled.py runs what is compiled; test_gpu_checks.py is for those who have a GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from ctypes import c_float, c_int, c_longlong, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_resources import DOCUMENT, LIMITS, ROOT, benchmark, check_resources, section
from expect import raises

from fastaug.errors import KernelUnavailableError
from fastaug.kernels.cuda import OBJECTIVE, RESERVED, CudaKernel, launch_plan, shared_bytes
from fastaug.toolchain import cuda_driver, nvrtc

pytest.importorskip("cuda.bindings")


@pytest.mark.parametrize("architecture", benchmark.ARCHITECTURES)
def test_every_kernel_compiles_without_spills_and_as_documented(architecture: str) -> None:
    check_resources(OBJECTIVE, architecture, {})


def test_the_document_is_what_the_script_writes() -> None:
    """But for registers and instructions, which the test above and test_sass.py compare."""
    text = DOCUMENT.read_text()
    version = re.search(r"NVRTC (\d+\.\d+)\.\n", text)
    assert version is not None
    tables = (section(title).lstrip() for title in ("Registers per thread", "Instructions"))
    assert text == benchmark.document(*tables, version[1])


@pytest.mark.parametrize("limit", LIMITS)
def test_a_plan_fits_and_is_of_whole_warps(limit: int) -> None:
    for views in (1, 2, 3, 7, 8, 15, 16, 17, 33, 100, 200):
        for classes in (1, 2, 31, 32, 33, 100, 1000, 21841):
            plan = launch_plan(views, classes, limit)
            if plan is None:
                assert shared_bytes(views, 1, min(views, 16)) > limit
                continue
            assert plan.threads == 32 * min(views, 16)
            assert plan.shared_bytes == shared_bytes(views, plan.width, plan.threads // 32) <= limit
            assert 1 <= plan.width <= classes
            # A row of a chunk is a number of whole lines of memory, if there is room for one.
            assert plan.width % 32 == 0 or plan.width == classes or plan.width < 32


def test_what_is_held_at_a_time() -> None:
    whole = {8: (1000,), 16: (100, 1000)}
    for views, classes in ((v, c) for v, many in whole.items() for c in many):
        assert launch_plan(views, classes, 232448).width == classes
    # One block alone on an SM, of one warp: better in chunks, many blocks at a time.
    assert launch_plan(1, 10_000, 232448).width < 10_000
    for views, limit in ((16, 232448), (8, 65536), (2, 101376), (1, 166912)):
        plan = launch_plan(views, 21841, limit)
        blocks = (limit + RESERVED) // (plan.shared_bytes + RESERVED)
        assert blocks >= 2
        assert blocks * plan.threads >= 16 * 32
    assert launch_plan(8000, 100, 232448).width == 1
    assert launch_plan(9000, 100, 232448) is None


@pytest.mark.parametrize(
    ("logits", "reason"),
    [
        (torch.empty(1, 2, 3), "needs a CUDA device; use native"),
        (torch.empty(1, 2, 3, dtype=torch.float64), "use reference"),
        (torch.empty(1, 2, 3, dtype=torch.int32), "torch.int32"),
    ],
)
def test_supports_says_why_not(logits: torch.Tensor, reason: str) -> None:
    assert reason in str(CudaKernel().supports(logits))


def test_without_the_bindings_or_the_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(KernelUnavailableError):
        cuda_driver._driver()
    for loader in (cuda_driver._driver, nvrtc._nvrtc.__wrapped__):
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        with raises(KernelUnavailableError, "pip cuda-bindings"):
            loader()


def test_the_architecture_is_the_gpus_or_the_newest_before_it() -> None:
    known = (75, 80, 86, 90, 120)
    assert nvrtc.architecture_for((9, 0), known) == "sm_90"
    assert nvrtc.architecture_for((12, 0), known) == "sm_120"
    assert nvrtc.architecture_for((13, 0), known) == "compute_120"
    assert nvrtc.architecture_for((10, 3), known) == "compute_90"
    with raises(KernelUnavailableError, "7.5 GPU 7.0"):
        nvrtc.architecture_for((7, 0), known)


def test_a_kernel_is_compiled_once_and_again_for_other_sources(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled = []

    def compile_kernels(program: Any, architecture: str, **options: Any) -> nvrtc.Compiled:
        compiled.append((architecture, options["only"]))
        return nvrtc.Compiled(b"code", "")

    monkeypatch.setattr(nvrtc, "compile_kernels", compile_kernels)
    for _ in range(2):
        assert nvrtc.image_for(OBJECTIVE, "objective_probs_f16", "sm_90") == b"code"
    assert compiled == [("sm_90", "objective_probs_f16")]
    (file,) = (own_cache / "kernels").iterdir()
    assert file.name.startswith(f"objective_probs_f16-sm_90-nvrtc{nvrtc.nvrtc_version()}-")

    shutil.copytree(nvrtc.source_folder(), tmp_path / "cuda")
    with (tmp_path / "cuda" / "block.h").open("a") as header:
        header.write("// changed\n")
    monkeypatch.setattr(nvrtc, "source_folder", lambda: tmp_path / "cuda")
    nvrtc.image_for(OBJECTIVE, "objective_probs_f16", "sm_90")
    nvrtc.image_for(OBJECTIVE, "objective_probs_f16", "sm_80")
    assert len(compiled) == len(list((own_cache / "kernels").iterdir())) == 3


def test_what_does_not_compile_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(nvrtc.source_folder(), tmp_path / "cuda")
    with (tmp_path / "cuda" / "objective.cu").open("a") as source:
        source.write("__device__ int f() { return missing; }\n")
    monkeypatch.setattr(nvrtc, "source_folder", lambda: tmp_path / "cuda")
    with raises(KernelUnavailableError, "NVRTC sm_80"):
        nvrtc.compile_kernels(OBJECTIVE, "sm_80", only="objective_none_f32")


def test_arguments_have_the_types_that_kernels_take() -> None:
    kernel = "objective_none_f16"
    ptx = nvrtc.compile_kernels(OBJECTIVE, "compute_75", only=kernel).image.decode("ascii")
    types = {c_void_p: "u64", c_longlong: "u64", c_int: "u32", c_float: "f32"}
    assert [types[t] for t in OBJECTIVE.arguments] == re.findall(
        r"\.param \.(\w+)\b[^,)]*objective_none_f16_param_\d+[,\s]", ptx
    )


def test_its_sources_are_files() -> None:
    names = {file.name for file in CudaKernel().sources() if file.is_file()}
    assert {"objective.cu", "objective.h", "block.h", "values.h"} < names
    assert {"cuda.py", "cuda_driver.py", "nvrtc.py"} < names


def test_the_driver_is_called_as_it_should_be(tmp_path: Path) -> None:
    """driver_calls.py, with a stand-in for libcuda; it says which parts are real."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a C compiler on Linux makes the stand-in for libcuda.so.1")
    tests = Path(__file__).parents[1] / "helpers"
    command = [compiler, "-shared", "-fPIC", str(tests / "fake_driver.c"), "-ldl"]
    subprocess.run([*command, "-o", str(tmp_path / "libcuda.so.1")], check=True)
    paths = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": f"{ROOT}{os.pathsep}{tests}"}
    done = subprocess.run(
        [sys.executable, str(tests / "driver_calls.py")],
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "all calls were right\n", done.stderr
