"""Worker processes and /dev/shm: batches do not need it; a full one is named, and nothing hangs."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from collections.abc import Callable

import pytest
import torch
from expect import raises
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import fastaug
from fastaug.config import TrainConfig
from fastaug.data import torch_loader
from fastaug.errors import DataError
from fastaug.views.batch import ViewBatch

Tiny = Callable[..., TrainConfig]


def same(ours: list[ViewBatch], theirs: list[ViewBatch]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(one.views, other.views) and torch.equal(one.indices, other.indices)
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOENT, errno.EACCES])
def test_without_semaphores_there_are_no_workers(
    tiny: Tiny, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    expected = list(fastaug.build_loader(tiny(workers=0)))
    monkeypatch.setattr(type(multiprocessing.get_context("fork")), "Lock", fails)
    loader = fastaug.build_loader(tiny(workers=2))
    assert same(list(loader), expected)
    list(loader)
    (line,) = [m for m in caplog.messages if "/dev/shm" in m]
    assert os.strerror(code) in line
    assert "--shm-size" in line
    assert "\n" not in line


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_held_batches_come_through_a_pipe(
    tiny: Tiny, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller keeps all batches, so there are more of them than shared buffers."""
    config = tiny(workers=1, batch_size=4, precision=precision)
    expected = list(fastaug.build_loader(config.replace(workers=0)))
    received, receive = [], torch_loader._BatchMemory.received

    def record(*given: object) -> torch.Tensor:
        received.append(given)
        return receive(*given)

    monkeypatch.setattr(torch_loader._BatchMemory, "received", record)
    held = list(fastaug.build_loader(config))
    assert len(received) >= 10
    assert same(held, expected)


def test_a_worker_that_sigbus_kills(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))
    monkeypatch.setattr(
        torch_loader, "_start_worker", lambda *_: os.kill(os.getpid(), signal.SIGBUS)
    )
    with raises(DataError, "SIGBUS /dev/shm --shm-size --workers 0"):
        list(fastaug.build_loader(tiny(workers=1)))
    assert len([m for m in caplog.messages if "SIGBUS" in m]) == 1
