"""The checks in on_stand_ins/: each file is run by its own pytest, in a process with stand-in GPUs.

A stand-in GPU shows what the host code asks of CUDA; with functional=True its operators compute on
the CPU, so that results can be compared. None of this has run on a real GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from stand_ins import run_checks

CHECKS = sorted((Path(__file__).parent / "on_stand_ins").glob("check_*.py"))


@pytest.mark.parametrize("file", CHECKS, ids=lambda file: file.stem)
def test_checks_on_stand_in_gpus_pass(file: Path, tmp_path: Path) -> None:
    done = run_checks(file, tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
