"""The learner: the network, its optimizer, and what one training step does to them."""

from __future__ import annotations

import hashlib
import inspect
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from fastaug.config import TrainConfig
from fastaug.engine.buffers import group_buffers
from fastaug.engine.clipping import Clipping
from fastaug.engine.guarded_step import GuardedStep
from fastaug.engine.optim import build_optimizer, load_optimizer
from fastaug.engine.optim_state import check_scaler_state
from fastaug.engine.parameter_groups import freeze
from fastaug.errors import ConfigError
from fastaug.kernels.objective import ObjectiveTerms, loss_terms
from fastaug.kernels.registry import resolve_kernel
from fastaug.models.build import build_configured_model
from fastaug.models.sync_norm import synchronize_batch_norm
from fastaug.runtime.device import autocast
from fastaug.runtime.distributed import Group
from fastaug.runtime.trace import trace_range
from fastaug.views.batch import ViewBatch
from fastaug.views.resizing import sizes_of_training


class Learner:
    """Views in, better weights out. It knows neither data nor epochs.

    After every step all ranks have the same weights and state. A step with a non-finite loss or
    gradient changes nothing but the fp16 loss scale. The device decides that by itself: a host sync
    after every step would leave it idle.
    """

    def __init__(
        self,
        config: TrainConfig,
        classes: int,
        device: torch.device,
        group: Group | None = None,
        initialize: Callable[[nn.Module], object] | None = None,
    ) -> None:
        """initialize: called with the new network, to load weights into it, on every rank."""
        self.config = config
        self.device = device
        self.group = group or Group()
        # One rank compiles for all.
        self.kernel = self.group.in_turn(
            lambda: resolve_kernel(
                config.loss.kernel,
                views=config.view.views,
                classes=classes,
                device=device,
                average=config.loss.average,
            )
        )
        sizes = sizes_of_training(config.view, config.optim.epochs)
        self.model = build_configured_model(
            config.model, classes, config.view.size, several_sizes=len(sizes) > 1
        )
        if initialize is not None:
            initialize(self.model)
        self.model.to(device)
        if config.model.batch_norm == "sync":
            synchronize_batch_norm(self.model, config.model.model, self.group)
        self.frozen = freeze(self.model, config.optim.freeze)
        self._ranks = _over_ranks(self.model, device, self.group) if self.group.ranks > 1 else None
        network = self._ranks or self.model
        mode = config.run.compile
        if config.run.compiles_to_graphs and self.group.ranks > 1:
            raise ConfigError(
                f"--compile {mode} needs a single rank, got {self.group.ranks}; use default"
            )
        self.network = network if mode == "off" else _compiled(network, mode, len(sizes))
        self.optimizer = build_optimizer(self.model, config.optim)
        self._step = GuardedStep(self.optimizer, device)
        self._clip = Clipping(self.model, config.optim)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.run.precision == "fp16")
        self.ema = AveragedModel(self.model, device, use_buffers=True) if config.optim.ema else None
        self._buffers = group_buffers(self.model.buffers())
        self._ema_buffers = group_buffers([] if self.ema is None else self.ema.module.buffers())
        self._in_step = False

    @property
    def evaluated_model(self) -> nn.Module:
        return self.model if self.ema is None else self.ema.module

    def start_step(self, step: int) -> None:
        """Call before the parts of a step: dropout is seeded by (seed, step, rank), so a resumed
        run draws the same numbers."""
        address = f"{self.config.run.seed} {step} {self.group.rank}".encode()
        seed = int.from_bytes(hashlib.sha256(address).digest()[:8], "little")
        # Only this device: torch.manual_seed visits every kind of accelerator, 1 ms each time.
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)
        for buffers in self._buffers:
            buffers.save()
        self._in_step = True

    def backward(
        self, batch: ViewBatch, share: float = 1.0, *, last: bool = True
    ) -> ObjectiveTerms:
        """Add the gradient of one part of a step, weighted by its share of the step.

        last: True for the last part of the step; only then do the ranks reduce their gradients.
        """
        config = self.config
        if config.run.compiles_to_graphs:
            # The outputs of the pass before may be overwritten: nothing holds them any more.
            torch.compiler.cudagraph_mark_step_begin()
        with nullcontext() if last or self._ranks is None else self._ranks.no_sync():
            with trace_range("forward"), autocast(self.device, config.run.precision):
                logits = self.network(batch.flat)
            with trace_range("objective"):
                terms = loss_terms(
                    self.kernel,
                    logits.float().unflatten(0, batch.views.shape[:2]),
                    batch.labels,
                    average=config.loss.average,
                    kl_weight=config.loss.kl_weight,
                    label_smoothing=config.loss.label_smoothing,
                )
            with trace_range("backward"):
                # A non-finite loss may have a finite gradient. NaN as its weight makes the gradient
                # NaN, and the sum over the ranks carries that to all of them.
                is_finite = terms.loss.detach().isfinite()
                self.scaler.scale(terms.loss * torch.where(is_finite, share, math.nan)).backward()
        return ObjectiveTerms(terms.loss.detach(), terms.nll, terms.kl)

    def update(self, rate: float | Tensor) -> Tensor:
        """Update the weights by the accumulated gradient, and clear it.

        Returns True if the step was skipped: [] bool on the device.
        """
        with trace_range("optimizer"):
            self._set_rate(rate)
            self.scaler.unscale_(self.optimizer)
            skip = self._has_nonfinite_gradient()
            self._clip()
            # Not scaler.step(), which reads the outcome on the host unless the optimizer is fused.
            self._step.take_unless(skip)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            self._settle_buffers(skip)
            if self.ema is not None:
                with trace_range("ema"):
                    self._move_average(self.ema, ~skip)
        return skip

    def _set_rate(self, rate: float | Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"] if "lr_scale" in group else rate

    def abandon_step(self) -> None:
        """Undo a step that was interrupted between start_step and update."""
        if self._in_step:
            for buffers in self._buffers:
                buffers.write(buffers.saved)
            self._in_step = False

    def _has_nonfinite_gradient(self) -> Tensor:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        # Sums of magnitudes, which overflow only near the largest float: on a CPU, maxima take
        # eight times as long, a twelfth of a step of wrn-10-2.
        return ~torch.stack(torch._foreach_norm(gradients, 1)).isfinite().all()

    def _settle_buffers(self, skip: Tensor) -> None:
        """Batch norm's running statistics: restored after a skipped step, else averaged over the
        ranks. They are linear in the batches, so the average is that of the whole batch."""
        for buffers in self._buffers:
            values = buffers.read()
            if self._in_step:
                values = torch.where(skip, buffers.saved, values)
            if values.is_floating_point():
                values = self.group.mean_(values)
            buffers.write(values)
        self._in_step = False

    @torch.no_grad()
    def _move_average(self, ema: AveragedModel, good: Tensor) -> None:
        """Move the average towards the weights and buffers; after the first step, onto them.
        torch's own update would need a host sync."""
        weight = good * torch.where(ema.n_averaged == 0, 1.0, 1 - self.config.optim.ema)
        ema.n_averaged += good
        averages = [*ema.module.parameters(), *ema.module.buffers()]
        values = [*self.model.parameters(), *self.model.buffers()]
        floats = [
            pair for pair in zip(averages, values, strict=True) if pair[0].is_floating_point()
        ]
        steps = torch._foreach_sub([new for _, new in floats], [old for old, _ in floats])
        torch._foreach_mul_(steps, weight)
        torch._foreach_add_([old for old, _ in floats], steps)
        for old, new in zip(self._ema_buffers, self._buffers, strict=True):
            if not new.saved.is_floating_point():  # batch norm's counts
                old.write(torch.where(good, new.read(), old.read()))

    def replicated_state(self) -> dict[str, list[Tensor]]:
        """The tensors on the device that are equal on all ranks after every step."""
        ema = [] if self.ema is None else [self.ema.module]
        kept = [value for own in self.optimizer.state.values() for value in own.values()]
        return {
            "the weights": [*self.model.parameters(), *self.model.buffers()],
            "their moving average": [t for m in ema for t in (*m.parameters(), *m.buffers())],
            "the optimizer's state": [
                value for value in kept if isinstance(value, Tensor) and value.device == self.device
            ],
        }

    def state_dict(self) -> dict[str, Any]:
        self._step.settle()
        return {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load from a state_dict, or from a checkpoint that contains one."""
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self._step.forget()
        load_optimizer(self.optimizer, state["optimizer"], state.get("step", math.inf))
        check_scaler_state(self.scaler, state["scaler"])
        self.scaler.load_state_dict(state["scaler"])


def _compiled(network: nn.Module, mode: str, sizes: int) -> Callable[[Tensor], Tensor]:
    """sizes: the number of sizes of the views. Each gets a program of its own: the second one that
    torch compiles by default would be for any size, which is slower."""
    if sizes == 1:
        return torch.compile(network, mode=mode)
    limit = torch._dynamo.config.recompile_limit  # beyond it, torch would not compile
    torch._dynamo.config.recompile_limit = max(limit, sizes)
    return torch.compile(network, mode=mode, dynamic=False)


def _over_ranks(model: nn.Module, device: torch.device, group: Group) -> DistributedDataParallel:
    """The model with gradients averaged over the ranks; the learner handles its buffers."""
    known = inspect.signature(DistributedDataParallel).parameters
    # Renamed in torch 2.14.
    buffers = next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in known)
    settings: dict[str, Any] = {"gradient_as_bucket_view": True, buffers: False}
    if device.type == "cuda":
        settings |= {"device_ids": [device.index], "process_group": group.gpus}
    elif group.ranks > 2:
        # Otherwise DDP rearranges its buckets after the first step of a process. gloo's order of
        # summation depends on the arrangement: the run would resume with other bits.
        settings["find_unused_parameters"] = True
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    return DistributedDataParallel(model, **settings)
