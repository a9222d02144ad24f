"""NF-ResNets and NFNet-F0 as DeepMind defines them: timm's networks, with patches.

Most of the definition is available as timm's options. The rest is patched here, each patch with its
reason; tests/helpers/deepmind_port.py has the definition without timm. One difference remains: the
weight standardization adds 1e-9 to the variance, where DeepMind clamps variance * fan-in at 1e-4.
At initialization, the logits differ by 5e-6 or less.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastaug.models.head import keep_head_in_fp32
from fastaug.models.timm_models import require_timm

# dm_nfnet_f0 is timm's copy of DeepMind's network, made for its weights. timm's nfnet_f0 differs
# from it only in options that build_nf sets anyway.
TIMM_NAMES = {
    "nf_resnet26": "nf_resnet26",
    "nf_resnet50": "nf_resnet50",
    "nf_resnet101": "nf_resnet101",
    "nfnet_f0": "dm_nfnet_f0",
}

# DeepMind's constants: gamma * act(x) has unit variance where x is a unit normal.
RELU_GAMMA = 1.7139588594436646
GELU_GAMMA = 1.7015043497085571


class GammaReLU(nn.Module):
    """gamma * relu(x), computed as relu(gamma * x).

    timm's relu(x).mul_(gamma) overwrites a tensor that relu's backward pass needs.
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(x * RELU_GAMMA)


class GammaGELU(nn.Module):
    """gamma * gelu(x) with the tanh approximation, the default of jax.nn.gelu; timm uses the exact
    form."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh").mul_(GELU_GAMMA)


class FoldedBlock(nn.Module):
    """timm's NormFreeBlock of an NF-ResNet, with its constants folded into the weights.

    gamma and beta scale the input of a convolution, alpha and the skip gain its output. Each would
    be a pass over the activations, forward and backward: 4 to 7% of a step on a CPU. Folded into
    the weights, they give the same function at no cost. The parameters are the same.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = block.conv1, block.conv2, block.conv3
        self.downsample = block.downsample
        self.drop_path = block.drop_path
        self.skipinit_gain = block.skipinit_gain
        self._alpha = block.alpha
        for conv in (self.conv2, self.conv3):
            conv.scale *= RELU_GAMMA
        for conv in (self.conv1, self.downsample):
            if conv is not None:
                conv.scale *= RELU_GAMMA * block.beta

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(x)
        shortcut = x if self.downsample is None else self.downsample(out)
        # In place: a convolution's backward pass does not need its output.
        out = self.conv2(torch.relu_(self.conv1(out)))
        return self.drop_path(self._last(torch.relu_(out))) + shortcut

    def _last(self, x: Tensor) -> Tensor:
        """alpha * gain * conv3(x)."""
        conv, scale = self.conv3, self._alpha * self.skipinit_gain
        weight = F.batch_norm(
            conv.weight.reshape(1, conv.out_channels, -1),
            None,
            None,
            weight=(conv.gain * (conv.scale * scale)).flatten(),
            training=True,
            momentum=0.0,
            eps=conv.eps,
        )
        return F.conv2d(x, weight.reshape_as(conv.weight), conv.bias * scale)


class SameMaxPool(nn.Module):
    """3x3 max-pool of stride 2, padded SAME: [N, C, H, W] -> [N, C, ceil(H/2), ceil(W/2)].

    SAME pads an even size by (0, 1), an odd one by (1, 1); ceil_mode gives (0, 1) without a copy.
    """

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        return F.max_pool2d(x, 3, stride=2, padding=(height % 2, width % 2), ceil_mode=True)


def build_nf(name: str, num_classes: int, *, dropout: float, stochastic_depth: float) -> nn.Module:
    """images [N, 3, H, W] of any size -> logits [N, C] fp32. `name` is a key of TIMM_NAMES."""
    model = require_timm(name).create_model(
        TIMM_NAMES[name],
        num_classes=num_classes,
        drop_rate=dropout,
        skipinit=True,
        gamma_in_act=True,
        same_padding=True,
        # timm's 1e-5 is too large when weights have decayed: at a tenth of its initial size, a
        # 512x3x3 kernel gets 0.42 of its norm.
        std_conv_eps=1e-9,
    )
    blocks = [block for stage in model.stages for block in stage]
    if name == "nfnet_f0":
        _replace_activations(model, GammaGELU)
    else:
        _replace_activations(model, GammaReLU)
        _use_strided_shortcuts(blocks)
        model.stem.pool = SameMaxPool()
    _set_stochastic_depth(blocks, stochastic_depth)
    if name != "nfnet_f0":
        model.stages = nn.Sequential(
            *(nn.Sequential(*map(FoldedBlock, stage)) for stage in model.stages)
        )
    return keep_head_in_fp32(model, num_classes)


def _replace_activations(model: nn.Module, activation: type[nn.Module]) -> None:
    from timm.models.nfnet import GammaAct

    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, GammaAct):
                setattr(parent, name, activation())


def _use_strided_shortcuts(blocks: list[Any]) -> None:
    """NF-ResNet projects by a strided 1x1 convolution; timm pools first, as only NFNet-F0 does."""
    for block in blocks:
        if block.downsample is not None:
            block.downsample = block.downsample.conv
            block.downsample.stride = block.conv2.stride


def _set_stochastic_depth(blocks: list[Any], rate: float) -> None:
    """Block i of N drops its branch, per sample, with probability rate * i / N.

    Branches that stay are not rescaled. timm rescales them, and its last block has the full rate.
    """
    from timm.layers.drop import DropPath

    for i, block in enumerate(blocks):
        block.drop_path = DropPath(rate * i / len(blocks), scale_by_keep=False)
