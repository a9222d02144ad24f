"""Named ranges: who hears them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from fastaug.runtime import trace as tracing


def test_ranges_on_a_gpu_are_nvtx_s_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in: there is no GPU here."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    tracing.start_tracing(cuda=True)
    try:
        with pytest.raises(KeyError), tracing.trace_range("optimizer"), tracing.trace_range("ema"):
            raise KeyError
    finally:
        tracing.stop_tracing()
    with tracing.trace_range("forward"):
        pass
    assert calls == ["optimizer", "ema", "pop", "pop"]


def test_a_worker_writes_its_ranges(tmp_path: Path) -> None:
    file = tmp_path / "spans"
    file.touch()
    before = time.perf_counter_ns()
    tracing.start_worker_tracing(str(file))
    try:
        with (
            pytest.raises(KeyError),
            tracing.trace_range("wait for data"),
            tracing.trace_range("decode"),
        ):
            raise KeyError
    finally:
        tracing.start_worker_tracing(None)
    with tracing.trace_range("forward"):
        pass
    inner, outer = tracing.read_worker_ranges(str(file))
    assert (inner.name, outer.name) == ("decode", "wait for data")
    assert inner.process == outer.process == os.getpid()
    times = [before, outer.start, inner.start, inner.end, outer.end, time.perf_counter_ns()]
    assert times == sorted(times)


def test_a_worker_that_starts_after_the_trace_was_written(tmp_path: Path) -> None:
    tracing.start_tracing(cuda=False)
    tracing.start_worker_tracing(str(tmp_path / "gone"))
    assert tracing.trace_range("decode") is tracing.trace_range(
        "views"
    )  # off, whatever it was forked with
    assert list(tmp_path.iterdir()) == []
