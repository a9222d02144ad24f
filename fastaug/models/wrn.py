"""WRN-d-w with SkipInit: a wide residual network without normalization layers.

Each residual branch ends in a learned scalar that starts at 0 (De and Smith, 2020), in place of
batch norm: at first only the shortcuts pass the signal. Convolutions have biases.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastaug.errors import ConfigError
from fastaug.models.head import Fp32Linear


class Block(nn.Module):
    """x [N, in, H, W] -> [N, out, H/stride, W/stride]; pre-activation.

    project: the shortcut is a 1x1 convolution of the activated input, not the input itself.
    """

    def __init__(self, in_channels: int, channels: int, *, stride: int, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.shortcut = nn.Conv2d(in_channels, channels, 1, stride) if project else None
        self.skip_gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(x)
        shortcut = x if self.shortcut is None else self.shortcut(activated)
        branch = self.conv2(F.relu(self.conv1(activated), inplace=True))
        return shortcut + self.skip_gain * branch


class WideResNet(nn.Module):
    """images [N, 3, H, W] -> logits [N, C] fp32. Depth is 6n+4: three groups of n blocks."""

    def __init__(self, depth: int, width: int, num_classes: int) -> None:
        super().__init__()
        blocks_per_group = _blocks_per_group(depth, width)
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        blocks = []
        in_channels = 16
        for channels, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            for i in range(blocks_per_group):
                first = i == 0
                block = Block(in_channels, channels, stride=stride if first else 1, project=first)
                blocks.append(block)
                in_channels = channels
        self.blocks = nn.Sequential(*blocks)
        self.blocks_per_stage = blocks_per_group
        self.head = Fp32Linear(in_channels, num_classes)
        self._initialize()

    def _initialize(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 4:
                nn.init.kaiming_normal_(parameter, mode="fan_in", nonlinearity="relu")
        nn.init.normal_(self.head.weight, std=self.head.in_features**-0.5)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.blocks(self.stem(images)), inplace=True)
        return self.head(features.mean(dim=(2, 3)))


def _blocks_per_group(depth: int, width: int) -> int:
    blocks, rest = divmod(depth - 4, 6)
    if rest or blocks < 1:
        nearest = 6 * max(1, round((depth - 4) / 6)) + 4
        raise ConfigError(
            f"wrn-{depth}-{width}: depth must be 6n+4 with n at least 1 (10, 16, 22, 28, ...), "
            f"got {depth}; nearest: wrn-{nearest}-{width}"
        )
    if width < 1:
        raise ConfigError(f"wrn-{depth}-{width}: width must be at least 1, got {width}")
    return blocks
