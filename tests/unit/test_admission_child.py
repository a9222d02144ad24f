"""What the end of an admission check's child process means. The real ones run on stand-in GPUs:
tests/gpu_code/on_stand_ins/check_admission.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fastaug.kernels.admission import compare
from fastaug.kernels.reference import ReferenceKernel
from fastaug.toolchain import admission, child
from fastaug.toolchain.admission import AdmissionReport

GPU = torch.device("cuda:0")
REPORT = {"kernel": "cuda", "device": "a GPU", "admitted": True, "cases": 29, "worst": "nothing"}


class Ended:
    """A child process that ends like this."""

    def __init__(self, code: int | None, content: str = child.STARTED, stderr: str = "") -> None:
        self.code, self.content, self.stderr = code, content, stderr

    def __call__(self, request: bytes, result: Path, errors: Path) -> int | None:
        if self.content:
            result.write_text(self.content)
        errors.write_text(self.stderr)
        return self.code


def compared_here(*_: object) -> AdmissionReport:
    return AdmissionReport("reference", "a GPU", True, 3, "compared here")


@pytest.fixture
def named_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "device_name", lambda device: "a GPU")


@pytest.mark.usefixtures("named_gpu")
@pytest.mark.parametrize(
    ("ended", "conclusive", "says"),
    [
        (Ended(1, stderr="a line\nCUDA error: misaligned address\n\n"), True, "misaligned address"),
        (Ended(-11), True, "SIGSEGV"),
        (Ended(-63), True, "63"),
        (Ended(None), True, "120 s"),
        (Ended(None, content=""), False, "120 s"),  # before the comparison: a slow machine
        (Ended(-9), False, "SIGKILL"),  # memory was short
        (Ended(-15), False, "SIGTERM"),
    ],
)
def test_a_child_that_fails_is_a_refusal(
    ended: Ended, conclusive: bool, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_run", ended)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(REPORT))
    report = admission.check(compare, ReferenceKernel(), GPU, file=file, again=True)
    assert (report.admitted, report.conclusive) == (False, conclusive)
    assert says in report.worst
    assert "\n" not in str(report)
    # A file holds what is known for certain; what was there before is not true any more.
    assert file.is_file() == conclusive
    if conclusive:
        assert not json.loads(file.read_text())["admitted"]


def test_a_child_that_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_run", Ended(0, json.dumps(REPORT)))
    file = tmp_path / "report.json"
    first = admission.check(compare, ReferenceKernel(), GPU, file=file)
    assert first == AdmissionReport(**REPORT)  # type: ignore[arg-type]
    monkeypatch.setattr(child, "_run", Ended(-11))
    second = admission.check(compare, ReferenceKernel(), GPU, file=file)
    assert (second.admitted, second.cached) == (True, True)


@pytest.mark.usefixtures("named_gpu")
@pytest.mark.parametrize(
    ("ended", "says"),
    [
        (Ended(0, json.dumps({child.UNAVAILABLE: "all devices are busy"})), "busy"),
        (Ended(1, content="", stderr="No module named torch"), "torch"),
        (Ended(-9, content=""), "SIGKILL"),
    ],
)
def test_without_a_child_it_is_compared_here(
    ended: Ended, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child, "_run", ended)
    report = admission.check(compared_here, ReferenceKernel(), GPU, file=None)
    assert report == compared_here()
    assert says in caplog.text


def test_a_child_that_cannot_open_the_gpu() -> None:
    with pytest.raises(child.NoChildError):
        child.compare_in_child(compare, ReferenceKernel(), torch.device("cuda:99"))
