"""Named ranges: who hears them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from fastaug.runtime import trace as ranges


def test_ranges_on_a_gpu_are_nvtx_s_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in: there is no GPU here."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    ranges.start_tracing(cuda=True)
    try:
        with pytest.raises(KeyError), ranges.trace_range("optimizer"), ranges.trace_range("ema"):
            raise KeyError
    finally:
        ranges.stop_tracing()
    with ranges.trace_range("forward"):
        pass
    assert calls == ["optimizer", "ema", "pop", "pop"]


def test_a_worker_writes_its_ranges(tmp_path: Path) -> None:
    file = tmp_path / "spans"
    file.touch()
    before = time.perf_counter_ns()
    ranges.start_worker_tracing(str(file))
    try:
        with (
            pytest.raises(KeyError),
            ranges.trace_range("wait for data"),
            ranges.trace_range("decode"),
        ):
            raise KeyError
    finally:
        ranges.start_worker_tracing(None)
    with ranges.trace_range("forward"):
        pass
    inner, outer = ranges.read_worker_ranges(str(file))
    assert (inner.name, outer.name) == ("decode", "wait for data")
    assert inner.process == outer.process == os.getpid()
    times = [before, outer.start, inner.start, inner.end, outer.end, time.perf_counter_ns()]
    assert times == sorted(times)


def test_a_worker_that_starts_after_the_trace_was_written(tmp_path: Path) -> None:
    ranges.start_tracing(cuda=False)
    ranges.start_worker_tracing(str(tmp_path / "gone"))
    assert ranges.trace_range("decode") is ranges.trace_range(
        "views"
    )  # off, whatever it was forked with
    assert list(tmp_path.iterdir()) == []
