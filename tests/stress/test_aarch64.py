"""The prebuilt kernels for aarch64, under qemu-user: the admission check, and other CPUs' results.

The oracles are the float64 loss and Pillow's views of the admission checks, which know nothing of
the library.
"""

from __future__ import annotations

from pathlib import Path

import arm
import pytest
import torch

from fastaug.kernels import admission as loss_admission
from fastaug.views import admission as view_admission

pytestmark = pytest.mark.skipif(arm.why_not() is not None, reason=str(arm.why_not()))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def objective(tmp_path_factory: pytest.TempPathFactory) -> arm.Program:
    return arm.Program("objective.cpp", tmp_path_factory.mktemp("objective"))


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> arm.Program:
    return arm.Program("views.cpp", tmp_path_factory.mktemp("views"))


@pytest.mark.parametrize(("threads", "soft"), [(1, False), (3, False), (1, True)])
def test_the_loss_passes_its_admission_check(
    objective: arm.Program, threads: int, soft: bool
) -> None:
    report = loss_admission.compare(arm.ArmKernel(objective, threads), CPU, soft=soft)
    assert report.admitted, report
    assert report.cases >= (12 if soft else 28)


def test_the_views_pass_their_admission_check(views: arm.Program) -> None:
    report = view_admission.compare(arm.ArmViews(views), CPU)
    assert report.admitted, report
    assert report.cases >= 12


def test_libraries_are_for_any_aarch64(objective: arm.Program, views: arm.Program) -> None:
    """From the files: their machine, and nothing newer than glibc 2.28, which torch needs."""
    for program in (objective, views):
        content = program.library.read_bytes()
        assert content[18:20] == (183).to_bytes(2, "little")  # EM_AARCH64
        versions = {v.split(b"\0")[0] for v in content.split(b"GLIBC_2.")[1:]}
        assert versions
        assert max(int(version.split(b".")[0]) for version in versions) <= 28


def test_a_wrong_library_is_found(objective: arm.Program, tmp_path: Path) -> None:
    """The check can fail: another label smoothing than the one that was asked for."""

    class Wrong(arm.ArmKernel):
        def _run(self, logits: torch.Tensor, targets: torch.Tensor | None, **settings: object):
            return super()._run(logits, targets, **{**settings, "label_smoothing": 0.05})

    assert not loss_admission.compare(Wrong(objective), CPU).admitted
