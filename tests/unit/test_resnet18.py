"""ResNet-18 for 32 px: size, layout, and the definition written a second time."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastaug.models.resnet18 import ResNet18


# Of width 16: the convolutions have 697,776 weights, the norms 2,400, the head 1,290.
@pytest.mark.parametrize(
    ("classes", "width", "total"),
    [(10, 64, 11_173_962), (100, 64, 11_220_132), (10, 16, 701_466)],
)
def test_parameter_count(classes: int, width: int, total: int) -> None:
    with torch.device("meta"):
        model = ResNet18(classes, width)
    assert sum(p.numel() for p in model.parameters()) == total


def test_stem_keeps_the_resolution() -> None:
    """3x3 stem of stride 1 and no max-pool: the first blocks work at the size of the image."""
    model = ResNet18(10).eval()
    sizes: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, out: sizes.append(out.shape[-1]))
    model(torch.randn(1, 3, 32, 32))
    assert sizes == [32, 32, 16, 16, 8, 8, 4, 4]


def port(state: dict[str, Tensor], images: Tensor) -> Tensor:
    """He et al.'s basic blocks in training mode: batch norm over all of N, H, W."""

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = state[name + ".weight"]
        return F.conv2d(x, weight, None, stride, padding=weight.shape[-1] // 2)

    def norm(name: str, x: Tensor) -> Tensor:
        mean = x.mean(dim=(0, 2, 3), keepdim=True)
        var = ((x - mean) ** 2).mean(dim=(0, 2, 3), keepdim=True)
        scale, offset = state[name + ".weight"], state[name + ".bias"]
        return (x - mean) / (var + 1e-5).sqrt() * scale[:, None, None] + offset[:, None, None]

    x = norm("stem_norm", conv("stem", images)).clamp_min(0)
    for i in range(8):
        prefix = f"blocks.{i}."
        stride = 2 if i in (2, 4, 6) else 1
        branch = norm(prefix + "norm1", conv(prefix + "conv1", x, stride)).clamp_min(0)
        branch = norm(prefix + "norm2", conv(prefix + "conv2", branch))
        if stride == 2:
            x = norm(prefix + "shortcut_norm", conv(prefix + "shortcut", x, stride))
        x = (branch + x).clamp_min(0)
    return x.mean(dim=(2, 3)) @ state["head.weight"].T + state["head.bias"]


def test_equals_the_definition() -> None:
    torch.manual_seed(0)
    model = ResNet18(10).double().train()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.2, 1.0)
    images = torch.randn(4, 3, 17, 16, dtype=torch.float64)
    expected = port(model.state_dict(), images)
    torch.testing.assert_close(model(images), expected, rtol=1e-9, atol=1e-9)
