"""Signals: the first one is a request, the second one an end."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from states import state_of

from fastaug import cli, train
from fastaug.config import TrainConfig
from fastaug.runs import checkpoint_writer
from fastaug.runs.checkpoint import write_checkpoint
from fastaug.runs.checkpoint_writer import CheckpointWriter
from fastaug.runs.resume import newest_checkpoint
from fastaug.runtime.signals import StopSignals, TrainingInterruptedError

FORK = multiprocessing.get_context("fork")
LONG = 60
"""Seconds that no test takes."""
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)]


@pytest.mark.parametrize(("signum", "code"), SIGNALS)
def test_the_first_signal_is_a_request(
    signum: signal.Signals, code: int, capfd: pytest.CaptureFixture
) -> None:
    with StopSignals() as request:
        request.check()
        assert request.signum == 0
        os.kill(os.getpid(), signum)
        assert request.signum == signum
        with pytest.raises(TrainingInterruptedError, match=signum.name) as caught:
            request.check()
    assert caught.value.exit_code == code
    err = capfd.readouterr().err
    assert (err.count("\n"), err[-1]) == (2, "\n")  # on a line of its own
    assert err.startswith(f"\n{signum.name}: ")


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(signum) for signum, _ in SIGNALS]
    with StopSignals():
        assert [signal.getsignal(signum) for signum, _ in SIGNALS] != before
    assert [signal.getsignal(signum) for signum, _ in SIGNALS] == before


def test_another_thread_sees_a_signal_of_this_process_only() -> None:
    with StopSignals() as request:

        def work(ready: Any) -> None:
            ready.set()
            time.sleep(LONG)

        worker = start(work)
        os.kill(worker.pid, signal.SIGUSR1)  # its handler is the one that it has inherited
        time.sleep(0.2)
        assert request.arrived() == 0
        os.kill(os.getpid(), signal.SIGTERM)
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(request.arrived()))
        thread.start()
        thread.join()
        worker.kill()
        worker.join()
    assert found == [signal.SIGTERM]
    assert request.arrived() == signal.SIGTERM  # also afterwards
    assert signal.set_wakeup_fd(-1) == -1


def test_in_the_middle_of_a_line_on_a_terminal_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal comes between any two instructions, those of a print as well."""

    class Reentrant(io.StringIO):
        def write(self, _text: str) -> int:
            raise RuntimeError("reentrant call")

    monkeypatch.setattr("sys.stderr", Reentrant())
    terminal = os.dup(2)
    try:
        with StopSignals() as request:
            os.close(2)
            os.kill(os.getpid(), signal.SIGTERM)
            assert request.signum == signal.SIGTERM
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def start(work: Callable[[Any], None]) -> Any:
    """A process that goes on from here, at the place where it says that it is ready."""
    ready = FORK.Event()
    process = FORK.Process(target=work, args=(ready,), daemon=True)
    process.start()
    assert ready.wait(LONG)
    return process


def end_by(process: Any, *signals: int) -> int | None:
    """The exit code after some signals; None if it had to be killed."""
    for signum in signals:
        assert process.is_alive()
        os.kill(process.pid, signum)
        time.sleep(0.1)
    process.join(10)
    code = process.exitcode
    process.kill()
    process.join()
    return code


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGINT, signal.SIGINT), 130),
        ((signal.SIGTERM, signal.SIGTERM), 143),
        ((signal.SIGINT, signal.SIGTERM), 143),
        ((signal.SIGUSR1, signal.SIGUSR1), 138),
    ],
)
def test_the_second_signal_ends_a_long_step(signals: tuple[int, ...], code: int) -> None:
    def work(ready: Any) -> None:
        with StopSignals():
            ready.set()
            time.sleep(LONG)

    assert end_by(start(work), *signals) == code


def test_the_second_signal_ends_a_slow_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    write_checkpoint(tmp_path / "last.pt", state_of(1))
    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", lambda *_args: time.sleep(LONG))

    def work(ready: Any) -> None:
        with StopSignals():
            writer = CheckpointWriter(tmp_path, keep=1, say=print)
            writer.save(state_of(2))
            ready.set()
            writer.close()

    assert end_by(start(work), signal.SIGTERM, signal.SIGTERM) == 143
    said: list[str] = []
    assert newest_checkpoint(tmp_path, said.append) == tmp_path / "last.pt"
    assert said == []


def test_a_training_that_cannot_save_ends_by_the_second_signal(
    tiny: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny()
    hangs = FORK.Event()
    slow = FORK.Event()

    def write(path: Path, state: dict[str, Any]) -> None:
        if slow.is_set():
            hangs.set()
            threading.Event().wait()
        write_checkpoint(path, state)

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", write)
    flags = [
        *(
            "--data",
            config.data.data,
            "--model",
            config.model.model,
            "--size",
            "16",
            "--views",
            "2",
        ),
        *("--batch-size", "16", "--epochs", "2000", "--eval-every", "2000", "--workers", "0"),
        *("--checkpoint-every", "1", "--kernel", "reference", "--out", config.run.out),
    ]

    def work(ready: Any) -> None:
        ready.set()
        os._exit(cli.run(train.main, flags))

    process = start(work)
    last = Path(config.run.out) / "last.pt"
    deadline = time.monotonic() + LONG
    while not last.exists():
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    slow.set()
    assert hangs.wait(LONG)
    assert end_by(process, signal.SIGTERM, signal.SIGTERM) == 143
    said: list[str] = []
    assert newest_checkpoint(Path(config.run.out), said.append) == last
    assert said == []
