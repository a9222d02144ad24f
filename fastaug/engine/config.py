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
    """Views per optimizer step, over all ranks: batch-size / views unique images."""
    accumulate: int = setting(1, at_least=1)
    """Gradient accumulation: forward and backward passes per optimizer step."""
    epochs: int = setting(12, at_least=1)
    """Passes over the training images; the schedule spans all of them."""
    max_steps: int = setting(0, at_least=0, free_on_resume=True)
    """Stop after this many optimizer steps; the schedule still spans --epochs. 0: no limit."""
    lr: float = setting(0.04, at_least=0)
    """Peak learning rate, before --lr-scaling."""
    lr_scaling: Literal["none", "unique-images"] = "none"
    """unique-images: multiply --lr by the unique images per step, as for the paper's WRNs."""
    schedule: Literal["halving", "cosine", "warmup-cosine"] = "cosine"
    """Learning-rate schedule. halving: constant for half of the steps, then halved ten times at
    equal distances; warmup-cosine: linear warm-up, then cosine."""
    warmup_epochs: float = setting(5.0, at_least=0)
    """Epochs of linear warm-up in the warmup-cosine schedule."""
    optimizer: Literal["sgd", "apex"] = "sgd"
    """sgd: torch's fused SGD; apex: NVIDIA apex's FusedSGD (needs a GPU)."""
    momentum: float = setting(0.9, at_least=0, below=1)
    """SGD momentum."""
    nesterov: bool = False
    """Nesterov momentum."""
    weight_decay: float = setting(5e-4, at_least=0)
    """Weight decay, added to the gradient; none on biases, gains, norms and SkipInit scalars."""
    clip_norm: float = setting(0.0, at_least=0)
    """Clip the gradient of a step to this L2 norm; 0: off."""
    ema: float = setting(0.0, at_least=0, below=1)
    """Decay of the exponential moving average of the weights that is evaluated; 0: off."""

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
    """Evaluation during and after training."""

    eval_every: int = setting(1, at_least=1, free_on_resume=True)
    """Evaluate every N epochs, and after the last one."""
    eval_views: int = setting(2, at_least=0, free_on_resume=True)
    """Views per test image in the evaluation after an epoch, for the invariance; 0: only the
    central crop."""
    tta: int = setting(8, at_least=0, free_on_resume=True)
    """Views per test image in the final evaluation (test-time augmentation), which also reports the
    accuracy over the first 1, 2, 4, ... of them; 0: only the central crop."""
