"""Settings of the optimizer and the evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastaug.errors import ConfigError
from fastaug.settings import Settings, flag, setting, typed
from fastaug.views.config import MOST_VIEWS

FUSED = ("sgd", "adam", "adamw")
"""Optimizers of which torch has a fused version for CPUs and GPUs."""
_TAKES_BETAS = ("adam", "adamw", "nadamw", "radam", "adamax", "adopt", "lamb", "lion", "muon")
_TAKES_NO_EPS = ("sgd", "sgdw", "lion", "apex")


@dataclass(frozen=True)
class OptimConfig(Settings):
    """The optimizer and its schedule."""

    batch_size: int = setting(32, at_least=1, at_most=2**24)
    """Views per optimizer step, over all ranks: batch-size / views unique images."""
    accumulate: int = setting(1, at_least=1, at_most=2**24)
    """Gradient accumulation: forward and backward passes per optimizer step."""
    epochs: int = setting(12, at_least=1, at_most=1_000_000)
    """Passes over the training images; the schedule spans all of them."""
    max_steps: int = setting(0, at_least=0, free_on_resume=True)
    """Stop after this many optimizer steps; the schedule still spans --epochs. 0: no limit."""
    lr: float = setting(0.04, at_least=0)
    """Peak learning rate, before --lr-scaling."""
    lr_scaling: Literal["none", "unique-images"] = "none"
    """unique-images: multiply --lr by the unique images per step, as for the paper's WRNs."""
    head_lr: float = setting(0.0, at_least=0)
    """Peak learning rate of the classifier, before --lr-scaling; 0: as --lr."""
    layer_decay: float = setting(1.0, at_least=0, at_most=1)
    """The learning rate is multiplied by this for each layer further from the classifier; 1:
    off."""
    schedule: Literal["halving", "cosine", "constant"] = "cosine"
    """Learning-rate schedule, after the warm-up. halving: constant for half of the steps, then
    halved ten times at equal distances."""
    warmup_epochs: float = setting(0.0, at_least=0)
    """Epochs in which the learning rate rises linearly from 0, with every schedule."""
    optimizer: Literal[
        "sgd",
        "sgdw",
        "adam",
        "adamw",
        "nadamw",
        "radam",
        "adamax",
        "adopt",
        "adafactor",
        "lamb",
        "lars",
        "lion",
        "muon",
        "rmsprop",
        "rmsproptf",
        "apex",
    ] = "sgd"
    """sgd: torch's fused SGD; apex: NVIDIA apex's FusedSGD (needs a GPU); the others are timm's.
    Give them an --lr of their own: the default is for SGD."""
    momentum: float = setting(0.9, at_least=0, below=1)
    """Momentum of sgd, sgdw, apex, lars, muon, rmsprop and rmsproptf."""
    nesterov: bool = False
    """Nesterov momentum in sgd, sgdw, apex, lars and muon."""
    betas: tuple[float, ...] = ()
    """The two betas (decay rates of the moment estimates) of adam, adamw, nadamw, radam, adamax,
    adopt, lamb, lion and muon; not given: the optimizer's own."""
    eps: float = setting(0.0, at_least=0)
    """Epsilon in the denominator of adaptive optimizers; 0: the optimizer's own."""
    weight_decay: float = setting(5e-4, at_least=0)
    """Weight decay; none on biases, gains, norms and SkipInit scalars. Decoupled from the gradient
    in adamw, nadamw, sgdw, lion, muon and adafactor: times the learning rate, subtracted from the
    weights. Added to the gradient in the others, and to the update in lamb."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: names of modules or parameters, a number of stages from the
    input (1: the stem; those of a ViT are its blocks), or backbone: all but the classifier."""
    clip_norm: float = setting(0.0, at_least=0)
    """Clip the gradient of a step to this L2 norm; 0: off."""
    clip_value: float = setting(0.0, at_least=0)
    """Clip each element of the gradient to this absolute value; 0: off."""
    agc: float = setting(0.0, at_least=0)
    """Adaptive gradient clipping, as for NFNets: clip the gradient of each unit (row or filter) to
    this times the norm of its weights, except in the classifier. Usual: 0.01. 0: off."""
    ema: float = setting(0.0, at_least=0, below=1)
    """Decay of the exponential moving average of the weights that is evaluated; 0: off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise ConfigError("--nesterov needs a --momentum above 0, got 0")
        if self.warmup_epochs >= self.epochs:
            raise ConfigError(
                f"--warmup-epochs must be below --epochs ({self.epochs}), got {self.warmup_epochs}"
            )
        if self.betas and (len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas)):
            raise ConfigError(
                f"--betas takes two numbers of at least 0 and below 1, got {typed(self.betas)}"
            )
        if self.betas and self.optimizer not in _TAKES_BETAS:
            raise ConfigError(
                f"--betas {typed(self.betas)}: --optimizer {self.optimizer} has none; omit it"
            )
        if self.eps and self.optimizer in _TAKES_NO_EPS:
            raise ConfigError(f"--eps {self.eps}: --optimizer {self.optimizer} has none; omit it")
        if self.head_lr and not self.lr:
            raise ConfigError(
                f"--head-lr {self.head_lr} needs an --lr above 0, got 0; to train only the "
                "classifier: --freeze backbone"
            )
        clipping = [n for n in ("clip_norm", "clip_value", "agc") if getattr(self, n)]
        if len(clipping) > 1:
            given = " and ".join(f"{flag(name)} {getattr(self, name)}" for name in clipping)
            raise ConfigError(f"only one kind of clipping, got {given}; set the others to 0")


@dataclass(frozen=True)
class EvalConfig(Settings):
    """Evaluation during and after training."""

    eval_every: int = setting(1, at_least=1, free_on_resume=True)
    """Evaluate every N epochs, and after the last one."""
    eval_views: int = setting(2, at_least=0, at_most=MOST_VIEWS, free_on_resume=True)
    """Views per test image in the evaluation after an epoch, for the invariance; 0: only the
    central crop."""
    tta: int = setting(8, at_least=0, at_most=MOST_VIEWS, free_on_resume=True)
    """Views per test image in the final evaluation (test-time augmentation), which also reports the
    accuracy over the first 1, 2, 4, ... of them; 0: only the central crop."""
