"""ViewBatch: a batch of views, which every loader yields and every training step takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

VIEW_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Dtypes by their names in --views-dtype."""


@dataclass(frozen=True)
class ViewBatch:
    """views: [B, K, 3, H, W] float; labels: [B] int64; indices: [B] int64 (in the data set).

    The views are stored as B, K, H, W, 3, so that `flat` is a channels-last batch without a copy.
    """

    views: Tensor
    labels: Tensor
    indices: Tensor

    @property
    def flat(self) -> Tensor:
        """The views as the network takes them: [B*K, 3, H, W], channels last, the same memory."""
        return self.views.flatten(0, 1)

    def to(self, device: torch.device) -> ViewBatch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> ViewBatch:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, move: Callable[[Tensor], Tensor]) -> ViewBatch:
        return ViewBatch(move(self.views), move(self.labels), move(self.indices))
