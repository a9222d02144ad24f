"""One process at a time in a run folder, and what the next one finds there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from expect import missing, raises
from states import save, step_in

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError
from fastaug.runs import lock as folder_lock
from fastaug.runs.folder import RunFolder
from fastaug.runs.lock import FolderLock, wait_until_free
from fastaug.runs.resume import newest_checkpoint

Tiny = Callable[..., TrainConfig]


@pytest.fixture
def said() -> list[str]:
    return []


@contextmanager
def another_that_ends(folder: Path, at_the_end: Callable[[], None]) -> Iterator[None]:
    """Somebody else has the folder for half a second. The system keeps two opened folders apart,
    whichever process they are of."""
    lock = FolderLock(folder, print)

    def end() -> None:
        time.sleep(0.5)
        at_the_end()
        lock.release()

    thread = threading.Thread(target=end)
    thread.start()
    yield
    thread.join()


def test_one_at_a_time(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, tiny: Tiny
) -> None:
    monkeypatch.setattr(folder_lock, "PATIENCE", 0.5)
    run = RunFolder(tiny(out=str(tmp_path)), say=print).open()
    for begin in (
        lambda: FolderLock(tmp_path, said.append),
        lambda: wait_until_free(tmp_path, said.append),
        lambda: RunFolder(tiny(out=str(tmp_path)), say=said.append).open(),
        lambda: newest_checkpoint(tmp_path, said.append),
    ):
        said.clear()
        with raises(ConfigError, str(tmp_path)):
            begin()
        assert [missing(line, f"{tmp_path} 0.5") for line in said] == [[]]
    run.close()
    said.clear()
    lock = FolderLock(tmp_path, said.append)
    assert (lock.waited, said) == (False, [])
    lock.release()


def test_a_process_that_was_killed_holds_nothing(tmp_path: Path, said: list[str]) -> None:
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()

    def hold() -> None:
        FolderLock(tmp_path, print)
        ready.set()
        time.sleep(60)

    process = fork.Process(target=hold, daemon=True)
    process.start()
    assert ready.wait(60)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    wait_until_free(tmp_path, said.append)
    assert said == []


def test_a_run_that_ended_meanwhile_is_not_written_over(
    tmp_path: Path, said: list[str], tiny: Tiny
) -> None:
    """Two are started in one folder, which holds no checkpoint yet when the second one looks."""
    metrics = tmp_path / "metrics.jsonl"

    def finish() -> None:
        metrics.write_text("what the first one has measured\n")
        save(tmp_path, 8)

    with another_that_ends(tmp_path, finish):
        with raises(ConfigError, "--resume"):
            RunFolder(tiny(out=str(tmp_path)), say=said.append).open()
        assert len(said) == 1
    assert metrics.read_text() == "what the first one has measured\n"
    wait_until_free(tmp_path, pytest.fail)  # it holds what it may not have no longer


def test_the_last_checkpoint_is_that_of_the_one_before(tmp_path: Path, said: list[str]) -> None:
    """One that is being ended, and saves, while its successor starts."""
    save(tmp_path, 4)
    with another_that_ends(tmp_path, lambda: save(tmp_path, 8)):
        newest = newest_checkpoint(tmp_path, said.append)
        assert len(said) == 1
    assert newest is not None
    assert step_in(newest) == 8


def test_a_checkpoint_that_was_named_and_is_old_by_now(
    tmp_path: Path, said: list[str], tiny: Tiny
) -> None:
    save(tmp_path, 4)
    with (
        another_that_ends(tmp_path, lambda: save(tmp_path, 8)),
        raises(ConfigError, "8"),
    ):
        RunFolder(tiny(out=str(tmp_path)), say=said.append, resume_step=4).open()
    # Of a folder that nobody had, an older one may be chosen.
    RunFolder(tiny(out=str(tmp_path)), say=pytest.fail, resume_step=4).open().close()
