"""WRN-d-w with SkipInit: parameter counts, the definition written a second time, initialization."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from expect import raises
from torch import Tensor, nn

from fastaug.errors import ConfigError
from fastaug.models.wrn import WideResNet


@pytest.mark.parametrize(
    ("depth", "width", "total", "decayed", "scalars"),
    [
        (16, 4, 2_770_666, 2_768_304, 6),
        (16, 8, 11_004_842, 11_000_240, 6),
        (16, 16, 43_865_386, 43_856_304, 6),
        (22, 4, 4_319_853, 4_316_592, 9),
        (28, 4, 5_869_040, 5_864_880, 12),
    ],
)
def test_parameter_counts(depth: int, width: int, total: int, decayed: int, scalars: int) -> None:
    with torch.device("meta"):
        model = WideResNet(depth, width, num_classes=100)
    parameters = dict(model.named_parameters())
    assert sum(p.numel() for p in parameters.values()) == total
    assert sum(p.numel() for p in parameters.values() if p.ndim > 1) == decayed
    assert [n for n, p in parameters.items() if p.ndim == 0] == [
        f"blocks.{i}.skip_gain" for i in range(scalars)
    ]


def port(weights: Mapping[str, Tensor], images: Tensor, blocks_per_group: int) -> Tensor:
    """The definition of jax_privacy's WRN with SkipInit, in terms of weights by name."""

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = weights[name + ".weight"]
        padding = weight.shape[-1] // 2
        return F.conv2d(x, weight, weights[name + ".bias"], stride, padding)

    x = conv("stem", images)
    for i in range(3 * blocks_per_group):
        group, first = i // blocks_per_group, i % blocks_per_group == 0
        stride = 2 if first and group > 0 else 1
        r = x.clamp_min(0)
        skip = conv(f"blocks.{i}.shortcut", r, stride) if first else x
        residual = conv(f"blocks.{i}.conv2", conv(f"blocks.{i}.conv1", r, stride).clamp_min(0))
        x = skip + weights[f"blocks.{i}.skip_gain"] * residual
    return x.clamp_min(0).mean(dim=(2, 3)) @ weights["head.weight"].T + weights["head.bias"]


@pytest.mark.parametrize("size", [(32, 32), (33, 30)], ids=str)
@pytest.mark.parametrize(("depth", "width"), [(10, 1), (16, 2)])
def test_equals_the_definition(depth: int, width: int, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = WideResNet(depth, width, num_classes=7).double()
    for parameter in model.parameters():
        if parameter.ndim < 2:  # at first skip gains and biases are 0 and hide what they multiply
            nn.init.uniform_(parameter, 0.2, 1.0)
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    actual = model(images)
    expected = port(parameters, images, blocks_per_group=(depth - 4) // 6)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)

    actual_grads = torch.autograd.grad(actual.square().sum(), list(parameters.values()))
    expected_grads = torch.autograd.grad(expected.square().sum(), list(parameters.values()))
    torch.testing.assert_close(actual_grads, expected_grads, rtol=1e-9, atol=1e-9)


def test_initialization() -> None:
    torch.manual_seed(0)
    model = WideResNet(16, 4, num_classes=100)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            assert not parameter.any(), name
            continue
        fan_in = parameter[0].numel()
        std = fan_in**-0.5 if name == "head.weight" else (2 / fan_in) ** 0.5
        tolerance = 6 * std / (2 * parameter.numel()) ** 0.5
        assert parameter.std().item() == pytest.approx(std, abs=tolerance), name


@pytest.mark.parametrize(
    ("depth", "nearest"), [(17, "wrn-16-4"), (20, "wrn-22-4"), (4, "wrn-10-4"), (0, "wrn-10-4")]
)
def test_invalid_depth_names_the_nearest(depth: int, nearest: str) -> None:
    with raises(ConfigError, f"6n+4 {depth} {nearest}"):
        WideResNet(depth, 4, num_classes=10)


def test_invalid_width() -> None:
    with raises(ConfigError, "width 1 0"):
        WideResNet(16, 0, num_classes=10)
