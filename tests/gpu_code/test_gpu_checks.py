"""The checks of fastaug.doctor --gpu-report as tests, for those who have a GPU: pytest -m gpu."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastaug.diagnostics.gpu_report.admission import admission_part
from fastaug.diagnostics.gpu_report.decode import decode_part
from fastaug.diagnostics.gpu_report.kernel_checks import KERNELS, kernel_checks
from fastaug.diagnostics.gpu_report.parts import loader_part
from fastaug.diagnostics.gpu_report.recorder import Check, Recorder, SkippedCheck, read_records
from fastaug.diagnostics.gpu_report.training import training_part, two_gpus_part
from fastaug.diagnostics.gpu_report.view_checks import view_checks

pytestmark = pytest.mark.gpu

NAMED = {
    **{f"{name}: {c.name}": c for name in KERNELS for c in kernel_checks(name)},
    **{f"views: {c.name}": c for c in view_checks()},
}


@pytest.mark.parametrize("check", NAMED.values(), ids=list(NAMED))
def test_kernels_and_views(check: Check) -> None:
    try:
        check.run()
    except SkippedCheck as reason:
        pytest.skip(str(reason))
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "part",
    [loader_part, admission_part, decode_part, training_part, two_gpus_part],
    ids=lambda part: part.__name__,
)
def test_parts(part: Callable[[Recorder], None], tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    part(Recorder(file, tmp_path, quick=False))
    failed = [check for check in read_records(file).checks if check.outcome == "failed"]
    assert failed == []
