"""The networks: images [N, 3, H, W] -> logits [N, C] in fp32."""

from fastaug.models.build import build_configured_model, build_model

__all__ = ["build_configured_model", "build_model"]
