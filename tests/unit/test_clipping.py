"""Gradient clipping against formulas in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fastaug
from fastaug.config import TrainConfig
from fastaug.engine.clipping import Clipping


def clipped(model: nn.Module, **settings: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name -> the gradient before and after."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = (
                torch.randn_like(parameter)
                * 10 ** torch.randn(len(parameter)).view(-1, *[1] * (parameter.ndim - 1))
                if parameter.ndim
                else torch.tensor(3.0)
            )
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    before = {n: grad.numpy().astype(np.float64) for n, grad in grads.items()}
    before = {n: grad.copy() for n, grad in before.items()}
    Clipping(model, TrainConfig.from_flat(**settings).optim)()
    return {n: (before[n], grads[n].numpy()) for n in grads}


def expected_agc(weight: np.ndarray, grad: np.ndarray, factor: float) -> np.ndarray:
    """Brock et al. (2021), Equation 3, one unit at a time."""
    sides = [side for side in weight.shape if side > 1]
    units = [()] if len(sides) <= 1 else [(i,) for i in range(len(weight))]
    out = grad.copy()
    for unit in units:
        limit = factor * max(np.sqrt((weight[unit] ** 2).sum()), 1e-3)
        norm = np.sqrt((grad[unit] ** 2).sum())
        if norm > limit:
            out[unit] = grad[unit] * limit / norm
    return out


@pytest.mark.parametrize("name", ["wrn-10-1", "nf_resnet26", "timm/test_vit"])
def test_adaptive_clipping(name: str) -> None:
    model = fastaug.build_model(name, 5, image_size=32)
    weights = {n: p.detach().double().numpy() for n, p in model.named_parameters()}
    found = clipped(model, agc=0.3)
    untouched = 0
    for parameter, (before, after) in found.items():
        is_head = parameter.startswith("head") and len(before) == 5
        expected = before if is_head else expected_agc(weights[parameter], before, 0.3)
        np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-9, err_msg=parameter)
        untouched += np.array_equal(after, before)
    assert 2 <= untouched < len(found)


def test_by_value() -> None:
    for before, after in clipped(fastaug.build_model("wrn-10-1", 5), clip_value=0.5).values():
        np.testing.assert_allclose(after, before.clip(-0.5, 0.5))


def test_by_norm() -> None:
    found = clipped(fastaug.build_model("wrn-10-1", 5), clip_norm=0.5).values()
    norm = np.sqrt(sum((before**2).sum() for before, _ in found))
    assert norm > 1
    for before, after in found:
        np.testing.assert_allclose(after, before * 0.5 / norm, rtol=1e-4)


def test_frozen_parameters_have_no_gradient_to_clip() -> None:
    model = fastaug.build_model("wrn-10-1", 5)
    model.stem.requires_grad_(False)
    found = clipped(model, agc=0.01)
    assert "stem.weight" not in found
    assert "head.weight" in found
