"""Run folders as a training leaves them, with measures that a test has made up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastaug.config import TrainConfig


def write_run(
    folder: Path,
    config: TrainConfig,
    measures: Mapping[str, float],
    validation: Mapping[str, float] | None = None,
    records: Iterable[Mapping[str, Any]] = (),
) -> Path:
    """A finished run. records: the lines of metrics.jsonl, which is not written without any."""
    folder.mkdir(parents=True)
    config = config.replace(out=str(folder))
    (folder / "config.json").write_text(json.dumps(config.to_flat()))
    summary: dict[str, Any] = {
        "finished": True,
        "step": 100,
        "total_steps": 100,
        "skipped_steps": 0,
        "measures": dict(measures),
        "best_top1": measures["top1"],
        "parameters": 77_981,
        "timing": {
            "train_seconds": 60.0,
            "images_per_s": 400.0,
            "views_per_s": 1600.0,
            "wait_for_data": 0.1,
        },
        "environment": {"python": "3.11.7", "torch": "2.14.1", "gpu": "none", "ranks": "1"},
    }
    if validation is not None:
        summary["validation"] = dict(validation)
    (folder / "summary.json").write_text(json.dumps(summary))
    if lines := [json.dumps(record) for record in records]:
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder
