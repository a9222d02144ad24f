"""ResNet-18 with batch norm for 32 px images: 3x3 stem, no max-pool.

The only network here with batch norm. Its statistics are over the batch: all views of all images.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from fastaug.models.head import Fp32Linear


class BasicBlock(nn.Module):
    """x [N, in, H, W] -> [N, out, H/stride, W/stride]; post-activation."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        self.shortcut_norm: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
            self.shortcut_norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        branch = F.relu(self.norm1(self.conv1(x)), inplace=True)
        branch = self.norm2(self.conv2(branch))
        return F.relu(branch + self.shortcut_norm(self.shortcut(x)), inplace=True)


class ResNet18(nn.Module):
    """images [N, 3, H, W] -> logits [N, C] fp32. width: channels of the first stage."""

    def __init__(self, num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        blocks = []
        in_channels = width
        for channels, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            blocks.append(BasicBlock(in_channels, channels, stride))
            blocks.append(BasicBlock(channels, channels, stride=1))
            in_channels = channels
        self.blocks = nn.Sequential(*blocks)
        self.blocks_per_stage = 2
        self.head = Fp32Linear(in_channels, num_classes)
        self._initialize()

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        nn.init.normal_(self.head.weight, std=self.head.in_features**-0.5)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        stem = F.relu(self.stem_norm(self.stem(images)), inplace=True)
        return self.head(self.blocks(stem).mean(dim=(2, 3)))
