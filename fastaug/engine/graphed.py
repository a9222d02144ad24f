"""--cuda-graph: a step as CUDA graphs, which the host launches in one call each.

A step of a small network is hundreds of kernels of a few microseconds, and the host takes longer to
launch them than the GPU to run them. A replayed graph has none of these launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastaug.config import TrainConfig
from fastaug.engine.learner import Learner
from fastaug.errors import ConfigError, first_line
from fastaug.kernels.objective import ObjectiveTerms
from fastaug.runtime.distributed import Group
from fastaug.runtime.trace import trace_range
from fastaug.views.batch import ViewBatch

WARM_UP = 3
"""Ordinary steps before the capture, in which torch and cuDNN choose algorithms and workspaces."""


class _Part(NamedTuple):
    graph: torch.cuda.CUDAGraph
    terms: ObjectiveTerms
    """Overwritten by each replay."""


class GraphedLearner(Learner):
    """A Learner that captures its step after the first few and replays it from then on; again when
    growing views have another size.

    Three graphs share their memory: the first part of a step, which makes the gradients; any
    further part (--accumulate), which adds to them; and the update. What changes from step to step
    is read from tensors at fixed addresses: the batch, the learning rate, the fp16 scale, the
    generator's seed. A non-finite step is skipped on the device as in any other step.
    """

    def __init__(
        self,
        config: TrainConfig,
        classes: int,
        device: torch.device,
        group: Group | None = None,
        initialize: Callable[[nn.Module], object] | None = None,
    ) -> None:
        if device.type != "cuda":
            raise ConfigError(f"--cuda-graph needs a GPU, got --device {device}; omit it")
        if group is not None and group.ranks > 1:
            raise ConfigError(
                f"--cuda-graph needs a single rank, got {group.ranks}; omit it, or use one GPU"
            )
        super().__init__(config, classes, device, group, initialize)
        for own in self.optimizer.param_groups:
            if "capturable" in own:  # adam and adamw
                own["capturable"] = True
        self._parts_done = 0
        self._rate = torch.zeros((), device=device)
        self._reset(None)

    def _reset(self, shape: torch.Size | None) -> None:
        """Start over with the warm-up. shape: of the views that are captured next."""
        self._shape = shape
        self._steps = 0
        self._pool: Any = None
        self._batch: ViewBatch | None = None
        self._parts: dict[bool, _Part] = {}
        """By whether it is the first one of a step."""
        self._update: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def start_step(self, step: int) -> None:
        super().start_step(step)
        self._parts_done = 0

    def backward(
        self, batch: ViewBatch, share: float = 1.0, *, last: bool = True
    ) -> ObjectiveTerms:
        if batch.views.shape != self._shape:  # growing views: only between two steps
            self._reset(batch.views.shape)
        is_first = self._parts_done == 0
        self._parts_done += 1
        if self._steps < WARM_UP:
            return super().backward(batch, share, last=last)
        static = self._load(batch)
        if is_first not in self._parts:
            graph = torch.cuda.CUDAGraph()
            with self._captured(graph):
                terms = super().backward(static, share, last=last)
            self._parts[is_first] = _Part(graph, terms)
        part = self._parts[is_first]
        with trace_range("backward"):
            part.graph.replay()
        return ObjectiveTerms(*(term.clone() for term in part.terms))

    def update(self, rate: float | Tensor) -> Tensor:
        if self._steps < WARM_UP:
            self._steps += 1
            return super().update(rate)
        self._rate.fill_(rate)
        if self._update is None:
            graph = torch.cuda.CUDAGraph()
            with self._captured(graph):
                skip = super().update(self._rate)
            self._update = graph, skip
        self._set_rate(rate)  # for checkpoints
        graph, skip = self._update
        with trace_range("optimizer"):
            graph.replay()
        self._in_step = False
        return skip.clone()

    @contextmanager
    def _captured(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        # thread_local: the loader's threads may allocate meanwhile.
        capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        try:
            with torch.cuda.device(self.device), capture:
                yield
        except RuntimeError as error:
            raise ConfigError(
                f"--cuda-graph: the step cannot be captured ({first_line(error)}); omit it"
            ) from error
        self._pool = graph.pool()

    def _load(self, batch: ViewBatch) -> ViewBatch:
        """The batch at the addresses that the graphs read."""
        if self._batch is None:
            self._batch = ViewBatch(
                torch.empty_like(batch.views), torch.empty_like(batch.labels), batch.indices
            )
        self._batch.views.copy_(batch.views, non_blocking=True)
        self._batch.labels.copy_(batch.labels, non_blocking=True)
        return self._batch
