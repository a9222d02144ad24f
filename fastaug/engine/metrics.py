"""Metrics of a run: means of the loss terms, and throughput."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastaug.runtime.distributed import Group


class Meter:
    """Means of the loss and its terms over the steps since they were last read.

    They are summed on the device, so that a step needs no host sync. Parts whose loss is no number
    do not count.
    """

    NAMES = ("loss", "nll", "kl")

    def __init__(self, device: torch.device) -> None:
        # The sums of the terms, and of the weights behind them.
        self._step, self._sums = torch.zeros(2, len(self.NAMES) + 1, device=device)

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
        """The means so far; nan if nothing counts. Waits for the device."""
        *sums, weight = self._sums.tolist()
        means = [value / weight if weight else math.nan for value in sums]
        return dict(zip(self.NAMES, means, strict=True))

    def read(self) -> dict[str, float]:
        """The means so far; then starts anew."""
        means = self.means()
        self._sums.zero_()
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums.copy_(state["sums"])


class Speedometer:
    """Images and views per second of training, without the evaluations between the epochs; and the
    share of the time, 0 to 1, that it waited for the loader."""

    def __init__(self, batch_size: int, views: int) -> None:
        self._batch_size, self._views = batch_size, views
        self._seconds = self._waited = 0.0
        self._steps = 0

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

    def _rates(self, steps: int, seconds: float, waited: float) -> dict[str, float]:
        views_per_s = steps * self._batch_size / seconds if seconds else 0.0
        return {
            "images_per_s": views_per_s / self._views,
            "views_per_s": views_per_s,
            "wait_for_data": waited / seconds if seconds else 0.0,
        }
