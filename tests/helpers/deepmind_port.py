"""DeepMind's NF-ResNet and NFNet-F0 in eval mode, written from their formulas without timm.

Weights come from a mapping by timm's names, so that one set of numbers runs through both. `images`
is [N, 3, H, W]; the result is logits [N, C].
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]

ALPHA = 0.2
NF_RESNET_DEPTHS = {
    "nf_resnet26": (2, 2, 2, 2),
    "nf_resnet50": (3, 4, 6, 3),
    "nf_resnet101": (3, 4, 23, 3),
}
NFNET_F0_DEPTHS = (1, 2, 6, 3)


def nf_resnet(weights: Weights, images: Tensor, depths: tuple[int, ...]) -> Tensor:
    x = ws_conv(weights, "stem.conv", images, stride=2)
    x = F.max_pool2d(same_pad(x, kernel=3, stride=2, value=-math.inf), 3, 2)
    for prefix, stride, beta in block_settings(depths):
        out = relu(x) * beta
        projected = prefix + "downsample.weight" in weights
        shortcut = ws_conv(weights, prefix + "downsample", out, stride) if projected else x
        out = ws_conv(weights, prefix + "conv1", out)
        out = ws_conv(weights, prefix + "conv2", relu(out), stride)
        out = ws_conv(weights, prefix + "conv3", relu(out))
        x = out * weights[prefix + "skipinit_gain"] * ALPHA + shortcut
    return classify(weights, relu(x))


def nfnet_f0(weights: Weights, images: Tensor) -> Tensor:
    x = ws_conv(weights, "stem.conv1", images, stride=2)
    x = ws_conv(weights, "stem.conv2", gelu(x))
    x = ws_conv(weights, "stem.conv3", gelu(x))
    x = ws_conv(weights, "stem.conv4", gelu(x), stride=2)
    for prefix, stride, beta in block_settings(NFNET_F0_DEPTHS):
        out = gelu(x) * beta
        shortcut = x
        if prefix + "downsample.conv.weight" in weights:
            pooled = same_average_pool(out) if stride == 2 else out
            shortcut = ws_conv(weights, prefix + "downsample.conv", pooled)
        out = ws_conv(weights, prefix + "conv1", out)
        out = ws_conv(weights, prefix + "conv2", gelu(out), stride)
        out = ws_conv(weights, prefix + "conv2b", gelu(out))
        out = ws_conv(weights, prefix + "conv3", gelu(out))
        out = 2 * squeeze_excite(weights, prefix + "attn_last", out) * out
        x = out * weights[prefix + "skipinit_gain"] * ALPHA + shortcut
    return classify(weights, gelu(ws_conv(weights, "final_conv", x)))


def block_settings(depths: tuple[int, ...]) -> list[tuple[str, int, float]]:
    """(name prefix, stride, beta) of each block; beta = 1 / the expected std of its input."""
    settings = []
    expected_std = 1.0
    for stage, depth in enumerate(depths):
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            settings.append((f"stages.{stage}.{block}.", stride, 1 / expected_std))
            if block == 0:
                expected_std = 1.0
            expected_std = math.sqrt(expected_std**2 + ALPHA**2)
    return settings


def ws_conv(weights: Weights, name: str, x: Tensor, stride: int = 1) -> Tensor:
    """W = (w - mean) * gain / sqrt(max(var * fan_in, 1e-4)), per output channel; SAME padding."""
    w = weights[name + ".weight"]
    fan_in = w[0].numel()
    mean = w.mean(dim=(1, 2, 3), keepdim=True)
    var = ((w - mean) ** 2).mean(dim=(1, 2, 3), keepdim=True)
    scale = weights[name + ".gain"].view(-1, 1, 1, 1) / (var * fan_in).clamp_min(1e-4).sqrt()
    groups = x.shape[1] // w.shape[1]
    x = same_pad(x, kernel=w.shape[-1], stride=stride, value=0.0)
    return F.conv2d(x, (w - mean) * scale, weights[name + ".bias"], stride, groups=groups)


def squeeze_excite(weights: Weights, name: str, x: Tensor) -> Tensor:
    """x [N, D, H, W] -> gates [N, D, 1, 1]."""
    hidden = linear(weights, name + ".fc1", x.mean(dim=(2, 3))).clamp_min(0)
    return torch.sigmoid(linear(weights, name + ".fc2", hidden))[:, :, None, None]


def classify(weights: Weights, x: Tensor) -> Tensor:
    return linear(weights, "head.fc", x.mean(dim=(2, 3)))


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[name + ".weight"].flatten(1).T + weights[name + ".bias"]


def same_pad(x: Tensor, *, kernel: int, stride: int, value: float) -> Tensor:
    """Pads H and W so that windows of `kernel` give ceil(size / stride); the odd one at the end."""
    pads: list[int] = []
    for size in (x.shape[3], x.shape[2]):
        total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value)


def same_average_pool(x: Tensor) -> Tensor:
    """2x2, stride 2, SAME; padding does not count."""

    def total(t: Tensor) -> Tensor:
        return F.avg_pool2d(same_pad(t, kernel=2, stride=2, value=0.0), 2, 2)

    return total(x) / total(torch.ones_like(x))


def relu(x: Tensor) -> Tensor:
    return x.clamp_min(0) * 1.7139588594436646


def gelu(x: Tensor) -> Tensor:
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + tanh) * 1.7015043497085571


PORTS: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "nfnet_f0": nfnet_f0,
    **{name: partial(nf_resnet, depths=depths) for name, depths in NF_RESNET_DEPTHS.items()},
}
