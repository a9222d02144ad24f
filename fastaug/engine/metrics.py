"""Metrics: what an evaluation measures, means of the training loss, and throughput."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fastaug.kernels.contract import Kernel
from fastaug.kernels.objective import ObjectiveTerms, image_kl
from fastaug.runtime.distributed import Group

# --- evaluation ---


class Predictions:
    """The network's outputs for a batch: logits [B, K, C] and labels [B]."""

    def __init__(self, logits: Tensor, labels: Tensor, kernel: Kernel) -> None:
        """kernel: for the pairwise KL, from resolve_kernel."""
        self.logits, self.labels, self.kernel = logits, labels, kernel

    @cached_property
    def probabilities(self) -> Tensor:
        """[B, K, C]."""
        return self.logits.softmax(-1)

    def top_k_hits(self, k: int, scores: Tensor) -> Tensor:
        """[B] bool: True if the label is among the k best of the scores [B, C]."""
        ranked = scores.topk(min(k, scores.shape[1])).indices == self.labels[:, None]
        return ranked.any(1)


@dataclass(frozen=True)
class Metric:
    """A metric of an evaluation: the mean over all images of what `compute` gives for each."""

    name: str
    """In metrics.jsonl and summary.json."""
    compute: Callable[[Predictions], Tensor]
    """-> [B]."""
    label: str = ""
    """In tables, with {views} for their number; metrics of one label share a row, and those
    without are not shown."""
    views: int = 0
    """Views of an image that it takes at least; 0: it is computed on the central crop."""
    unit: str = "percent"
    """percent: values from 0 to 1; else the text behind the value, which may be empty."""
    digits: int = 1

    def text(self, value: float) -> str:
        """A value as tables show it."""
        if self.unit == "percent":
            return f"{100 * value:.{self.digits}f}%"
        return f"{value:.{self.digits}f} {self.unit}".rstrip()


def _top_k(predictions: Predictions, k: int) -> Tensor:
    return predictions.top_k_hits(k, predictions.logits[:, 0])


def _nll(predictions: Predictions) -> Tensor:
    logits, labels = predictions.logits[:, 0], predictions.labels
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def _tta_top_k(predictions: Predictions, k: int, first: int | None = None) -> Tensor:
    """By the mean probability over the views, or over the first few of them.

    View k is the same however many there are: the first ones are those of a smaller --tta.
    """
    return predictions.top_k_hits(k, predictions.probabilities[:, :first].mean(1))


def _tta_logits_top_k(predictions: Predictions, k: int) -> Tensor:
    return predictions.top_k_hits(k, predictions.logits.mean(1))


def _invariance(predictions: Predictions) -> Tensor:
    """The mean pairwise KL between the views of an image."""
    return image_kl(predictions.kernel, predictions.logits)


_CENTRAL = "central crop, top-1 / top-5"
_PROBABILITIES, _LOGITS = "{views} views, averaged probabilities", "{views} views, averaged logits"
_KL = "invariance (pairwise KL of {views} views)"
METRICS = (
    Metric("top1", partial(_top_k, k=1), _CENTRAL),
    Metric("top5", partial(_top_k, k=5), _CENTRAL),
    Metric("nll", _nll, "central crop, nll", unit="nats", digits=3),
    Metric("tta_top1", partial(_tta_top_k, k=1), _PROBABILITIES, views=1),
    Metric("tta_top5", partial(_tta_top_k, k=5), _PROBABILITIES, views=1),
    Metric("tta_logits_top1", partial(_tta_logits_top_k, k=1), _LOGITS, views=1),
    Metric("tta_logits_top5", partial(_tta_logits_top_k, k=5), _LOGITS, views=1),
    Metric("invariance", _invariance, _KL, views=2, unit="nats", digits=4),
)
"""All metrics, in the order in which tables show them; metrics_for adds tta_top1_at_N."""


def metrics_for(views: int) -> tuple[Metric, ...]:
    """The metrics of a pass with this many views; 0: of the pass over the central crops.

    tta_top1_at_N is the accuracy over the first N = 1, 2, 4, ... views, for the paper's figure of
    the test-time multiplicity.
    """
    if views == 0:
        return tuple(metric for metric in METRICS if metric.views == 0)
    own = tuple(metric for metric in METRICS if 1 <= metric.views <= views)
    fewer = (
        Metric(f"tta_top1_at_{n}", partial(_tta_top_k, k=1, first=n), views=n)
        for n in powers_of_two(views)
    )
    return (*own, *fewer)


def is_percentage(name: str) -> bool:
    """True if a metric of this name is shown in percent."""
    units = {metric.name: metric.unit for metric in METRICS}
    return name.startswith("tta_top1_at_") or units.get(name) == "percent"


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to and including `most`."""
    return [1 << power for power in range(most.bit_length())]


def metric_rows(values: Mapping[str, float], views: int) -> list[tuple[str, str]]:
    """(label, text) of the metrics that there are values for, as rows of a table."""
    rows: dict[str, list[str]] = {}
    for metric in METRICS:
        if metric.label and metric.name in values:
            label = metric.label.format(views=views)
            rows.setdefault(label, []).append(metric.text(values[metric.name]))
    return [(label, " / ".join(texts)) for label, texts in rows.items()]


# --- training ---


class Meter:
    """Means of the loss and its terms over the steps since they were last read.

    They are summed on the device, so that a step needs no host sync. Parts with a non-finite loss
    do not count.
    """

    def __init__(self, device: torch.device) -> None:
        # The sums of the terms, and of the weights behind them.
        self._step, self._sums = torch.zeros(2, len(ObjectiveTerms._fields) + 1, device=device)

    def add(self, loss: Tensor, nll: Tensor, kl: Tensor, weight: float) -> None:
        """The terms of a part of a step, and its share of the step."""
        one = loss.new_ones((), dtype=torch.float32)
        terms = torch.stack([loss.detach().float(), nll.float().mean(), kl.float().mean(), one])
        self._step.add_(torch.where(loss.detach().isfinite(), terms, 0), alpha=weight)

    def end_step(self, group: Group) -> None:
        """All ranks have the sums of all of them after every step: any step can be the last."""
        self._sums.add_(group.mean_(self._step))
        self._step.zero_()

    def means(self) -> dict[str, float]:
        """The means so far; nan if there are none. Waits for the device."""
        *sums, weight = self._sums.tolist()
        means = [value / weight if weight else math.nan for value in sums]
        return dict(zip(ObjectiveTerms._fields, means, strict=True))

    def read(self) -> dict[str, float]:
        """The means so far; then start over."""
        means = self.means()
        self._sums.zero_()
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums.copy_(state["sums"])


class Speedometer:
    """Images and views per second of training, without the evaluations between the epochs, and the
    share of the time, 0 to 1, spent waiting for the loader.

    Its state is part of a checkpoint, so that the totals of a resumed run cover the whole run.
    """

    def __init__(self, batch_size: int, views: int) -> None:
        self._batch_size, self._views = batch_size, views
        self._seconds = self._waited = 0.0
        self._steps = 0
        self.start(0)

    def start(self, step: int) -> None:
        self._since, self._since_step = time.perf_counter(), step
        self._waited_since = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what the training waits for, between start and read."""
        started = time.perf_counter()
        yield
        self._waited_since += time.perf_counter() - started

    def read(self, step: int) -> dict[str, float]:
        """The rates since the last reading."""
        seconds, steps = time.perf_counter() - self._since, step - self._since_step
        waited = self._waited_since
        self._seconds += seconds
        self._waited += waited
        self._steps += steps
        self.start(step)
        return self._rates(steps, seconds, waited)

    def whole_run(self) -> dict[str, float]:
        rates = self._rates(self._steps, self._seconds, self._waited)
        return {"train_seconds": self._seconds, **rates}

    def state_dict(self, step: int) -> dict[str, Any]:
        """The totals at the end of a step, read or not."""
        return {
            "steps": self._steps + step - self._since_step,
            "seconds": self._seconds + time.perf_counter() - self._since,
            "waited": self._waited + self._waited_since,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps, self._seconds = state["steps"], state["seconds"]
        self._waited = state["waited"]

    def _rates(self, steps: int, seconds: float, waited: float) -> dict[str, float]:
        views_per_s = steps * self._batch_size / seconds if seconds else 0.0
        return {
            "images_per_s": views_per_s / self._views,
            "views_per_s": views_per_s,
            "wait_for_data": waited / seconds if seconds else 0.0,
        }
