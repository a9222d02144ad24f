"""Run folders as a training leaves them, with measures that a test has made up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from fastaug.config import TrainConfig
from fastaug.experiments.results import find_results
from fastaug.experiments.selection import Selected, SelectOn, select_families
from fastaug.runs.lock import FolderLock

SCRIPT = "<script>document.title = 'caught'</script>"
SHAPES = TrainConfig.from_flat(
    recipe="shapes", model="wrn-10-1", data="/data/shapes", validation=0.1, epochs=4, views=1
)


def measures(top1: float, **changes: float) -> dict[str, float]:
    """The measures of an evaluation with 4 views, each off top1 by its own amount."""
    found = {"top1": top1, "top5": 0.9, "nll": 1.0, "invariance": 1 - top1}
    found |= {"tta_top1": top1 + 0.02, "tta_logits_top1": top1 + 0.01}
    return found | {f"tta_top1_at_{n}": top1 + 0.001 * n for n in (1, 2, 4)} | changes


def write_run(
    folder: Path,
    config: TrainConfig,
    measures: Mapping[str, float],
    validation: Mapping[str, float] | None = None,
    lines: Iterable[Mapping[str, Any]] = (),
) -> Path:
    """A finished run. lines: those of metrics.jsonl, which is not written without any."""
    folder.mkdir(parents=True)
    config = config.replace(out=str(folder))
    (folder / "config.json").write_text(json.dumps(config.to_flat()))
    timing = {"train_seconds": 60.0, "images_per_s": 400.0, "views_per_s": 1600.0}
    summary: dict[str, Any] = {
        "finished": True,
        "step": 100,
        "total_steps": 100,
        "skipped_steps": 0,
        "measures": dict(measures),
        "best_top1": measures["top1"],
        "parameters": 77_981,
        "timing": timing | {"wait_for_data": 0.1},
        "environment": {"python": "3.11.7", "torch": "2.14.1", "gpu": "none", "ranks": "1"},
    }
    if validation is not None:
        summary["validation"] = dict(validation)
    (folder / "summary.json").write_text(json.dumps(summary))
    if written := [json.dumps(line) for line in lines]:
        (folder / "metrics.jsonl").write_text("\n".join(written) + "\n")
    return folder


class RunWriter:
    """Writes runs into numbered folders, and selects from them."""

    def __init__(self, root: Path, base: TrainConfig) -> None:
        self.root, self.base, self.count = root, base, 0
        root.mkdir()

    def add(
        self,
        top1: float,
        *,
        held_out: float | None = None,
        changed: Mapping[str, float] | None = None,
        without: str = "",
        **settings: Any,
    ) -> Path:
        """changed: measures of other values; without: a prefix of measures that the run lacks."""
        found = measures(top1, **(changed or {}))
        found = {n: v for n, v in found.items() if not without or not n.startswith(without)}
        folder = self.root / f"run-{self.count}"
        self.count += 1
        validation = None if held_out is None else measures(held_out)
        return write_run(folder, self.base.replace(**settings), found, validation)

    def select(self, on: SelectOn = "auto") -> list[Selected]:
        return select_families(find_results([self.root]), on)

    def select_one(self) -> Selected:
        (selected,) = self.select()
        return selected


def metrics_lines(epochs: int, final: float) -> list[dict[str, Any]]:
    """Records of a run with 25 steps an epoch."""
    lines: list[dict[str, Any]] = []
    for epoch in range(1, epochs + 1):
        share, step = epoch / epochs, 25 * epoch
        terms = {"loss": 2 - share, "nll": 1.5 - share, "kl": share}
        timing = {"views_per_s": 1000.0 + step}
        lines.append({"kind": "train", "step": step, "epoch": epoch, **terms, "timing": timing})
        found = {"top1": share * final, "invariance": 0.5, "nll": 0.7}
        lines.append({"kind": "eval", "step": step, "epoch": epoch, **found})
    return lines


def write_unfinished(
    folder: Path, config: TrainConfig, lines: Iterable[Mapping[str, Any]] = ()
) -> Path:
    """A run without a summary.json: one that runs, or one that was interrupted."""
    write_run(folder, config, measures(0.5), None, lines)
    (folder / "summary.json").unlink()
    return folder


@contextmanager
def training_in(folder: Path) -> Iterator[None]:
    """A folder as it is while a process trains in it."""
    lock = FolderLock(folder, lambda text: None)
    try:
        yield
    finally:
        lock.release()


def write_sweep(top: Path) -> None:
    """A sweep of the paper's grid, a run of another family, and a stopped run, some with hostile
    names. Of K=4 with the regularizer, the larger rate is the better one by the held-out images and
    the worse one by the test images."""
    # (lr, seed) -> top-1 of the test images
    found = {(0.04, 0): 0.70, (0.04, 1): 0.73, (0.02, 0): 0.80, (0.02, 1): 0.82}
    for (lr, seed), top1 in found.items():
        config = SHAPES.replace(views=4, lr=lr, seed=seed, kl_weight=1.0)
        folder, held_out = top / f"k4-{lr}-{seed}", measures(0.75 if lr == 0.04 else 0.60)
        write_run(folder, config, measures(top1), held_out, metrics_lines(4, top1))
        Image.new("RGB", (2400, 300), "teal").save(folder / "views.png")
    write_run(top / "k1", SHAPES, measures(0.65), measures(0.64))
    for views in (2, 4):
        plain = SHAPES.replace(views=views, lr=0.04, kl_weight=0.0)
        write_run(top / f"k{views}-plain", plain, measures(0.6), measures(0.6))
    data = f"/data/{SCRIPT}".replace("</", "<")
    other = SHAPES.replace(model="wrn-16-4", recipe=SCRIPT, data=data)
    write_run(top / 'odd"<b>&amp;', other, measures(0.5), measures(0.5))
    write_unfinished(top / f"half-{SCRIPT}".replace("/", ""), SHAPES)
