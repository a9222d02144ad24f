"""The learner: the network and all that a step changes with it, and what a step does."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fastaug.batch import ViewBatch
from fastaug.config import TrainConfig
from fastaug.device import autocast
from fastaug.models import build_configured_model
from fastaug.objectives import ObjectiveTerms, objective
from fastaug.optim import build_optimiser
from fastaug.ranges import named


class Learner:
    """Views in, better weights out. It knows neither data nor epochs."""

    def __init__(self, config: TrainConfig, classes: int, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.model = build_configured_model(config, classes).to(device)
        self.network = torch.compile(self.model) if config.compile else self.model
        self.optimiser = build_optimiser(self.model, config)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self.ema = _moving_average(self.model, config.ema)

    @property
    def evaluated_model(self) -> nn.Module:
        return self.model if self.ema is None else self.ema.module

    def backward(self, batch: ViewBatch, share: float = 1.0) -> ObjectiveTerms:
        """Add the gradient of a part of a step, whose share of the step it is."""
        config = self.config
        with named("forward"), autocast(self.device, config.precision):
            logits = self.network(batch.flat)
        with named("objective"):
            terms = objective(
                logits.float().unflatten(0, batch.views.shape[:2]),
                batch.labels,
                average=config.average,
                kl_weight=config.kl_weight,
                label_smoothing=config.label_smoothing,
                kernel=config.kernel,
            )
        with named("backward"):
            self.scaler.scale(terms.loss * share).backward()
        return terms

    def update(self, rate: float) -> None:
        """Change the weights by the gradient so far, which is then gone."""
        with named("optimiser"):
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            self.scaler.step(self.optimiser)
            self.scaler.update()
            self.optimiser.zero_grad(set_to_none=True)
            if self.ema is not None:
                with named("ema"):
                    self.ema.update_parameters(self.model)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a state_dict, or from a checkpoint that holds one among others."""
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.scaler.load_state_dict(state["scaler"])


def _moving_average(model: nn.Module, decay: float) -> AveragedModel | None:
    if decay == 0:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
