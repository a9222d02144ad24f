"""What every model promises: fp32 logits, channels-last, decay by name; and how names go wrong."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises
from torch import Tensor, nn

from fastaug.errors import ConfigError
from fastaug.models.build import build_model
from fastaug.models.head import Fp32Linear
from fastaug.models.resnet18 import ResNet18
from fastaug.models.wrn import WideResNet

CLASSES = 12
OWN_MODELS = ["wrn-10-2", "resnet18", "nf_resnet26", "nfnet_f0"]


@pytest.fixture(scope="module", params=OWN_MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    """With skip gains that are not 0, so that the residual branches take part."""
    torch.manual_seed(0)
    model = build_model(request.param, CLASSES).eval()
    for name, parameter in model.named_parameters():
        if "gain" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def channels_last_images(batch: int = 2, size: int = 64) -> Tensor:
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
    return images.to(memory_format=torch.channels_last)


def test_gradients_have_the_strides_of_the_weights(model: nn.Module) -> None:
    """Otherwise DDP copies each of them into its bucket element by element, and warns."""
    model(channels_last_images()).square().sum().backward()
    grads = {name: (p, p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert len(grads) > 10
    assert [name for name, (p, grad) in grads.items() if p.stride() != grad.stride()] == []


def check_head_under_autocast(model: nn.Module, images: Tensor, dtype: torch.dtype) -> Tensor:
    """The logits are what fp32 makes of the features, which are returned."""
    (head,) = (module for module in model.modules() if isinstance(module, Fp32Linear))
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        logits = model(images)
    hook.remove()
    (features,) = seen
    assert logits.shape == (len(images), CLASSES)
    assert logits.dtype == torch.float32
    exact = features.double() @ head.weight.double().T + head.bias.double()
    # Relative to the sum of the terms' sizes, which may cancel; bf16 would miss by 1e-3 of it.
    size = features.double().abs() @ head.weight.double().abs().T + head.bias.double().abs()
    torch.testing.assert_close(logits.double() / size, exact / size, rtol=0, atol=3e-6)
    assert (logits != logits.to(dtype)).any()
    return features


def test_head_computes_in_fp32_under_autocast(model: nn.Module) -> None:
    features = check_head_under_autocast(model, channels_last_images(), torch.bfloat16)
    assert features.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_no_activation_leaves_channels_last(model: nn.Module, dtype: torch.dtype) -> None:
    checked: list[str] = []
    wrong: list[str] = []

    def check(name: str, out: Any) -> None:
        # With one channel or one pixel the two formats are the same memory.
        if out.ndim == 4 and out.shape[1] > 1 and out.shape[2:].numel() > 1:
            checked.append(name)
            if not out.is_contiguous(memory_format=torch.channels_last):
                wrong.append(name)

    hooks = [
        module.register_forward_hook(lambda _m, _i, out, name=name: check(name, out))
        for name, module in model.named_modules()
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        model(channels_last_images())
    for hook in hooks:
        hook.remove()
    assert not wrong
    assert len(checked) > 10


def test_weights_are_channels_last_unless_they_are_standardized_first(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            is_standardized = hasattr(module, "gain")
            layout = torch.contiguous_format if is_standardized else torch.channels_last
            assert module.weight.is_contiguous(memory_format=layout), name


def test_every_parameter_has_a_gradient(model: nn.Module) -> None:
    model.train()
    model(channels_last_images()).square().sum().backward()
    model.eval()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
        assert parameter.grad.isfinite().all(), name
    model.zero_grad()


def excluded_from_decay(model: nn.Module) -> list[str]:
    """By the rule of the optimizer: biases and gains by name, and the scale of batch norm."""
    norms = {n for n, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    return [
        name
        for name, _ in model.named_parameters()
        if name.endswith("bias") or "gain" in name or name.removesuffix(".weight") in norms
    ]


def test_decay_is_only_on_the_weights_of_convolutions_and_linear_layers(model: nn.Module) -> None:
    decayed = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    excluded = excluded_from_decay(model)
    assert sorted(decayed + excluded) == sorted(name for name, _ in model.named_parameters())


def test_names_without_decay() -> None:
    with torch.device("meta"):
        wrn = excluded_from_decay(build_model("wrn-10-1", CLASSES))
        nf_resnet = excluded_from_decay(build_model("nf_resnet101", CLASSES))
        nfnet = excluded_from_decay(build_model("nfnet_f0", CLASSES))
        resnet = excluded_from_decay(build_model("resnet18", CLASSES))
    per_block = ["conv1.bias", "conv2.bias", "shortcut.bias", "skip_gain"]
    blocks = [f"blocks.{i}.{name}" for i in range(3) for name in per_block]
    assert sorted(wrn) == sorted(["stem.bias", *blocks, "head.bias"])

    # 104 convolutions with gain and bias, 33 SkipInit scalars; the bias of the last layer.
    assert sum(name.endswith("skipinit_gain") for name in nf_resnet) == 33
    assert sum(name.endswith(".gain") for name in nf_resnet) == 104
    assert sum(name.endswith(".bias") for name in nf_resnet) == 105
    # 57 convolutions, 12 blocks, two layers of squeeze and excite in each.
    assert sum(name.endswith("skipinit_gain") for name in nfnet) == 12
    assert sum(name.endswith(".gain") for name in nfnet) == 57
    assert sum(name.endswith(".bias") for name in nfnet) == 57 + 24 + 1
    # 20 batch norms with scale and offset; the bias of the last layer.
    assert len(resnet) == 2 * 20 + 1
    assert [name for name in resnet if "norm" not in name] == ["head.bias"]


def test_names_are_case_insensitive() -> None:
    assert isinstance(build_model("WRN-16-1", 10), WideResNet)
    assert isinstance(build_model("ResNet18", 10), ResNet18)


@pytest.mark.parametrize("name", OWN_MODELS)
def test_own_models_take_any_image_size(name: str) -> None:
    with torch.device("meta"):
        assert build_model(name, 10, image_size=47) is not None


@pytest.mark.parametrize(
    ("name", "size"), [("TIMM/vit_tiny_patch16_224", 64), ("timm/test_resnet", 64)]
)
def test_timm_models_at_a_chosen_size(name: str, size: int) -> None:
    # fp16: oneDNN's bf16 matrix products stop the process on virtual machines with a partial AMX.
    model = build_model(name, CLASSES, image_size=size).eval()
    assert Fp32Linear in map(type, model.modules())
    check_head_under_autocast(model, channels_last_images(size=size), torch.float16)


def test_a_tag_names_the_same_network() -> None:
    with torch.device("meta"):
        plain, tagged = (build_model(f"timm/resnet18{tag}", 10) for tag in ("", ".a1_in1k"))
    assert plain.state_dict().keys() == tagged.state_dict().keys()


def test_timm_model_with_two_heads_has_both_in_fp32() -> None:
    model = build_model("timm/deit_tiny_distilled_patch16_224", CLASSES, image_size=64)
    heads = [name for name, module in model.named_modules() if isinstance(module, Fp32Linear)]
    assert heads == ["head", "head_dist"]


@torch.no_grad()
def test_timm_model_with_a_convolution_for_a_head_returns_fp32() -> None:
    model = build_model("timm/resnetv2_18", CLASSES).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(channels_last_images())
    assert logits.shape == (2, CLASSES)
    assert logits.dtype == torch.float32


def test_timm_rates_arrive() -> None:
    model: Any = build_model("timm/test_resnet", CLASSES, dropout=0.125, stochastic_depth=0.25)
    assert model.drop_rate == 0.125
    rates = [module.drop_prob for module in model.modules() if hasattr(module, "drop_prob")]
    assert max(rates) == 0.25


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet19", {}, "resnet19 resnet18"),
        ("wrn16-4", {}, "wrn16-4 wrn-16-4"),
        ("wrn-17-4", {}, "6n+4 wrn-16-4"),
        ("timm/resnet5", {}, "timm/resnet5 timm/resnet50"),
        ("timm/resnet50.a1_in", {}, "timm/resnet50.a1_in timm/resnet50.a1_in1k"),
        ("timm/hf-hub:timm/resnet50", {}, "timm/hf-hub:timm/resnet50"),
        ("wrn-16-4", {"dropout": 0.1}, "wrn-16-4 dropout 0.1"),
        ("resnet18", {"stochastic_depth": 0.1}, "resnet18 0.1"),
        ("nf_resnet26", {"dropout": 1.0}, "dropout 0 1 1.0"),
        ("nf_resnet26", {"stochastic_depth": -0.1}, "0"),
        ("timm/vgg11", {"stochastic_depth": 0.1}, "timm/vgg11 0.1"),
        ("timm/hrnet_w18_small", {"stochastic_depth": 0.1}, "0.1"),
        ("timm/csatv2", {"dropout": 0.1}, "dropout 0.1"),
        ("timm/swinv2_tiny_window8_256", {"image_size": 96}, "image 96"),
    ],
)
def test_mistakes_end_in_one_line(name: str, options: dict[str, Any], message: str) -> None:
    with raises(ConfigError, message), torch.device("meta"):
        build_model(name, 10, **options)


@pytest.mark.parametrize("classes", [1, 0, -1, 10.0, "10", None])
def test_a_classifier_needs_two_classes(classes: int) -> None:
    with raises(ConfigError, f"2 {classes}"):
        build_model("wrn-10-1", classes)


def test_arguments_of_the_wrong_type() -> None:
    with raises(ConfigError, "None"):
        build_model(None, 10)  # type: ignore[arg-type]
    with raises(ConfigError, "dropout 'x'"):
        build_model("nf_resnet50", 10, dropout="x")  # type: ignore[arg-type]
    assert isinstance(build_model("wrn-10-1", np.int64(10)), nn.Module)


def test_without_timm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with raises(ConfigError, "nf_resnet50 timm pip"):
        build_model("nf_resnet50", 10)
    assert build_model("wrn-10-1", 10) is not None


def test_importing_the_models_needs_only_torch() -> None:
    code = "import sys, fastaug.models; sys.exit('timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
