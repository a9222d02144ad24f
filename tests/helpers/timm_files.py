"""Weights of timm's networks in files, as other programs save them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

NAME = "test_resnet"
"""timm's smallest network with batch norm; its data config is 0.5 0.5 and bilinear."""
REPOSITORY = "timm/test_resnet.r160_in1k"


def trained_network(classes: int = 1000, name: str = NAME, **options: Any) -> nn.Module:
    """timm's own network with weights, and statistics of batch norm, that no new network has."""
    generator = torch.Generator().manual_seed(1)
    model = timm.create_model(name, num_classes=classes, **options).eval()
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator) * 0.2 + 0.01)
    return model


def save_weights(model: nn.Module, path: Path) -> Path:
    """.safetensors, or a state dict of torch."""
    weights: dict[str, Tensor] = model.state_dict()
    save_file(weights, path) if path.suffix == ".safetensors" else torch.save(weights, path)
    return path


def fill_hub_cache(home: Path, model: nn.Module, repository: str = REPOSITORY) -> None:
    """The layout of the Hugging Face cache after a download: blobs, a snapshot and a reference."""
    folder = home / "hub" / f"models--{repository.replace('/', '--')}"
    commit = hashlib.sha1(repository.encode()).hexdigest()
    snapshot = folder / "snapshots" / commit
    for needed in (snapshot, folder / "blobs", folder / "refs"):
        needed.mkdir(parents=True)
    blob = save_weights(model, folder / "blobs" / "downloaded.safetensors")
    content = hashlib.sha256(blob.read_bytes()).hexdigest()
    blob.rename(blob.with_name(content))
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / content)
    (folder / "refs" / "main").write_text(commit)
