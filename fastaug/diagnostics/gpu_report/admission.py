"""Admission of all loss kernels and of the view engine, and both at the sizes of real trainings."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

import fastaug
from fastaug.diagnostics.gpu_report.kernel_checks import KERNELS, errors, make_logits, run_kernel
from fastaug.diagnostics.gpu_report.recorder import Recorder, SkippedCheck
from fastaug.diagnostics.gpu_report.view_checks import render
from fastaug.diagnostics.timing import Call, calibrate, seconds_of
from fastaug.errors import first_line
from fastaug.kernels.registry import load_kernel
from fastaug.toolchain.admission import AdmissionReport
from fastaug.views.admission import check_admission
from fastaug.views.engine import engine_of

_LOSSES = ((256, 1, 1000), (64, 4, 1000), (32, 8, 1000), (16, 16, 1000), (32, 8, 100))
"""Images, views, classes."""
_VIEWS = (1, 4, 8)
_DIFFERING = 0.01
"""Largest share of pixel values that may differ after RandAugment: its operations amplify a pixel
that was rounded differently before them."""
_CLOSE = 1e-4


def admission_part(recorder: Recorder) -> None:
    if not recorder.quick:  # it compiles and runs many small cases
        for name in KERNELS:
            with recorder.check(f"loss kernel {name}: admission") as found:
                found.append(_admitted(fastaug.check_kernel(name, "cuda")))
        with recorder.check("view engine: admission") as found:
            device = _gpu()
            found.append(_admitted(check_admission(engine_of(device), device, again=True)))
        with recorder.check("a kernel that faults leaves the GPU usable") as found:
            found.append(_faulting_kernel(recorder.folder))
    _compare_losses(recorder)
    _compare_views(recorder)


def _admitted(report: AdmissionReport) -> str:
    assert report.admitted, str(report)
    return f"{report.cases} cases; worst: {first_line(report.worst)}"


_FAULTING = """
import torch
from fastaug.kernels.reference import ReferenceKernel

class Faulting(ReferenceKernel):
    name = "faulting"

    def value_and_grad(self, logits, *arguments, **settings):
        torch.zeros(4, device=logits.device)[torch.tensor([9], device=logits.device)].sum().item()
        return super().value_and_grad(logits, *arguments, **settings)

kernel = Faulting()
"""


def _faulting_kernel(folder: Path) -> str:
    """An index outside of its tensor is a device-side assertion, which ends a CUDA context."""
    (folder / "faulting_kernel.py").write_text(_FAULTING)
    sys.path.insert(0, str(folder))
    try:
        report = fastaug.check_kernel("faulting_kernel:kernel", "cuda")
    finally:
        sys.path.remove(str(folder))
    assert not report.admitted, str(report)
    assert torch.arange(5, device="cuda").sum().item() == 10
    return f"refused: {first_line(report.worst)}"


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _compare_losses(recorder: Recorder) -> None:
    columns = [("kernel", ""), ("images x views x classes", ""), ("dtype", "")]
    columns += [(f"error of {name}", "x tolerance") for name in ("nll", "kl", "gradient")]
    recorder.table("losses", "Loss kernels at real sizes", [*columns, ("time per call", "ms")])
    for name in KERNELS:
        for shape in [(2, 4, 10)] if recorder.quick else _LOSSES:
            for dtype in (torch.float32, torch.bfloat16):
                short, size = str(dtype).removeprefix("torch."), "x".join(map(str, shape))
                with recorder.check(f"loss kernel {name}: {size}, {short}") as found:
                    logits, targets = make_logits(*shape, dtype)
                    kernel, on_gpu = load_kernel(name), (logits.cuda(), targets.cuda())
                    if reason := kernel.supports(on_gpu[0]):
                        raise SkippedCheck(first_line(reason))
                    off = errors(run_kernel(kernel, *on_gpu), logits, targets)
                    time = _milliseconds(partial(run_kernel, kernel, *on_gpu))
                    recorder.row("losses", name, size, short, *off.values(), time)
                    worst = max(off, key=lambda part: off[part])
                    assert all(error <= 1 for error in off.values()), off
                    found.append(f"{worst} off by {off[worst]:.2g} x the tolerance")


def _compare_views(recorder: Recorder) -> None:
    size, count = (16, 2) if recorder.quick else (224, 8)
    shape = (40, 50, 3) if recorder.quick else (375, 500, 3)
    columns = [("augmentation", ""), ("K", ""), ("size", "px"), ("largest error", "x tolerance")]
    columns += [("values that differ", "%"), ("time per call", "ms"), ("views/s", "1/s")]
    recorder.table(
        "views", f"The fused view engine on {count} images of {shape[1]} x {shape[0]}", columns
    )
    for augment in ("crop-flip", "randaugment"):
        for views in _VIEWS[:1] if recorder.quick else _VIEWS:
            with recorder.check(f"view engine: {augment}, {size} px, K={views}") as found:
                images = [torch.randint(256, shape, dtype=torch.uint8) for _ in range(count)]
                plan = fastaug.plan_views(images, views=views, size=size, augment=augment)
                on_gpu = [image.cuda() for image in images]
                ours = render(on_gpu, plan).cpu()
                off = (ours - fastaug.make_views(images, plan)).abs()
                share = (off > _CLOSE).float().mean().item()
                time = _milliseconds(partial(render, on_gpu, plan))
                speed = 1e3 * count * views / time
                worst = off.max().item() / _CLOSE
                recorder.row("views", augment, views, size, worst, 100 * share, time, speed)
                assert ours.isfinite().all()
                limit = _DIFFERING if augment == "randaugment" else 0.0
                assert share <= limit, f"{100 * share:.3g}% of the pixel values differ"
                found.append(f"{100 * share:.2g}% of the values differ")


def _milliseconds(call: Call) -> float:
    call()
    loops = calibrate(call, _gpu())
    return 1e3 * seconds_of(call, loops, _gpu()) / loops
