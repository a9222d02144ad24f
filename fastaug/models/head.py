"""The last linear layer, which stays in fp32 while the network runs in bf16, fp16 or TF32.

The regularizer compares logits of views that nearly agree: from bf16 logits, the pairwise KL is
off by 1.8% at 0.02 nats and by 160% at 2e-5.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastaug.runtime.arithmetic import fp32_matmul


def at_least_fp32(x: Tensor) -> Tensor:
    """Cast bf16 and fp16 to fp32; fp32 and fp64 stay as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Fp32Linear(nn.Linear):
    """features [N, F] of any dtype -> logits [N, C] in fp32, also under autocast and with TF32."""

    def forward(self, features: Tensor) -> Tensor:
        weight = at_least_fp32(self.weight)
        bias = None if self.bias is None else at_least_fp32(self.bias)
        if features.is_meta:  # only shapes are computed, and torch has no autocast for it
            return F.linear(features.to(weight.dtype), weight, bias)
        with torch.autocast(features.device.type, enabled=False):
            linear = _fp32_linear if features.is_cuda else F.linear
            return linear(features.to(weight.dtype), weight, bias)


# An operator of its own: its backward pass runs later and in another thread, and torch.compile does
# not see the switch inside.
@torch.library.custom_op("fastaug::fp32_linear", mutates_args=())
def _fp32_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear whose matrix product is computed in fp32 even if others are computed in TF32."""
    with fp32_matmul():
        return F.linear(x, weight, bias)


@_fp32_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Any) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _fp32_linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    rows, features = grad.flatten(0, -2), x.flatten(0, -2)
    return (
        _fp32_linear(grad, weight.t(), None) if needs_x else None,
        _fp32_linear(rows.t(), features.t(), None) if needs_weight else None,
        rows.sum(0) if needs_bias else None,
    )


_fp32_linear.register_autograd(_fp32_linear_backward, setup_context=_save_for_backward)


def head_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters of a network's last layers, which return class scores."""
    own = {id(parameter) for parameter in _head(model).parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}


def _head(model: nn.Module) -> nn.ModuleList:
    """The last layers: timm's networks may have two; fastaug's own call theirs head."""
    network = cast(Any, model)
    classifier = network.get_classifier() if hasattr(model, "get_classifier") else network.head
    return nn.ModuleList(classifier if isinstance(classifier, tuple | list) else [classifier])


def keep_head_in_fp32(model: nn.Module, num_classes: int) -> nn.Module:
    """Make a timm model return fp32 logits [N, C]; its parameters keep their names.

    Every linear layer that returns class scores becomes an Fp32Linear. Another kind of head (a 1x1
    convolution in dla, dpn and resnetv2) computes as before, and its output is cast.
    """
    for layer in _head(model).modules():
        if type(layer) is nn.Linear and layer.out_features == num_classes:
            layer.__class__ = Fp32Linear  # in place: all references to the layer stay valid
    model.register_forward_hook(_cast_output)
    return model


def _cast_output(_module: nn.Module, _inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
    return at_least_fp32(logits)
