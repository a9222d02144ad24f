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
    ranges.listen(cuda=True)
    try:
        with pytest.raises(KeyError), ranges.named("optimizer"), ranges.named("ema"):
            raise KeyError
    finally:
        ranges.stop_listening()
    with ranges.named("forward"):
        pass
    assert calls == ["optimizer", "ema", "pop", "pop"]


def test_a_worker_writes_its_ranges(tmp_path: Path) -> None:
    file = tmp_path / "spans"
    file.touch()
    before = time.perf_counter_ns()
    ranges.write_to(str(file))
    try:
        with pytest.raises(KeyError), ranges.named("wait for data"), ranges.named("decode"):
            raise KeyError
    finally:
        ranges.write_to(None)
    with ranges.named("forward"):
        pass
    inner, outer = ranges.read_spans(str(file))
    assert (inner.name, outer.name) == ("decode", "wait for data")
    assert inner.process == outer.process == os.getpid()
    times = [before, outer.start, inner.start, inner.end, outer.end, time.perf_counter_ns()]
    assert times == sorted(times)


def test_a_worker_that_starts_after_the_trace_was_written(tmp_path: Path) -> None:
    ranges.listen(cuda=False)
    ranges.write_to(str(tmp_path / "gone"))
    assert ranges.named("decode") is ranges.named("views")  # off, whatever it was forked with
    assert list(tmp_path.iterdir()) == []
