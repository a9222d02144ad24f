"""The admission check of the view kernel takes the path of large views on every GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import emulated_gpu
import pytest
import torch
from compiled_resources import benchmark
from emulated_gpu import EmulatedViews

from fastaug.toolchain import nvrtc
from fastaug.toolchain.build import source_folder
from fastaug.views import admission
from fastaug.views.launch import Launch, limited, memory_needs, plan_launch
from fastaug.views.packed_plan import encode_layers, encode_views, pictures_of
from fastaug.views.render_spec import RenderSpec

CASES = {case.name: case for case in admission._cases()}
LIMITED = [name for name, case in CASES.items() if case.limits and "operations" in name]


def planned(name: str, shared_limit: int, processors: int) -> tuple[int, Launch]:
    """Number of views of a case, and its launch on a GPU."""
    case = CASES[name]
    views, layers = encode_views(pictures_of(case.images)[0], case.plans), encode_layers(case.plans)
    size = case.plans.size
    needs = memory_needs(views, layers, RenderSpec.of(case.config), size)
    with limited(case.limits):
        return len(views), plan_launch(needs, len(views), size, shared_limit, processors)


@pytest.mark.parametrize("gpu", benchmark.SHARED_LIMITS)
def test_on_every_gpu_a_block_makes_several_views_in_global_memory(gpu: str) -> None:
    for processors in (8, 40, 148):
        kernels = set()
        for name in LIMITED:
            count, plan = planned(name, benchmark.SHARED_LIMITS[gpu], processors)
            assert 2 * plan.blocks <= count
            assert plan.scratch_bytes >= plan.blocks * 2 * 3 * CASES[name].plans.size ** 2
            assert plan.threads == 384
            kernels.add((plan.shared, CASES[name].config.views_dtype))
        assert kernels == {("tables", t) for t in ("fp32", "fp16", "bf16")} | {("none", "fp32")}
        # As RandAugment's views of 224 px do.
        needs = benchmark.view_needs("224 px, RandAugment")
        large = plan_launch(needs, 1024, 224, benchmark.SHARED_LIMITS[gpu], processors)
        assert (large.shared, large.threads) == ("tables", 384)
        assert large.blocks < 1024


def test_a_case_asks_for_more_shared_memory_than_a_kernel_has_by_default() -> None:
    for limit in benchmark.SHARED_LIMITS.values():
        assert planned("wide", limit, 100)[1].shared_bytes > 48 * 1024


MUTANTS = {
    "a block's later views in the place of others": (
        ".run(out + i * 3 * form.size * form.size)",
        ".run(out + (i < gridDim.x ? i : i - 1) * 3 * form.size * form.size)",
    ),
    "one piece of global memory for all blocks": (
        "buffer + blockIdx.x * places.piece",
        "buffer + 0 * places.piece",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_kernel_that_is_wrong_on_this_path_only_is_refused(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(source_folder(), sources)
    right, wrong = MUTANTS[mutant]
    text = (sources / "views.cu").read_text()
    assert text.count(right) == 1
    (sources / "views.cu").write_text(text.replace(right, wrong))
    monkeypatch.setattr(nvrtc, "source_folder", lambda: sources)
    monkeypatch.setattr(emulated_gpu, "_compiled", {})
    kept = ("operations of magnitude 8, fp32", LIMITED[0])
    monkeypatch.setattr(admission, "_cases", lambda: iter([CASES[kept[0]]]))
    engine = EmulatedViews("compute_90")
    assert admission.compare(engine, torch.device("cpu")).admitted
    monkeypatch.setattr(admission, "_cases", lambda: iter([CASES[name] for name in kept]))
    report = admission.compare(engine, torch.device("cpu"))
    assert not report.admitted
    assert kept[1] in report.worst
