"""benchmarks/view_pipelines.py: every form runs, on the same plans."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import view_pipelines
from image_sets import open_training_or_flat

from fastaug.data.scan import scan_and_check
from fastaug.diagnostics import photos
from fastaug.views.config import ViewConfig


@pytest.mark.parametrize("source", ["files", "memory"])
def test_all_forms_run(
    source: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photos, "PER_CLASS", {"train": 1, "val": 1})
    monkeypatch.setattr(photos, "SMALL_COUNTS", {"train": 40, "test": 4})
    data = folder if source == "files" else photos.cifar_like(tmp_path)
    crop = "resized" if source == "files" else "pad"
    images = scan_and_check(open_training_or_flat(str(data)))
    view = ViewConfig(views=2, size=32, crop=crop, augment="randaugment", randaugment_layers=2)
    with warnings.catch_warnings(record=True):  # DALI's, of its own deprecated names
        rates = view_pipelines.measure(images, view, threads=1, batches=1)
    assert list(rates) == ["fused", "wide", "copies", "stock"]
    assert all(rate > 0 for rate in rates.values())
