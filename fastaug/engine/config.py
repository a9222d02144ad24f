"""Settings of the optimizer and the evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastaug.errors import ConfigError
from fastaug.settings import Settings, setting


@dataclass(frozen=True)
class OptimConfig(Settings):
    """The optimizer and its schedule."""

    batch_size: int = setting(32, at_least=1)
    """Views in an optimizer step, of all ranks together: batch-size / views unique images."""
    accumulate: int = setting(1, at_least=1)
    """Parts that an optimizer step is computed in, to save memory."""
    epochs: int = setting(12, at_least=1)
    """Passes over the training images; the schedule ends with the last one."""
    max_steps: int = setting(0, at_least=0, free_on_resume=True)
    """Stop after this many optimizer steps in all, schedule unchanged; 0: no limit."""
    lr: float = setting(0.04, at_least=0)
    """Learning rate, before --lr-scaling and --schedule."""
    lr_scaling: Literal["none", "unique-images"] = "none"
    """unique-images: multiply lr by the unique images in a step, as for the paper's WRNs."""
    schedule: Literal["halving", "cosine", "warmup-cosine"] = "cosine"
    """halving: constant for half of the steps, then halved ten times, evenly spaced."""
    warmup_epochs: float = setting(5.0, at_least=0)
    """Epochs of linear warm-up of the warmup-cosine schedule."""
    optimizer: Literal["sgd", "apex"] = "sgd"
    """sgd: torch's fused SGD; apex: NVIDIA apex's FusedSGD (needs a GPU)."""
    momentum: float = setting(0.9, at_least=0, below=1)
    """SGD momentum."""
    nesterov: bool = False
    """Nesterov momentum."""
    weight_decay: float = setting(5e-4, at_least=0)
    """Decay of the weights; gains, biases and SkipInit scalars have none."""
    ema: float = setting(0.0, at_least=0, below=1)
    """Decay of an exponential moving average of the weights, used in evaluation; 0: off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise ConfigError("--nesterov needs a --momentum above 0, got 0")
        if self.schedule == "warmup-cosine" and self.warmup_epochs >= self.epochs:
            raise ConfigError(
                f"--warmup-epochs must be below --epochs ({self.epochs}), got {self.warmup_epochs}"
            )


@dataclass(frozen=True)
class EvalConfig(Settings):
    """Evaluation during and after the training."""

    eval_every: int = setting(1, at_least=1, free_on_resume=True)
    """Epochs between two evaluations; the last epoch is always evaluated."""
    eval_views: int = setting(2, at_least=0, free_on_resume=True)
    """Views of each test image for the invariance after an epoch; 0: the central crop only."""
    tta: int = setting(8, at_least=0, free_on_resume=True)
    """Views of each test image in the final evaluation, which also reports the accuracy over the
    first 1, 2, 4, ... of them; 0: the central crop only."""
