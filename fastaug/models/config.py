"""Settings of the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastaug.errors import ConfigError
from fastaug.settings import Settings, setting


@dataclass(frozen=True)
class ModelConfig(Settings):
    """The network."""

    model: str = "wrn-10-1"
    """wrn-DEPTH-WIDTH, nf_resnet26, nf_resnet50, nf_resnet101, nfnet_f0, resnet18, resnet18-N (with
    N channels in its first stage in place of 64), or timm/NAME."""
    weights: str = ""
    """Weights to start from: a .safetensors file, a state dict of torch (.pt, .pth, .bin, .ckpt),
    or a fastaug checkpoint or run folder. A head for other classes is replaced. A resumed run does
    not read them again."""
    pretrained: bool = False
    """Start from timm's own weights of --model (timm/NAME or nfnet_f0), downloaded or from the
    Hugging Face cache."""
    dropout: float = setting(0.0, at_least=0, below=1)
    """Dropout rate before the last layer (nf_resnet, nfnet and timm models)."""
    stochastic_depth: float = setting(0.0, at_least=0, below=1)
    """Stochastic depth rate of the deepest block (nf_resnet, nfnet and timm models)."""
    batch_norm: Literal["local", "sync"] = "local"
    """Batch-norm statistics with several ranks. local: over each rank's part of a step; sync: over
    all ranks (resnet18), which waits for the other ranks in every layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights and self.pretrained:
            raise ConfigError(
                f"--weights {self.weights} cannot be combined with --pretrained; use one of them"
            )
