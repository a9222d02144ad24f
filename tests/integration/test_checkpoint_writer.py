"""Checkpoints beside the training: a slow disk, a full one, a killed process."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expect import missing
from safetensors import safe_open
from safetensors.torch import load_file
from states import SIZE, save, state_of, step_in

from fastaug.errors import CheckpointError
from fastaug.runs import checkpoint_writer
from fastaug.runs.checkpoint import load_checkpoint, write_checkpoint
from fastaug.runs.checkpoint_writer import CheckpointWriter
from fastaug.runs.resume import newest_checkpoint

WRITTEN = "the checkpoint is written now"


def steps_in(folder: Path) -> list[int]:
    return sorted(step_in(path) for path in (folder / "checkpoints").glob("*.pt"))


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def forked(work: Callable[[Any], None]) -> tuple[multiprocessing.Process, Any]:
    """A process that goes on from here, without importing torch again, and what it says."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def run() -> None:
        ours.close()  # so that it ends if this process does
        work(theirs)

    process = fork.Process(target=run, daemon=True)
    process.start()
    theirs.close()
    return process, ours


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "RETRY_SECONDS", (0.02, 0.05))
    monkeypatch.setattr(checkpoint_writer, "PATIENCE_AT_THE_END", 0.3)


@pytest.fixture
def said() -> list[str]:
    return []


class SlowDisk:
    """Writes wait until they may; knows the steps that were written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.busy = threading.Event(), threading.Event()
        self.steps: list[int] = []

        def write(path: Path, state: dict[str, Any]) -> None:
            self.busy.set()
            assert self.free.wait(20)
            self.steps.append(state["step"])
            write_checkpoint(path, state)

        monkeypatch.setattr(checkpoint_writer, "write_checkpoint", write)


@pytest.fixture
def writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> tuple[SlowDisk, CheckpointWriter]:
    """A saver in the midst of writing step 1, until its disk is free."""
    disk = SlowDisk(monkeypatch)
    writer = CheckpointWriter(tmp_path, keep=9, say=said.append)
    writer.save(state_of(1))
    assert disk.busy.wait(20)
    return disk, writer


class TestBesideTheTraining:
    def test_what_is_saved_is_what_was_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
    ) -> None:
        disk = SlowDisk(monkeypatch)
        state = state_of(1)
        state["optimizer"] = {"state": {0: {"momentum": torch.ones(3)}}}
        state["optimizer"]["param_groups"] = [{"lr": 1.0, "params": [0]}]
        writer = CheckpointWriter(tmp_path, keep=2, say=said.append)
        writer.save(state)
        assert disk.busy.wait(20)
        assert not list(tmp_path.glob("*.pt"))  # the training goes on before it is there
        state["step"] = 2
        state["model"]["head.bias"] += 1
        state["optimizer"]["state"][0]["momentum"].zero_()
        state["optimizer"]["param_groups"][0]["lr"] = 0.1
        disk.free.set()
        writer.close()
        assert step_in(tmp_path / "last.pt") == 1
        kept = load_checkpoint(tmp_path / "last.pt")["optimizer"]
        assert kept["state"][0]["momentum"].tolist() == [1, 1, 1]
        assert kept["param_groups"] == [{"lr": 1.0, "params": [0]}]
        assert said == []

    def test_the_newest_of_those_that_wait_is_written(
        self, tmp_path: Path, writing: tuple[SlowDisk, CheckpointWriter]
    ) -> None:
        disk, writer = writing
        for step in (2, 3, 4):
            writer.save(state_of(step))
        disk.free.set()
        writer.close()
        assert disk.steps == [1, 4]
        assert step_in(tmp_path / "last.pt") == 4

    def test_the_best_is_not_dropped_for_a_newer_one(
        self, tmp_path: Path, writing: tuple[SlowDisk, CheckpointWriter]
    ) -> None:
        disk, writer = writing
        assert not writer.has_best
        writer.save(state_of(2), best=True)
        assert writer.has_best
        writer.save(state_of(3))
        disk.free.set()
        writer.close()
        assert writer.has_best
        assert step_in(tmp_path / "best.pt") == 2
        assert step_in(tmp_path / "last.pt") == 3

    def test_close_waits(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
    ) -> None:
        disk = SlowDisk(monkeypatch)
        writer = CheckpointWriter(tmp_path, keep=1, say=said.append)
        writer.save(state_of(1))
        closing = threading.Thread(target=writer.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        disk.free.set()
        closing.join(20)
        assert step_in(tmp_path / "last.pt") == 1
        writer.close()  # once more is once


class TestFiles:
    def test_the_newest_are_kept(self, tmp_path: Path, said: list[str]) -> None:
        save(tmp_path, 1, 2, 9, 10, 11, say=said.append)
        assert steps_in(tmp_path) == [10, 11]
        assert step_in(tmp_path / "last.pt") == 11
        newest = tmp_path / "checkpoints/step-000000011.pt"
        assert newest.samefile(tmp_path / "last.pt")  # one file on the disk, not two
        assert not (tmp_path / "best.pt").exists()

    def test_a_later_step_of_before_takes_no_place(self, tmp_path: Path, said: list[str]) -> None:
        """As after going on from an older checkpoint in the same folder."""
        save(tmp_path, 90, 10, 20, 30, say=said.append)
        assert steps_in(tmp_path) == [20, 30, 90]

    def test_the_best_for_others(self, tmp_path: Path, said: list[str]) -> None:
        save(tmp_path, 3, say=said.append, best=3)
        assert step_in(tmp_path / "best.pt") == 3
        weights = load_file(tmp_path / "best.safetensors")
        assert weights.keys() == state_of(3)["model"].keys()
        assert all((weight == 3).all() for weight in weights.values())
        with safe_open(tmp_path / "best.safetensors", framework="pt") as file:
            assert json.loads(file.metadata()["classes"]) == ["cat", "dog"]

    def test_a_file_system_without_links(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
    ) -> None:
        def link(*_names: Path) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", link)
        save(tmp_path, 3, say=said.append)
        assert said == []
        assert step_in(tmp_path / "last.pt") == 3
        newest = tmp_path / "checkpoints/step-000000003.pt"
        assert not newest.samefile(tmp_path / "last.pt")
        assert {path.name for path in tmp_path.iterdir()} == {"last.pt", "checkpoints"}

    @pytest.mark.parametrize("links", [True, False])
    def test_nothing_has_its_name_before_it_is_on_the_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str], links: bool
    ) -> None:
        """At a rename, the file's data has been synced; after it, the folder is."""
        synced: set[int] = set()
        renamed: list[tuple[str, bool]] = []
        open_folders: set[Path] = set()
        fsync, replace = os.fsync, os.replace

        def spy_fsync(descriptor: int) -> None:
            fsync(descriptor)
            synced.add(os.fstat(descriptor).st_ino)
            open_folders.discard(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

        def spy_replace(old: Path, new: Path) -> None:
            renamed.append((new.name, old.stat().st_ino in synced))
            replace(old, new)
            open_folders.add(new.parent)

        monkeypatch.setattr(os, "fsync", spy_fsync)
        monkeypatch.setattr(os, "replace", spy_replace)
        if not links:
            monkeypatch.setattr(os, "link", lambda *_names: os.stat("/no/such/file"))
        save(tmp_path, 3, say=said.append, best=3)
        # last.pt knows of the evaluation that made it the best, and so comes after best.pt.
        names = ("best.pt", "best.safetensors", "step-000000003.pt", "last.pt")
        assert renamed == [(name, True) for name in names]
        assert open_folders == set()

    def test_what_a_killed_process_left(self, tmp_path: Path, said: list[str]) -> None:
        (tmp_path / "checkpoints").mkdir()
        halves = [tmp_path / ".last.pt.77.tmp", tmp_path / "checkpoints/.step-000000001.pt.77.tmp"]
        for half in halves:
            half.touch()
        CheckpointWriter(tmp_path, keep=2, say=said.append).close()
        assert not any(half.exists() for half in halves)


class TestADiskThatFails:
    def test_a_limit_on_the_size_of_files(self, tmp_path: Path) -> None:
        """A real one: what is there stays, the training goes on, and all is written later."""

        def work(parent: Any) -> None:
            said: list[str] = []
            writer = CheckpointWriter(tmp_path, keep=5, say=said.append)
            writer.save(state_of(1), best=True)
            wait_until(lambda: (tmp_path / "last.pt").exists())  # what is written last
            resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, resource.RLIM_INFINITY))
            for step in (2, 3):
                started = time.monotonic()
                writer.save(state_of(step), best=True)
                parent.send(time.monotonic() - started)
                time.sleep(0.2)
            parent.send(list(said))
            parent.recv()
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
            wait_until(lambda: len(said) == 2)
            writer.close()
            parent.send(said)

        process, child = forked(work)
        assert max(child.recv(), child.recv()) < 1
        (warning,) = child.recv()
        assert missing(warning, f"warning: {tmp_path} large") == []
        assert steps_in(tmp_path) == [1]
        assert step_in(tmp_path / "last.pt") == step_in(tmp_path / "best.pt") == 1
        child.send("the limit is gone")
        first, done = child.recv()
        assert first == warning
        assert done == WRITTEN
        process.join()
        assert process.exitcode == 0
        assert steps_in(tmp_path) == [1, 3]
        assert step_in(tmp_path / "last.pt") == step_in(tmp_path / "best.pt") == 3
        assert not list(tmp_path.rglob("*.tmp"))

    def test_a_file_in_the_place_of_the_folder(self, tmp_path: Path, said: list[str]) -> None:
        (tmp_path / "checkpoints").touch()
        writer = CheckpointWriter(tmp_path, keep=2, say=said.append)
        writer.save(state_of(1))
        wait_until(lambda: said)
        (tmp_path / "checkpoints").unlink()
        wait_until(lambda: len(said) == 2)
        writer.close()
        assert "(File exists)" in said[0]
        assert said[1:] == [WRITTEN]
        assert step_in(tmp_path / "last.pt") == 1

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
    def test_it_is_tried_again_and_said_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str], number: int
    ) -> None:
        tries = []

        def write(path: Path, state: dict[str, Any]) -> None:
            tries.append(state["step"])
            if len(tries) % 4:
                raise OSError(number, os.strerror(number))
            write_checkpoint(path, state)

        monkeypatch.setattr(checkpoint_writer, "write_checkpoint", write)
        monkeypatch.setattr(checkpoint_writer, "PATIENCE_AT_THE_END", 20)
        for outage in (1, 2):
            save(tmp_path, outage, say=said.append)
            assert [line.split(":")[0] for line in said] == [*("warning", WRITTEN)] * outage
            assert os.strerror(number) in said[-2]
        assert tries == [1] * 4 + [2] * 4
        assert step_in(tmp_path / "last.pt") == 2

    def test_no_link_and_no_space_for_a_copy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
    ) -> None:
        def full(*_names: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "link", full)
        monkeypatch.setattr("shutil.copyfile", full)
        writer = CheckpointWriter(tmp_path, keep=2, say=said.append)
        writer.save(state_of(1))
        with pytest.raises(CheckpointError):
            writer.close()
        assert not list(tmp_path.glob("*.tmp"))  # nothing that takes space besides
        assert newest_checkpoint(tmp_path, said.append) is not None

    @pytest.mark.parametrize("earlier", [True, False], ids=["one before", "none before"])
    @pytest.mark.parametrize("when", ["during the run", "at its end"])
    def test_one_that_stays_full_is_an_error_at_the_end(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        said: list[str],
        when: str,
        earlier: bool,
    ) -> None:
        if earlier:
            save(tmp_path, 1, say=said.append)
        go_on = threading.Event()

        def full(_path: Path, _state: dict[str, Any]) -> None:
            assert go_on.wait(60)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(checkpoint_writer, "write_checkpoint", full)
        writer = CheckpointWriter(tmp_path, keep=2, say=said.append)
        writer.save(state_of(2))
        if when == "during the run":
            go_on.set()
            wait_until(lambda: said)
        else:
            threading.Timer(0.2, go_on.set).start()
        started = time.monotonic()
        with pytest.raises(CheckpointError) as caught:
            writer.close()
        assert 0.3 <= time.monotonic() - started < 3
        message = str(caught.value)
        assert missing(message, f"{tmp_path} space") == []
        assert ("--resume" in message) == earlier
        assert (tmp_path / "last.pt").exists() == earlier
        # That it takes a while is reported once.
        seconds = f"for up to {checkpoint_writer.PATIENCE_AT_THE_END:g} s more"
        assert [seconds in line for line in said] == [False, True][-len(said) :]
        assert len(said) == (2 if when == "during the run" else 1)

    def test_an_error_of_any_kind_does_not_end_the_thread(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
    ) -> None:
        def broken(_path: Path, _state: dict[str, Any]) -> None:
            monkeypatch.setattr(checkpoint_writer, "write_checkpoint", write_checkpoint)
            raise ValueError("what no one thought of")

        monkeypatch.setattr(checkpoint_writer, "write_checkpoint", broken)
        save(tmp_path, 1, say=said.append)
        assert "(what no one thought of)" in said[0]
        assert step_in(tmp_path / "last.pt") == 1


def test_a_process_killed_at_any_moment_leaves_what_it_had_written(tmp_path: Path) -> None:
    """Saved again and again, and killed after 0 to 60 ms of it. What close() promised is there."""
    rng = random.Random(0)
    found = promised = progress = 0

    def work(parent: Any) -> None:
        for first in itertools.count(found + 1, 3):
            writer = CheckpointWriter(tmp_path, keep=2, say=print)
            for step in range(first, first + 3):
                writer.save(state_of(step), best=step % 2 == 0)
            parent.send(0)
            writer.close()
            parent.send(first + 2)

    for _ in range(30):
        process, child = forked(work)
        child.recv()
        time.sleep(rng.uniform(0, 0.06))
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        try:
            while True:
                promised = max(promised, child.recv())
        except (EOFError, ConnectionResetError):
            child.close()
        said: list[str] = []
        newest = newest_checkpoint(tmp_path, said.append)
        assert said == []
        before, found = found, step_in(newest) if newest else 0
        assert found >= max(before, promised)
        progress += found > before
        if (tmp_path / "best.pt").exists():
            assert step_in(tmp_path / "best.pt") % 2 == 0
    assert progress > 2  # some kills came after a write: fewer on a busy machine
