"""The watchdog, in processes of their own: those that hang end, and say where they stood."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from fastaug.config import TrainConfig
from fastaug.data.torch_loader import _start_worker
from fastaug.engine.trainer import Trainer
from fastaug.runtime import watchdog
from fastaug.runtime.signals import StopSignals
from fastaug.runtime.watchdog import Watchdog

FORK = multiprocessing.get_context("fork")
LONG = 60
"""Seconds that no test takes."""


class Child:
    """A process that goes on from here; what it writes to stderr goes to a file."""

    def __init__(self, folder: Path, work: Callable[[], object]) -> None:
        self._stderr = folder / "stderr"
        self.started = FORK.Event()
        self._process = FORK.Process(target=self._run, args=(work,))
        self._process.start()
        self.pid = self._process.pid or 0
        assert self.started.wait(LONG)

    def _run(self, work: Callable[[], object]) -> None:
        os.dup2(os.open(self._stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        # In the place of pytest's.
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        threading.excepthook = threading.__excepthook__
        self.started.set()
        work()

    def end(self, seconds: float = 20) -> tuple[int | None, str]:
        """Its exit code, None if it had to be killed, and what it said."""
        self._process.join(seconds)
        code = self._process.exitcode
        self._process.kill()
        self._process.join()
        return code, self.said()

    def said(self) -> str:
        return self._stderr.read_text()


def where_the_training_hangs() -> None:
    time.sleep(LONG)


def where_another_thread_is() -> None:
    time.sleep(LONG)


def no_save() -> None:
    pass


def guard(seconds: float, save: Callable[[], None] = no_save, file: Path | None = None) -> Watchdog:
    return Watchdog(seconds, name="the training", file=file, save=save)


def test_one_that_hangs_ends_and_says_where(tmp_path: Path) -> None:
    file, saved = tmp_path / "stall.txt", tmp_path / "saved"

    def save() -> None:
        # After the stacks: saving may hang as well.
        saved.write_text(file.read_text())

    def work() -> None:
        threading.Thread(target=where_another_thread_is, daemon=True).start()
        with guard(0.4, save, file) as dog:
            dog.beat("waiting for data")
            where_the_training_hangs()

    started = time.monotonic()
    code, said = Child(tmp_path, work).end()
    assert code == 75
    assert time.monotonic() - started >= 0.4
    for text in (said, file.read_text(), saved.read_text()):
        line, stacks = text.split("\n", maxsplit=1)
        assert line == (
            "error: the training has made no progress for 0.4 s (--stall-timeout) while waiting "
            "for data; the stacks of its threads:"
        )
        assert "in where_the_training_hangs" in stacks
        assert "in where_another_thread_is" in stacks


def hang(folder: Path, seconds: float = 0.2, **options: Any) -> tuple[int | None, str]:
    """The end of a process that hangs, with a watchdog of these options."""

    def work() -> None:
        with guard(seconds, **options):
            where_the_training_hangs()

    return Child(folder, work).end()


def test_one_that_never_began(tmp_path: Path) -> None:
    code, said = hang(tmp_path)
    assert code == 75
    assert "while starting;" in said


def test_one_that_beats_lives(tmp_path: Path) -> None:
    def work() -> None:
        with guard(0.5) as dog:
            for _ in range(12):
                time.sleep(0.1)
                dog.beat("training")

    assert Child(tmp_path, work).end() == (0, "")


def test_a_beat_does_not_last(tmp_path: Path) -> None:
    def work() -> None:
        with guard(0.3) as dog:
            for _ in range(8):
                time.sleep(0.05)
                dog.beat("training")
            where_the_training_hangs()

    assert Child(tmp_path, work).end()[0] == 75


def test_one_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """In the middle of a step, which has had no beat when it goes on."""
    done = tmp_path / "done"

    def work() -> None:
        with guard(3.0) as dog:
            dog.beat("training")
            while not done.exists():
                time.sleep(0.01)

    child = Child(tmp_path, work)
    time.sleep(0.9)  # it has looked once
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(3.1)
    os.kill(child.pid, signal.SIGCONT)
    time.sleep(0.7)  # longer than between two looks; 1 s later it would end
    done.touch()
    assert child.end() == (0, "")


def test_python_s_lock_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_LAST_RESORT", 0.3)

    def where_the_lock_is_kept() -> None:
        ctypes.PyDLL(None).sleep(LONG)  # unlike CDLL, it keeps the lock meanwhile

    def work() -> None:
        with guard(0.3):
            time.sleep(0.2)
            where_the_lock_is_kept()

    code, said = Child(tmp_path, work).end()
    assert code == 1  # faulthandler's own
    assert "in where_the_lock_is_kept" in said


@pytest.mark.parametrize(
    ("save", "code"),
    [(lambda: time.sleep(LONG), 75), (lambda: ctypes.PyDLL(None).sleep(LONG), 1)],
    ids=["waits", "keeps Python's lock"],
)
def test_a_save_that_hangs_does_not_keep_it_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[], None], code: int
) -> None:
    monkeypatch.setattr(watchdog, "_LAST_RESORT", 0.3)
    found, said = hang(tmp_path, save=save)
    assert found == code
    assert ("0.3 s" in said) == (code == 75)


def test_a_save_that_fails_is_reported(tmp_path: Path) -> None:
    def fails() -> NoReturn:
        raise OSError("no space for it")

    code, said = hang(tmp_path, save=fails)
    assert code == 75
    assert "no space for it" in said


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    assert hang(tmp_path, save=saved.touch, file=tmp_path / "no/such/folder")[0] == 75
    assert saved.exists()


def test_workers_say_where_they_are(tmp_path: Path) -> None:
    def where_the_worker_hangs(ready: object) -> None:
        _start_worker(None, 0)
        ready.set()  # type: ignore[attr-defined]
        time.sleep(2)  # it outlives its parent

    def work() -> None:
        ready = FORK.Event()
        FORK.Process(target=where_the_worker_hangs, args=(ready,), daemon=True).start()
        assert ready.wait(LONG)
        with guard(0.2, save=lambda: time.sleep(0.5)):
            where_the_training_hangs()

    code, said = Child(tmp_path, work).end()
    assert code == 75
    assert "in where_the_worker_hangs" in said


class TestSignals:
    """One that waits in C++, where Python runs no signal handler, for data or for another rank."""

    @staticmethod
    def end_by_signal(
        folder: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[Watchdog], object]
    ) -> tuple[int | None, str]:
        monkeypatch.setattr(watchdog, "_SIGNAL_SECONDS", 0.4)

        def guarded() -> None:
            with (
                StopSignals() as signals,
                Watchdog(
                    LONG,
                    name="rank 1",
                    file=None,
                    save=(folder / "saved").touch,
                    signal_received=signals.arrived,
                ) as dog,
            ):
                (folder / "ready").touch()
                work(dog)

        child = Child(folder, guarded)
        while not (folder / "ready").exists():
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGTERM)
        return child.end()

    def test_one_that_waits_saves_and_ends(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def wait_in_c(dog: Watchdog) -> None:
            dog.beat("waiting for another rank")
            mutex = ctypes.create_string_buffer(64)  # zeros: PTHREAD_MUTEX_INITIALIZER
            for _ in range(2):  # the second time for ever; unlike in read(), no signal ends it
                ctypes.CDLL(None).pthread_mutex_lock(mutex)

        code, said = self.end_by_signal(tmp_path, monkeypatch, wait_in_c)
        assert code == 128 + signal.SIGTERM
        assert (tmp_path / "saved").exists()
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert "rank 1" in errors[0]
        assert "SIGTERM" in errors[0]
        assert "waiting for another rank" in errors[0]

    def test_one_that_answers_may_save_for_long(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def answer(dog: Watchdog) -> None:
            time.sleep(0.1)
            dog.stopping()
            time.sleep(1.5)

        code, said = self.end_by_signal(tmp_path, monkeypatch, answer)
        assert code == 0
        assert "error" not in said

    def test_one_whose_steps_end_is_not_ended(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def steps(dog: Watchdog) -> None:
            for _ in range(15):
                time.sleep(0.1)
                dog.beat("evaluating")

        assert self.end_by_signal(tmp_path, monkeypatch, steps)[0] == 0


def test_weights_do_not_change_while_they_are_saved(tiny: Callable[..., TrainConfig]) -> None:
    """A rank that hung may wake up while the watchdog's thread copies them."""
    trainer = Trainer(tiny(kernel="reference"))
    backward, saving, changed = trainer.learner.backward, threading.Event(), []
    save = trainer.folder.save

    def slow_save(*_args: object, **_named: object) -> None:
        before = [weight.detach().clone() for weight in trainer.learner.model.parameters()]
        saving.set()
        time.sleep(1)  # in which the training would make some steps
        after = trainer.learner.model.parameters()
        changed.append(not all(map(torch.equal, before, after)))
        trainer.folder.save = save  # type: ignore[method-assign]
        trainer._updating.release()  # this process does not end

    def wake_up(*args: Any, **named: Any) -> Any:
        if trainer.step == 2 and not saving.is_set():
            trainer.folder.save = slow_save  # type: ignore[method-assign]
            threading.Thread(target=trainer._save_before_ending).start()
            assert saving.wait(LONG)
        return backward(*args, **named)

    trainer.learner.backward = wake_up
    trainer.fit()
    assert changed == [False]


class TestOff:
    def test_no_time_is_never(self) -> None:
        before = threading.active_count()
        with guard(0) as dog:
            assert threading.active_count() == before
            dog.beat("training")

    def test_nothing_is_left_after_the_context(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(watchdog, "_LAST_RESORT", 0.1)

        def work() -> None:
            before = threading.active_count()
            with guard(0.2) as dog:
                time.sleep(0.1)
                dog.beat("training")
            assert threading.active_count() == before
            time.sleep(0.8)  # longer than all of its times

        assert Child(tmp_path, work).end() == (0, "")
