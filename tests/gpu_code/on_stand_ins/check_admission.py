"""A kernel that faults, crashes or hangs in its admission check leaves the GPU usable.

The check runs in a child process, which inherits the stand-in GPUs and the fault (NULLGPU_FAULT).
The fault is also set in this process: a comparison here would break its GPU, too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import nullgpu_client as gpu
import pytest
import torch
from training import run, weights

import examples.autograd_kernel
import fastaug
from fastaug.config import TrainConfig
from fastaug.errors import KernelUnavailableError
from fastaug.kernels import admission as kernels_admission
from fastaug.kernels import registry
from fastaug.kernels.reference import ReferenceKernel
from fastaug.toolchain import admission, child
from fastaug.views import engine

STAND_INS = {"devices": 1, "functional": True}
GPU = torch.device("cuda:0")
Fault = Callable[[str], None]


@pytest.fixture(autouse=True)
def fresh(compiled_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, in a process that has checked nothing yet."""
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))
    monkeypatch.setattr(registry, "_logged", set())
    restart()


def restart() -> None:
    """Forget what this process has checked, but not the cache."""
    registry._found.clear()
    kernels_admission._reports.clear()
    engine._reports.clear()


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fault]:
    """Let kernels whose name contains this fault, in this process and its children."""

    def inject(name: str) -> None:
        monkeypatch.setenv("NULLGPU_FAULT", name)
        gpu.fault_on(name)

    yield inject
    gpu.fault_on("")
    gpu.clear_error()


def faults() -> list[gpu.Record]:
    """Faults in all processes so far."""
    return gpu.selected("fault", of=gpu.records(os.environ["NULLGPU_LOG"]))


def assert_gpu_works() -> None:
    assert gpu.error() == 0
    assert torch.arange(5, device=GPU).sum().item() == 10


def write_kernel(folder: Path, body: str) -> str:
    """The address of a kernel that does this on a GPU and cannot be pickled."""
    name = f"kernel_of_{folder.name}"
    (folder / f"{name}.py").write_text(
        dedent(f"""
        import os, signal, threading, time
        from fastaug.kernels.reference import ReferenceKernel

        class Mine(ReferenceKernel):
            name = "mine"
            def __init__(self):
                self.handle = threading.Lock()
            def value_and_grad(self, *arguments, **settings):
                {body}

        kernel = Mine()
        """)
    )
    return f"{name}:kernel"


def test_a_run_continues_after_the_faults_of_two_kernels(
    tiny: Callable[..., TrainConfig], fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    fault("objective_")  # those of `cuda`, and Triton's objective_program
    config = tiny(device="cuda", kernel="auto", max_steps=2)
    folder = run(config)
    assert_gpu_works()
    assert weights(folder)
    assert [message.split("'")[1] for message in caplog.messages] == ["cuda", "triton"]
    before = len(faults())
    assert before == 2
    assert os.getpid() not in {record.pid for record in faults()}

    restart()
    run(config, "-again")
    assert len(faults()) == before  # both refusals are cached
    with pytest.raises(KernelUnavailableError, match="'cuda'"):
        run(config.replace(kernel="cuda"), "-named")
    assert len(faults()) == before


def test_views_fall_back_after_a_fault(
    tiny: Callable[..., TrainConfig], fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    fault("views_")
    config = tiny(loader="dali", views_engine="auto").view
    assert engine.resolve_engine(config, GPU) is None
    assert "refused" in caplog.text
    assert_gpu_works()
    before = len(faults())
    restart()
    assert engine.resolve_engine(config, GPU) is None
    assert len(faults()) == before > 0


def test_a_kernel_that_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    is_of_a_rank = "any(name == 'RANK' or name.startswith('TORCHELASTIC') for name in os.environ)"
    body = f"os.kill(os.getpid(), signal.SIGTERM if {is_of_a_rank} else signal.SIGSEGV)"
    report = fastaug.check_kernel(write_kernel(tmp_path, body), GPU)
    assert not report.admitted
    assert "SIGSEGV" in report.worst
    assert_gpu_works()


def test_a_kernel_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(child, "TIME_LIMIT", 5.0)
    report = fastaug.check_kernel(write_kernel(tmp_path, "time.sleep(1000)"), GPU)
    assert not report.admitted
    assert "5 s" in report.worst


def test_a_kernel_that_is_right(caplog: pytest.LogCaptureFixture) -> None:
    """An object, which is pickled."""
    report = fastaug.check_kernel(examples.autograd_kernel.kernel, GPU)
    assert (report.admitted, report.cases) == (True, 29)
    assert caplog.messages == []  # not compared in this process


def test_a_kernel_that_a_child_cannot_have_is_compared_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Local(ReferenceKernel):
        name = "local"

        def __init__(self) -> None:
            self.lock = threading.Lock()

    fastaug.register_kernel("local", Local())
    assert fastaug.check_kernel("local", GPU).admitted
    assert "'local' on cuda:0 is compared in this process" in caplog.text


def test_another_driver_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sources: tests/unit/test_registry.py."""
    asked = []

    def compare(*_: object) -> dict:
        asked.append(1)
        return {"kernel": "cuda", "device": "a GPU", "admitted": False, "cases": 1, "worst": "no"}

    monkeypatch.setattr(admission, "compare_in_child", compare)
    kernel = registry.load_kernel("cuda")
    for driver, times in (("one", 1), ("one", 1), ("two", 2)):
        monkeypatch.setattr(admission, "driver_version", lambda _, driver=driver: driver)
        assert not registry.check_admission(kernel, GPU).admitted
        assert len(asked) == times
