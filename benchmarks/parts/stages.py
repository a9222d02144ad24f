"""The stages of a training step, each as a call that can be timed by itself.

All work on one batch of --batch-size views and one network whose weights do not change (the
learning rate is 0), so that thousands of steps cannot make it diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.engine.learner import Learner
from fastaug.engine.loaders import build_loader
from fastaug.engine.metrics import Meter
from fastaug.kernels.objective import objective
from fastaug.runtime.device import autocast
from fastaug.views.batch import ViewBatch, view_dtype
from parts.loaders import ENDLESS, repeated
from parts.timing import Stream, check_memory

DECODE, LOADER = "decode", "loader"
FORWARD, BOTH, OPTIMIZER, BARE = "forward", "forward+backward", "optimizer", "bare step"
OBJECTIVE, SYNTHETIC, STEP = "objective", "step, synthetic views", "step"
ANY_K = (FORWARD, BOTH, OPTIMIZER, BARE)
"""Stages that do not depend on K."""
STAGES = (DECODE, LOADER, *ANY_K, OBJECTIVE, SYNTHETIC, STEP)

Call = Callable[[], object]


class Stages:
    """A network, and calls that are parts of its training step."""

    def __init__(self, config: TrainConfig, classes: int, device: torch.device) -> None:
        self._config, self._classes, self._device = config, classes, device
        torch.manual_seed(0)
        self._learner = Learner(config, classes, device)
        self._learner.model.train()
        self._meter = Meter(device)
        self._check_memory()

    def of_any_k(self) -> dict[str, Call]:
        """The stages that do not depend on K."""
        learner, flat = self._learner, self._synthetic(1).flat
        labels = torch.arange(len(flat), device=self._device) % self._classes
        upstream = torch.randn(len(flat), self._classes, device=self._device) / len(flat)
        parameters = [p for group in learner.optimizer.param_groups for p in group["params"]]
        gradients = [torch.full_like(p, 1e-4) for p in parameters]

        def forward() -> Tensor:
            with autocast(self._device, self._config.run.precision):
                return learner.network(flat).float()

        def forward_backward() -> None:
            forward().backward(upstream)
            learner.optimizer.zero_grad()

        def optimizer() -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            learner.update(rate=0.0)

        def bare() -> None:
            """A plain torch loop: no views, no regularizer, no fastaug."""
            F.cross_entropy(forward(), labels).backward()
            learner.optimizer.step()
            learner.optimizer.zero_grad()

        for group in learner.optimizer.param_groups:
            group["lr"] = 0.0
        return dict(zip(ANY_K, (forward, forward_backward, optimizer, bare), strict=True))

    def of_k(self, views: int) -> dict[str, Call]:
        """The stages that depend on K and need no loader."""
        batch, config = self._synthetic(views), self._config
        logits = torch.randn(*batch.views.shape[:2], self._classes, device=self._device)
        logits.requires_grad_()

        def loss_and_gradient() -> None:
            terms = objective(
                logits,
                batch.labels,
                average=config.loss.average,
                kl_weight=config.loss.kl_weight,
                kernel=config.loss.kernel,
            )
            logits.grad = None
            terms.loss.backward()

        return {OBJECTIVE: loss_and_gradient, SYNTHETIC: partial(self.step, batch)}

    def step(self, batch: ViewBatch) -> None:
        """The trainer's step."""
        terms = self._learner.backward(batch)
        self._meter.add(*terms, weight=1.0)
        self._learner.update(rate=0.0)

    def training(self, config: TrainConfig, images: ImageSet, ahead: int) -> Stream:
        """Steps with the real loader of a config."""
        loader = build_loader(config.replace(epochs=ENDLESS), repeated(images, config))

        def batches() -> Generator[ViewBatch]:
            while True:
                yield from loader

        return Stream(batches, ahead, self.step)

    def _synthetic(self, views: int) -> ViewBatch:
        """Random views as the loader returns them: on the device, channels last."""
        config = self._config
        images = config.optim.batch_size // views
        shape = (images, views, config.view.size, config.view.size, 3)
        drawn = torch.randn(shape, device=self._device).to(
            view_dtype(config.resolved_view.views_dtype)
        )
        labels = torch.arange(images, device=self._device) % self._classes
        return ViewBatch(drawn.permute(0, 1, 4, 2, 3), labels, torch.arange(images))

    def _check_memory(self) -> None:
        """On a CPU only: a GPU raises when its memory is full, Linux kills the process."""
        if self._device.type != "cpu":
            return
        sums = []
        for views in (1, 2):
            kept: list[int] = []

            def keep(tensor: Tensor, kept: list[int] = kept) -> Tensor:
                kept.append(tensor.nbytes)
                return tensor

            few = torch.zeros(views, 3, self._config.view.size, self._config.view.size)
            few = few.to(memory_format=torch.channels_last)
            arithmetic = autocast(self._device, self._config.run.precision)
            with saved_tensors_hooks(keep, lambda kept: kept), arithmetic:
                self._learner.model(few)
            sums.append(sum(kept))
        # The difference, because some tensors are kept once for any number of views.
        needed = (sums[1] - sums[0]) * self._config.optim.batch_size
        check_memory(needed, self._device, "a step keeps")
