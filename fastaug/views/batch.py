"""ViewBatch: a batch of views, which every loader yields and every training step takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VIEW_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Dtypes by their names in --views-dtype."""


def view_dtype(name: str) -> torch.dtype:
    """The dtype of --views-dtype; fp32 for auto, which TrainConfig.resolved_view replaces."""
    return VIEW_DTYPES.get(name, torch.float32)


@dataclass(frozen=True)
class ViewBatch:
    """views: [B, K, 3, H, W] float; labels: [B] int64; indices: [B] int64 (in the data set).

    The views are stored as B, K, H, W, 3, so that `flat` is a channels-last batch without a copy.
    The indices stay in host memory: only messages use them.
    """

    views: Tensor
    labels: Tensor
    indices: Tensor

    @property
    def flat(self) -> Tensor:
        """The views as the network takes them: [B*K, 3, H, W], channels last, the same memory."""
        return self.views.flatten(0, 1)

    def to(self, device: torch.device) -> ViewBatch:
        """Views and labels on a device; from pinned memory the host does not wait."""
        views, labels = (t.to(device, non_blocking=True) for t in (self.views, self.labels))
        return ViewBatch(views, labels, self.indices)

    def pin_memory(self) -> ViewBatch:
        """Views and labels in pinned memory, from which a GPU copies on its own."""
        return ViewBatch(self.views.pin_memory(), self.labels.pin_memory(), self.indices)
