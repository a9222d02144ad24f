"""The parts of a GPU report, in the order in which they run."""

from __future__ import annotations

from functools import partial

from fastaug.diagnostics.gpu_report.admission import admission_part
from fastaug.diagnostics.gpu_report.decode import decode_part
from fastaug.diagnostics.gpu_report.facts import machine_part
from fastaug.diagnostics.gpu_report.kernel_checks import kernel_checks
from fastaug.diagnostics.gpu_report.launches import launches_part
from fastaug.diagnostics.gpu_report.loader_checks import loader_checks
from fastaug.diagnostics.gpu_report.recorder import Recorder
from fastaug.diagnostics.gpu_report.runner import Part
from fastaug.diagnostics.gpu_report.sanitizer import sanitizer_part
from fastaug.diagnostics.gpu_report.throughput import throughput_part
from fastaug.diagnostics.gpu_report.training import training_part, two_gpus_part
from fastaug.diagnostics.gpu_report.view_checks import view_checks


def kernel_part(name: str, recorder: Recorder) -> None:
    recorder.run(kernel_checks(name))


def view_part(recorder: Recorder) -> None:
    recorder.run(view_checks())


def loader_part(recorder: Recorder) -> None:
    recorder.run(loader_checks(recorder.folder))


PARTS = {
    name: Part(title, run, seconds, limit)
    for name, title, run, seconds, limit in (
        ("machine", "software, GPUs, driver, clocks", machine_part, 10, 90),
        ("kernel-cuda", "checks of the CUDA loss kernel", partial(kernel_part, "cuda"), 20, 180),
        ("kernel-triton", "checks of the Triton one", partial(kernel_part, "triton"), 30, 180),
        ("views", "checks of the fused view engine", view_part, 20, 180),
        ("loader", "checks of the DALI loader", loader_part, 25, 180),
        ("admission", "kernels and views at real sizes", admission_part, 30, 180),
        ("decode", "GPU decoder against the CPU's", decode_part, 10, 90),
        ("training", "each precision against the CPU's fp32", training_part, 40, 240),
        ("two-gpus", "torchrun against the CPU", two_gpus_part, 20, 180),
        ("throughput", "images/s versus K, stages, memory", throughput_part, 60, 300),
        ("launches", "launches and host syncs of a step", launches_part, 25, 180),
        ("sanitizer", "compute-sanitizer memcheck", sanitizer_part, 30, 300),
    )
}
