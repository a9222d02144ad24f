"""The cache folder: full, deleted, shared by processes, with what killed processes have left."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from expect import raises

from fastaug.data.array_cache import load_arrays, store_arrays, store_mapped
from fastaug.errors import KernelUnavailableError
from fastaug.runtime import cache
from fastaug.toolchain import build

FORK = multiprocessing.get_context("fork")
FULL = [errno.ENOSPC, errno.EDQUOT]


def write(path: Path) -> None:
    path.write_text("made")


class TestFull:
    """Writers that meet the error of a full disk; a real one is in stress/test_full_machine.py."""

    @pytest.fixture(params=FULL)
    def full(self, own_cache: Path, monkeypatch: pytest.MonkeyPatch, request) -> Path:
        """A cache in which every open file is full."""
        real = Path.open

        def failing(path: Path, mode: str = "r", *args, **options):  # type: ignore[no-untyped-def]
            if "w" in mode and path.is_relative_to(own_cache):
                raise OSError(request.param, os.strerror(request.param), str(path))
            return real(path, mode, *args, **options)

        monkeypatch.setattr(Path, "open", failing)
        return own_cache

    def test_kernels_are_made_elsewhere_with_one_warning(
        self, full: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "fastaug"):
            made = [build.built(name, write) for name in ("full-1", "full-2")]
        assert [file.read_text() for file in made] == ["made", "made"]
        assert not any(file.is_relative_to(full) for file in made)
        (message,) = caplog.messages
        assert str(full) in message
        assert "FASTAUG_CACHE" in message
        assert list((full / "kernels").iterdir()) == []

    def test_arrays_are_not_stored(self, full: Path, caplog: pytest.LogCaptureFixture) -> None:
        file = full / "indexes/a"
        with caplog.at_level(logging.WARNING, "fastaug"):
            assert not store_mapped(file, "it", {"a": np.arange(3)})
            store_arrays(file, a=np.arange(3))
        assert load_arrays(file) is None
        assert len(caplog.messages) == 1
        assert list(file.parent.iterdir()) == []

    @pytest.mark.parametrize("code", FULL)
    def test_it_fills_up_while_a_kernel_is_compiled(self, own_cache: Path, code: int) -> None:
        def make(path: Path) -> None:
            path.write_text("half")
            if path.is_relative_to(own_cache):
                raise OSError(code, os.strerror(code))
            write(path)

        made = build.built(f"fills-{code}", make)
        assert made.read_text() == "made"
        assert list((own_cache / "kernels").iterdir()) == []

    def test_a_full_temporary_folder_is_named(
        self, full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_path: Path) -> None:
            raise KernelUnavailableError("ld returned 1 exit status")

        monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(full / "temporary"))
        with raises(KernelUnavailableError, "TMPDIR"):
            build.built("no-room", fail)


def test_a_compile_error_is_raised_at_once(own_cache: Path) -> None:
    calls = []

    def fail(path: Path) -> None:
        calls.append(path)
        raise KernelUnavailableError("x.h:3: error: no such type")

    with raises(KernelUnavailableError, "no such type"):
        build.built("wrong", fail)
    assert len(calls) == 1


def test_a_cache_that_is_deleted_is_made_again(own_cache: Path) -> None:
    for _ in range(2):
        assert build.built("some", write).is_relative_to(own_cache)
        store_arrays(own_cache / "indexes/a", a=np.arange(3))
        assert load_arrays(own_cache / "indexes/a") is not None
        shutil.rmtree(own_cache)


def test_a_cache_that_is_deleted_by_the_time_a_kernel_is_made(own_cache: Path) -> None:
    def make(path: Path) -> None:
        shutil.rmtree(own_cache, ignore_errors=True)
        write(path)

    assert build.built("deleted", make).read_text() == "made"


class TestAbandoned:
    """Temporary files of other processes: `name` is made as that process would."""

    @staticmethod
    def temporary(folder: Path, namespace: str, pid: int, days: float = 0.0) -> Path:
        file = folder / f".kernel.so.0123456789abcdef.tmp.{namespace}-{pid}"
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text("half")
        then = time.time() - 86400 * days
        os.utime(file, (then, then))
        return file

    @staticmethod
    def ended_process() -> int:
        process = FORK.Process(target=int)
        process.start()
        process.join()
        assert process.pid is not None
        return process.pid

    def test_which_are_removed(self, own_cache: Path) -> None:
        here, elsewhere, ended = cache._pid_namespace(), "f" * 16, self.ended_process()
        folder = own_cache / "kernels"
        gone = [
            self.temporary(folder, here, ended),
            self.temporary(folder, elsewhere, ended, days=1.1),
        ]
        kept = [
            self.temporary(folder, here, os.getppid(), days=3),  # is running
            self.temporary(folder, elsewhere, 1, days=0.9),
            self.temporary(folder, elsewhere[:-1] + "e", ended),  # another machine may run it
        ]
        kept.append(folder / "finished.so")
        kept[-1].touch()
        build.built("next", write)
        assert not any(file.exists() for file in gone)
        assert all(file.exists() for file in kept)

    def test_a_link_is_not_followed(self, own_cache: Path, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "file").touch()
        name = f".set.0123.tmp.{cache._pid_namespace()}-{self.ended_process()}"
        own_cache.mkdir()
        (own_cache / name).symlink_to(outside)
        cache.remove_abandoned(own_cache)
        assert not (own_cache / name).is_symlink()
        assert (outside / "file").exists()

    @pytest.mark.parametrize("what", ["file", "folder"])
    def test_of_a_killed_process(self, own_cache: Path, what: str) -> None:
        def compile_forever(path: Path) -> None:
            path.write_text("half")
            time.sleep(600)

        def fill_forever() -> None:
            (cache.unfinished_folder(own_cache / "set") / "picture.jpg").touch()
            time.sleep(600)

        work = {"file": lambda: build.built("killed", compile_forever), "folder": fill_forever}
        process = FORK.Process(target=work[what])
        process.start()
        deadline = time.monotonic() + 30
        while not list(own_cache.rglob(".*.tmp*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        process.kill()
        process.join()
        assert list(own_cache.rglob(".*.tmp*"))
        build.built("killed", write)
        cache.unfinished_folder(own_cache / "set").rmdir()
        assert list(own_cache.rglob(".*.tmp*")) == []


class TestOneAtATime:
    def test_processes_that_need_a_kernel_compile_it_once(self, own_cache: Path) -> None:
        own_cache.mkdir()

        def make(path: Path) -> None:
            (own_cache / f"compiled-by-{os.getpid()}").touch()
            time.sleep(0.2)
            write(path)

        processes = [FORK.Process(target=build.built, args=("shared", make)) for _ in range(6)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * 6
        assert len(list(own_cache.glob("compiled-by-*"))) == 1

    def test_a_suspended_process_is_not_waited_for(
        self, own_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cache, "WAIT_FOR_OTHERS", 0.2)

        def suspended(path: Path) -> None:
            os.kill(os.getpid(), signal.SIGSTOP)

        process = FORK.Process(target=build.built, args=("shared", suspended))
        process.start()
        assert process.pid is not None
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            assert build.built("shared", write).read_text() == "made"
        finally:
            process.kill()
            process.join()


def test_a_read_only_folder_and_one_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong: Callable[[Path], OSError | None] = cache.why_unwritable
    assert wrong(tmp_path) is None
    assert isinstance(wrong(tmp_path / "file/kernels"), NotADirectoryError)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
