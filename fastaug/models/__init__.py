"""The networks: images [N, 3, H, W] -> logits [N, C] in fp32."""

from fastaug.models.build import build_configured_model, build_model
from fastaug.models.sync_norm import synchronize_batch_norm

__all__ = ["build_configured_model", "build_model", "synchronize_batch_norm"]
