"""Settings of the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastaug.settings import Settings, setting


@dataclass(frozen=True)
class ModelConfig(Settings):
    """The network."""

    model: str = "wrn-10-1"
    """wrn-DEPTH-WIDTH, nf_resnet26, nf_resnet50, nf_resnet101, nfnet_f0, resnet18, or timm/NAME."""
    dropout: float = setting(0.0, at_least=0, below=1)
    """Dropout rate before the last layer (nf_resnet, nfnet and timm models)."""
    stochastic_depth: float = setting(0.0, at_least=0, below=1)
    """Stochastic depth rate of the deepest block (nf_resnet, nfnet and timm models)."""
    batch_norm: Literal["local", "sync"] = "local"
    """Batch-norm statistics with several ranks. local: over each rank's part of a step; sync: over
    all ranks (resnet18), which waits for the other ranks in every layer."""
