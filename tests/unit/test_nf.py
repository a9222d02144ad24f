"""NF-ResNets and NFNet-F0 against a second writing of DeepMind's definition, and timm's traps."""

from typing import Any

import pytest
import torch
from deepmind_port import NF_RESNET_DEPTHS, NFNET_F0_DEPTHS, PORTS, same_pad
from torch import Tensor, nn

from fastaug.models.build import build_model
from fastaug.models.nf import SameMaxPool

CLASSES = 10
SIZES = [(64, 64), (73, 75)]  # (73, 75): odd before the stem; odd and even before the max-pool


@pytest.fixture(scope="module", params=PORTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name: str) -> nn.Module:
    """In fp64 and eval mode, with gains and biases that hide nothing: at first skip gains are 0."""
    torch.manual_seed(0)
    model = build_model(name, CLASSES).double().eval()
    randomise_gains_and_biases(model)
    return model


def randomise_gains_and_biases(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "gain" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def blocks_of(model: Any) -> list[Any]:
    return [block for stage in model.stages for block in stage]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def random_images(size: tuple[int, int], batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, *size, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("size", SIZES, ids=str)
@torch.no_grad()
def test_equals_deepminds_definition(name: str, model: nn.Module, size: tuple[int, int]) -> None:
    images = random_images(size)
    assert relative_error(model(images), PORTS[name](weights_of(model), images)) < 1e-5


def test_values_and_gradients_are_exact_without_epsilon(
    name: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epsilon is all that separates the two: without it they agree to fp64 rounding.

    Gradients could not be compared with it: a difference of 1e-6 flips some ReLUs.
    """
    images = random_images((32, 32), batch=1)
    for module in model.modules():
        if hasattr(module, "eps"):
            monkeypatch.setattr(module, "eps", 1e-30)
    actual = model(images)
    expected = PORTS[name](weights_of(model), images)
    assert relative_error(actual.detach(), expected.detach()) < 1e-12

    # The largest weights take gigabytes and run no other code.
    parameters = {key: p for key, p in model.named_parameters() if p.numel() <= 2**18}
    assert {key.rpartition(".")[2] for key in parameters} >= {"weight", "gain", "skipinit_gain"}
    actual_grads = torch.autograd.grad(actual.square().sum(), list(parameters.values()))
    expected_grads = torch.autograd.grad(expected.square().sum(), list(parameters.values()))
    errors = map(relative_error, actual_grads, expected_grads)
    worst = max(zip(errors, parameters, strict=True))
    assert worst[0] < 1e-9, worst


@torch.no_grad()
def test_decayed_weights_are_standardized_as_deepmind_does() -> None:
    """At a tenth of their initial size, weights meet timm's default epsilon of 1e-5 and shrink."""
    model = build_model("nf_resnet26", CLASSES).double().eval()
    randomise_gains_and_biases(model)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.mul_(0.1)
    images = random_images((64, 64))
    expected = PORTS["nf_resnet26"](weights_of(model), images)
    assert relative_error(model(images), expected) < 1e-3


@pytest.mark.parametrize("size", [(8, 8), (7, 7), (7, 10), (1, 1), (2, 3)], ids=str)
def test_same_max_pool(size: tuple[int, int]) -> None:
    x = -torch.rand(2, 3, *size) - 1  # negative: padding with zeros would show
    padded = same_pad(x, kernel=3, stride=2, value=-torch.inf)
    windows = padded.unfold(2, 3, 2).unfold(3, 3, 2)
    torch.testing.assert_close(SameMaxPool()(x), windows.amax(dim=(-1, -2)), rtol=0, atol=0)


def conv_parameters(in_channels: int, out_channels: int, kernel: int = 1) -> int:
    """Weight, and per output channel one gain and one bias: DeepMind's convolutions have both."""
    return out_channels * in_channels * kernel**2 + 2 * out_channels


def nf_resnet_parameters(depths: tuple[int, ...], classes: int) -> int:
    total = conv_parameters(3, 64, 7)
    channels = 64
    for depth, out in zip(depths, (256, 512, 1024, 2048), strict=True):
        total += conv_parameters(channels, out)  # shortcut
        for _ in range(depth):
            middle = out // 4
            total += conv_parameters(channels, middle) + conv_parameters(middle, middle, 3)
            total += conv_parameters(middle, out) + 1  # the SkipInit scalar
            channels = out
    return total + channels * classes + classes


def test_parameter_counts() -> None:
    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in build_model(name, 1000).parameters()) for name in PORTS
        }
    assert counts["nf_resnet50"] == 25_557_048
    assert counts["nf_resnet101"] == 44_549_193
    assert counts["nfnet_f0"] == 71_489_284
    for name, depths in NF_RESNET_DEPTHS.items():
        assert counts[name] == nf_resnet_parameters(depths, classes=1000)


def test_initialization_is_deepminds(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, CLASSES)
    for key, parameter in model.named_parameters():
        if key.endswith(("skipinit_gain", "bias")):
            assert not parameter.any(), key
        elif key.endswith("gain"):
            assert (parameter == 1).all(), key
        else:
            std = 0.01 if key == "head.fc.weight" else parameter[0].numel() ** -0.5
            tolerance = 6 * std / (2 * parameter.numel()) ** 0.5
            assert parameter.std().item() == pytest.approx(std, abs=tolerance), key
            assert parameter.mean().abs().item() < 6 * std / parameter.numel() ** 0.5, key


@pytest.mark.parametrize(
    ("name", "blocks"), [("nf_resnet50", 16), ("nfnet_f0", sum(NFNET_F0_DEPTHS))]
)
def test_stochastic_depth_rates(name: str, blocks: int) -> None:
    with torch.device("meta"):
        model = build_model(name, CLASSES, stochastic_depth=0.25)
    rates = [block.drop_path.drop_prob for block in blocks_of(model)]
    assert rates == pytest.approx([0.25 * i / blocks for i in range(blocks)])


@torch.no_grad()
def test_stochastic_depth_drops_per_sample_and_does_not_rescale() -> None:
    torch.manual_seed(0)
    model = build_model("nf_resnet26", CLASSES, stochastic_depth=0.4)
    randomise_gains_and_biases(model)
    block = blocks_of(model)[-1]
    samples = 1000
    x = torch.randn(1, 2048, 1, 1).expand(samples, -1, -1, -1)
    whole = block.eval()(x)
    out = block.train()(x)
    dropped = (out == x).flatten(1).all(dim=1)
    kept = torch.isclose(out, whole, rtol=1e-4, atol=1e-4).flatten(1).all(dim=1)
    assert (dropped ^ kept).all()
    rate = 0.4 * 7 / 8
    deviation = (rate * (1 - rate) / samples) ** 0.5
    assert dropped.float().mean().item() == pytest.approx(rate, abs=4 * deviation)


@torch.no_grad()
def test_dropout_is_before_the_last_layer_and_rescales() -> None:
    torch.manual_seed(0)
    model: Any = build_model("nf_resnet26", CLASSES, dropout=0.25)
    features: list[Tensor] = []
    model.head.fc.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    images = torch.randn(4, 3, 64, 64)
    model.eval()(images)
    model.train()(images)
    whole, thinned = (f[features[0] > 0] for f in features)
    assert (thinned == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    torch.testing.assert_close(thinned, torch.where(thinned == 0, 0, whole / 0.75))
