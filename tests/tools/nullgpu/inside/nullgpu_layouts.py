"""Memory layouts of convolutions: those of cuDNN, which a stand-in GPU does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _cudnn_format(tensor: Tensor, weight: Tensor) -> torch.memory_format:
    return torch._C._conv_determine_backend_memory_format(
        tensor, weight, torch._C._ConvBackend.Cudnn
    )


def convolution_layout(result: Tensor, arguments: tuple) -> Tensor | None:
    return _with_layout(result, _cudnn_format(arguments[0], arguments[1]))


def gradients_layout(result: tuple, arguments: tuple) -> tuple:
    layout = _cudnn_format(arguments[1], arguments[2])
    *gradients, bias = result
    return (*(_with_layout(gradient, layout) for gradient in gradients), bias)


def _with_layout(tensor: Tensor | None, layout: torch.memory_format) -> Tensor | None:
    """Exactly its strides, also where others mean the same."""
    if tensor is None:
        return None
    return torch.empty_like(tensor, memory_format=layout).copy_(tensor)


def expect_cudnn_layouts() -> None:
    """torch.compile expects layouts by the kernel that torch would choose: that of cuDNN."""
    choose = torch._C._select_conv_backend

    def chosen(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        if tensor.device.type == "cuda":
            return torch._C._ConvBackend.Cudnn
        return choose(tensor, *arguments, **options)

    torch._C._select_conv_backend = chosen
