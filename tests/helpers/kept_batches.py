"""Batches that a caller keeps while the loader goes on."""

from __future__ import annotations

import torch

import fastaug
from fastaug.config import TrainConfig


def check_that_kept_batches_stay(config: TrainConfig) -> None:
    """The loader must not write over what it has handed out."""
    loader = fastaug.build_loader(config)
    kept, copies = [], []
    for _ in range(3):
        for batch in loader:
            kept.append(batch.views)
            copies.append(batch.views.clone())
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))
