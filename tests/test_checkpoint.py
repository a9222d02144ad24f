from __future__ import annotations

import errno
import os
import pickle
import time
from pathlib import Path

import pytest
import torch

from fastaug import checkpoint
from fastaug.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from fastaug.errors import CheckpointError

STATE = {"config": {"views": 4}, "model": {"w": torch.arange(1000.0)}, "step": 7}


def test_round_trip(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "last.pt", STATE)
    state = load_checkpoint(tmp_path / "last.pt")
    assert state["step"] == 7
    assert torch.equal(state["model"]["w"], STATE["model"]["w"])
    assert os.listdir(tmp_path) == ["last.pt"]


@pytest.mark.parametrize("keep", [0, 10, 500, -1])
def test_half_a_checkpoint(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, STATE)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"last\.pt: damaged, or not a fastaug checkpoint"):
        load_checkpoint(path)


def test_a_missing_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no.pt"):
        with pytest.raises(CheckpointError, match="no checkpoint there"):
            load_checkpoint(path)


@pytest.mark.parametrize("content", [b"", b"text\n", b"PK\x03\x04", b"\x80\x02."], ids=repr)
def test_what_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "last.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"last\.pt: damaged, or not a fastaug checkpoint"):
        load_checkpoint(tmp_path / "last.pt")


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    proof = tmp_path / "executed"

    class Malice:
        def __reduce__(self):
            return (os.system, (f"touch {proof}",))

    torch.save({"format": 1, "config": Malice()}, tmp_path / "evil.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Malice()))
    for name in ("evil.pt", "plain.pt"):
        with pytest.raises(CheckpointError):
            load_checkpoint(tmp_path / name)
    assert not proof.exists()


def test_someone_else_s_file(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="a bare state_dict"):
        load_checkpoint(tmp_path / "x.pt")


def test_another_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "x.pt", STATE)
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    with pytest.raises(CheckpointError, match="format 1; this version of fastaug reads 2"):
        load_checkpoint(tmp_path / "x.pt")


def test_a_failed_write_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, STATE)
    before = path.read_bytes()

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"last\.pt: cannot be written \(No space left"):
        save_checkpoint(path, STATE | {"step": 8})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["last.pt"]


def test_what_resume_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("auto", "") is None
    assert find_checkpoint("auto", "elsewhere") is None
    for age, name in ((20, "b"), (10, "c"), (30, "a")):
        path = tmp_path / "runs" / name / "last.pt"
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    assert find_checkpoint("auto", "") == Path("runs/c/last.pt")
    assert find_checkpoint("auto", "runs/b") == Path("runs/b/last.pt")
    assert find_checkpoint("runs/a", "") == Path("runs/a/last.pt")
    assert find_checkpoint("runs/a/best.pt", "") == Path("runs/a/best.pt")
