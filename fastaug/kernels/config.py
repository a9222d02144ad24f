"""Settings of the training loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastaug.settings import Settings, setting

Average = Literal["losses", "probs", "logits"]
"""What is averaged over the views of an image."""


@dataclass(frozen=True)
class LossConfig(Settings):
    """The loss over the views of an image, and the kernel that computes it."""

    average: Average = "losses"
    """What is averaged over the views of an image: losses, probabilities or logits."""
    kl_weight: float = setting(1.0, at_least=0)
    """Weight of the pairwise KL between the views of an image; 0: no regularizer."""
    label_smoothing: float = setting(0.0, at_least=0, below=1)
    """Share of the target probability that is spread evenly over all classes."""
    kernel: str = setting("auto", free_on_resume=True)
    """Loss kernel: auto, a registered name, or your own as package.module:attribute."""
