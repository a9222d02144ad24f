"""Accuracy of each class, and the classes that are confused most often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastaug.engine.metrics import Predictions
from fastaug.errors import few
from fastaug.runtime.distributed import Group

MOST_ROWS = 20
"""Classes in a table at most; of more, the WORST and the BEST are shown."""
WORST, BEST = 10, 5
MOST_CONFUSED = 5


class Confused(NamedTuple):
    """Images of a class that are taken for another."""

    label: int
    predicted: int
    images: int


@dataclass(frozen=True)
class PerClass:
    """Top-1 results of each class, over the images of all ranks."""

    classes: tuple[str, ...]
    confusion: dict[str, np.ndarray]
    """Metric (top1: of the central crop, tta_top1: of averaged probabilities) -> [n, 3]: label,
    predicted class, and number of images of the pairs that occur. For 20,000 classes, a matrix
    would take gigabytes."""

    @cached_property
    def images(self) -> np.ndarray:
        """[C]: images of each class."""
        labels, _, counts = self.confusion["top1"].T
        return self._by_class(labels, counts)

    def accuracy(self, metric: str) -> np.ndarray:
        """[C]: from 0 to 1; NaN for a class without images."""
        labels, predicted, counts = self.confusion[metric].T
        hits = self._by_class(labels, np.where(labels == predicted, counts, 0))
        return np.where(self.images > 0, hits / np.maximum(self.images, 1), np.nan)

    @property
    def balanced(self) -> dict[str, float]:
        """Metric -> balanced accuracy: the mean over the classes that have images."""
        return {metric: float(np.nanmean(self.accuracy(metric))) for metric in self.confusion}

    def most_confused(self) -> list[Confused]:
        """Wrong predictions of the central crop: the most frequent pairs of classes first."""
        pairs = [Confused(*row) for row in self.confusion["top1"].tolist()]
        wrong = [pair for pair in pairs if pair.label != pair.predicted]
        return sorted(wrong, key=lambda pair: (-pair.images, pair.label, pair.predicted))

    def as_json(self) -> dict[str, Any]:
        """All classes in their order, for the result file."""
        accuracies = {metric: self.accuracy(metric).tolist() for metric in self.confusion}
        classes = [
            {"class": name, "images": int(images)}
            | {metric: own[label] if images else None for metric, own in accuracies.items()}
            for label, (name, images) in enumerate(zip(self.classes, self.images, strict=True))
        ]
        confused = [
            {"class": self.classes[pair.label], "predicted": self.classes[pair.predicted]}
            | {"images": pair.images}
            for pair in self.most_confused()
        ]
        return {"balanced": self.balanced, "classes": classes, "confused": confused}

    def table(self, views: int, out: Path | None) -> tuple[str, list[tuple[str, str]]]:
        """Title and rows of a table, the worst class first.

        views: of the test-time augmentation; out: the result file, which has all classes.
        """
        title = f"top-1 by class: central crop{f' / {views} views' if views else ''}"
        others = f"in {out}" if out else "--out FILE.json writes all of them"
        accuracies = [self.accuracy(metric) for metric in self.confusion]
        # The worst central crop first; of equals, the class with more images.
        order = np.lexsort((-self.images, accuracies[0]))
        listed = [label for label in order.tolist() if self.images[label]]
        rows = [(self.classes[label], self._text(label, accuracies)) for label in listed]
        if (left_out := len(rows) - WORST - BEST) > MOST_ROWS - WORST - BEST:
            rows[WORST:-BEST] = [("...", f"{left_out:,} more classes: {others}")]
        rows.insert(0, ("mean over classes", percentages([*self.balanced.values()])))
        if missing := [name for name, n in zip(self.classes, self.images, strict=True) if not n]:
            rows.append(("no test images", few(missing, 5)))
        if confused := self.most_confused():
            texts = [self._confused_text(pair) for pair in confused[:MOST_CONFUSED]]
            rows.append(("most confused", "\n".join(texts)))
        return title, rows

    def _text(self, label: int, accuracies: Sequence[np.ndarray]) -> str:
        shares = percentages([own[label] for own in accuracies])
        return f"{shares} of {self.images[label]:,} images"

    def _confused_text(self, pair: Confused) -> str:
        named = f"{self.classes[pair.label]} as {self.classes[pair.predicted]}"
        return f"{named}: {pair.images:,} of {self.images[pair.label]:,} images"

    def _by_class(self, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """[n] labels with counts -> [C]."""
        totals = np.zeros(len(self.classes), np.int64)
        np.add.at(totals, labels, counts)
        return totals


def percentages(shares: Sequence[float]) -> str:
    """[0.5, 0.625] -> 50.0% / 62.5%."""
    return " / ".join(f"{100 * share:.1f}%" for share in shares)


class PredictedClasses:
    """Collects labels and predicted classes during an evaluation, on the device."""

    def __init__(self, classes: tuple[str, ...], views: int) -> None:
        """views: of the test-time augmentation; 0: central crops only."""
        self._classes = classes
        metrics = ("top1", "tta_top1") if views else ("top1",)
        self._batches: dict[str, list[Tensor]] = {metric: [] for metric in metrics}

    def add(self, predictions: Predictions, views: int) -> None:
        """views: of the pass; 0: over the central crops."""
        scores = predictions.probabilities.mean(1) if views else predictions.logits[:, 0]
        # topk, not argmax: equal scores are resolved as in the metrics.
        predicted = scores.topk(1).indices[:, 0]
        pairs = torch.stack([predictions.labels, predicted], 1)
        self._batches["tta_top1" if views else "top1"].append(pairs)

    def gather(self, group: Group) -> PerClass:
        """Results over the images of all ranks, on every rank."""
        own = {metric: _counted(batches) for metric, batches in self._batches.items()}
        ranks = group.gather(own)
        confusion = {metric: np.concatenate([one[metric] for one in ranks]) for metric in own}
        return PerClass(self._classes, {m: _merged(rows) for m, rows in confusion.items()})


def _counted(batches: Sequence[Tensor]) -> np.ndarray:
    """Batches of (label, predicted class) [B, 2] -> [n, 3]: each pair once, with its number."""
    if not batches:  # a rank without images
        return np.zeros((0, 3), np.int64)
    pairs, counts = torch.cat(list(batches)).cpu().unique(dim=0, return_counts=True)
    return torch.cat([pairs, counts[:, None]], 1).numpy()


def _merged(rows: np.ndarray) -> np.ndarray:
    """Counted pairs of several ranks [n, 3] -> each pair once, with the sum of its counts."""
    pairs, places = np.unique(rows[:, :2], axis=0, return_inverse=True)
    counts = np.zeros(len(pairs), np.int64)
    np.add.at(counts, places.reshape(-1), rows[:, 2])
    return np.column_stack([pairs, counts])
