from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch
from expect import missing, raises
from torch import nn

import fastaug
from fastaug.config import TrainConfig
from fastaug.engine.config import OptimConfig
from fastaug.engine.learner import Learner
from fastaug.engine.optim import build_optimizer, learning_rate, load_optimizer
from fastaug.engine.optim_report import describe_optimizer
from fastaug.engine.parameter_groups import parameter_groups
from fastaug.errors import ConfigError
from fastaug.recipes import get_recipe


def undecayed(model: nn.Module) -> set[str]:
    _, group = parameter_groups(model, OptimConfig(weight_decay=0.1))
    assert group["weight_decay"] == 0
    free = {id(p) for p in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in free}


class TestDecayGroups:
    def test_wrn(self) -> None:
        model = fastaug.build_model("wrn-10-1", 5)
        names = undecayed(model)
        assert names == {n for n, _ in model.named_parameters() if n.endswith(("bias", "gain"))}
        assert {"blocks.0.skip_gain", "stem.bias", "head.bias"} <= names
        assert {"blocks.0.conv1.weight", "head.weight"}.isdisjoint(names)

    def test_wrn_16_4_decays_as_many_weights_as_the_paper_s(self) -> None:
        model = fastaug.build_model("wrn-16-4", 100)
        decayed, free = parameter_groups(model, OptimConfig())
        assert sum(p.numel() for p in decayed["params"]) == 2_768_304
        assert sum(p.numel() for p in decayed["params"] + free["params"]) == 2_770_666

    def test_nf_resnet_gains_are_free_though_they_have_four_dimensions(self) -> None:
        model = fastaug.build_model("nf_resnet26", 5)
        names = undecayed(model)
        gains = {n: p for n, p in model.named_parameters() if "gain" in n}
        assert any(p.ndim == 4 for p in gains.values())
        assert gains.keys() <= names
        assert "stages.0.0.skipinit_gain" in names
        assert {"stem.conv.weight", "stages.0.0.conv2.weight", "head.fc.weight"}.isdisjoint(names)
        biases = {n for n, _ in model.named_parameters() if n.endswith("bias")}
        assert names == gains.keys() | biases

    def test_batch_norm(self) -> None:
        model = fastaug.build_model("resnet18", 5)
        names = undecayed(model)
        norms = {
            f"{name}.{kind}"
            for name, module in model.named_modules()
            if isinstance(module, nn.BatchNorm2d)
            for kind in ("weight", "bias")
        }
        assert names == norms | {"head.bias"}

    def test_what_a_timm_model_names_itself(self) -> None:
        model = fastaug.build_model("timm/vit_tiny_patch16_224", 5, image_size=32)
        assert {"pos_embed", "cls_token"} <= undecayed(model)


class TestOptimizer:
    def test_momentum_and_decay_follow_the_formula(self) -> None:
        model = nn.Linear(2, 2)
        weight = model.weight.detach().clone()
        config = TrainConfig.from_flat(lr=0.1, momentum=0.9, weight_decay=0.01)
        optimizer = build_optimizer(model, config.optim)
        velocity = torch.zeros_like(weight)
        for _ in range(3):
            model.zero_grad()
            (model.weight.sum() + model.bias.sum()).backward()
            optimizer.step()
            velocity = 0.9 * velocity + (1 + 0.01 * weight)
            weight = weight - 0.1 * velocity
        torch.testing.assert_close(model.weight.detach(), weight)

    def test_without_apex_it_says_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # PyPI's apex: a package of that name without optimizers.
        monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
        with raises(ConfigError, "apex --optimizer sgd"):
            build_optimizer(nn.Linear(2, 2), TrainConfig.from_flat(optimizer="apex").optim)

    def test_sgd_needs_no_timm_and_others_say_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "timm.optim", None)
        build_optimizer(nn.Linear(2, 2), TrainConfig().optim)
        with raises(ConfigError, "--optimizer lamb timm"):
            build_optimizer(nn.Linear(2, 2), TrainConfig.from_flat(optimizer="lamb").optim)

    def test_apex_is_used_on_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        optimizers = ModuleType("apex.optimizers")
        optimizers.FusedSGD = torch.optim.SGD  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
        monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
        optimizer = build_optimizer(
            nn.Linear(2, 2), TrainConfig.from_flat(optimizer="apex", lr=0.3).optim
        )
        assert [group["weight_decay"] for group in optimizer.param_groups] == [5e-4, 0.0]
        assert optimizer.defaults["momentum"] == 0.9
        assert optimizer.defaults["lr"] == 0.3


def lines(head_is_new: bool = False, **settings: object) -> list[str]:
    learner = Learner(TrainConfig.from_flat(**settings), 5, torch.device("cpu"))
    return list(describe_optimizer(learner, head_is_new=head_is_new))


def warnings(head_is_new: bool = False, **settings: object) -> list[str]:
    return [line for line in lines(head_is_new, **settings) if line.startswith("warning: ")]


class TestStartLines:
    @pytest.mark.parametrize(
        ("settings", "line"),
        [
            ({}, "sgd with momentum 0.9, lr 0.04, weight decay 0.0005, cosine schedule"),
            (
                {"nesterov": True, "lr": 0.001, "lr_scaling": "unique-images", "batch_size": 32},
                "sgd with Nesterov momentum 0.9, lr 0.008, weight decay 0.0005, cosine schedule",
            ),
            (
                # 3 blocks and the stem below the classifier: 0.001 / 16
                {"optimizer": "adamw", "lr": 1e-3, "head_lr": 0.01, "layer_decay": 0.5}
                | {"weight_decay": 0.05, "warmup_epochs": 1, "schedule": "halving"},
                "adamw, lr 0.001 (head 0.01, first layer 6.25e-05), weight decay 0.05, "
                "halving schedule after 1 epoch of warm-up",
            ),
            (
                {"lr": 0.1, "layer_decay": 0.5, "freeze": ("1",), "warmup_epochs": 2.5},
                "sgd with momentum 0.9, lr 0.1 (first trained layer 0.0125), weight decay 0.0005, "
                "cosine schedule after 2.5 epochs of warm-up",
            ),
            (
                {"layer_decay": 0.5, "freeze": ("backbone",), "schedule": "constant"},
                "sgd with momentum 0.9, lr 0.04, weight decay 0.0005, constant schedule",
            ),
        ],
    )
    def test_the_optimizer(self, settings: dict, line: str) -> None:
        assert lines(**settings, views=4)[0] == line

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ({"optimizer": "adamw", "lr": 0.04}, "--lr 0.04 adamw"),
            ({"optimizer": "lion", "lr": 0.01, "lr_scaling": "unique-images"}, "--lr lion"),
            ({"lr": 0.0}, "--lr 0"),
            ({"layer_decay": 0.0}, "--layer-decay 0"),
            ({"freeze": ("backbone",)}, "--freeze backbone --weights --pretrained"),
            ({"optimizer": "adamw", "lr": 1e-3, "momentum": 0.5}, "--momentum 0.5 adamw"),
            ({"optimizer": "adamw", "lr": 1e-3, "nesterov": True}, "--nesterov adamw"),
            ({"optimizer": "rmsprop", "lr": 1e-3, "nesterov": True}, "--nesterov rmsprop"),
        ],
    )
    def test_warnings(self, settings: dict, named: str) -> None:
        (warning,) = warnings(**settings)
        assert missing(warning, named) == []

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"optimizer": "adamw", "lr": 0.003},
            {"optimizer": "sgd", "lr": 0.4, "momentum": 0.5, "nesterov": True},
            {"optimizer": "muon", "lr": 1e-3, "momentum": 0.5, "nesterov": True},
            {"optimizer": "adamw", "lr": 1e-3, "nesterov": True, "recipe": "shapes"},
            {"freeze": ("backbone",), "weights": "w.pt"},
            {"freeze": ("head",), "weights": "w.pt"},
        ],
    )
    def test_no_warning(self, settings: dict) -> None:
        assert warnings(**settings) == []

    def test_a_new_head_that_is_frozen(self) -> None:
        (warning,) = warnings(head_is_new=True, freeze=("stem", "head.bias"), weights="w.pt")
        assert missing(warning, "--freeze stem head.bias") == []
        assert warnings(head_is_new=True, freeze=("stem",), weights="w.pt") == []


class TestSchedules:
    def test_wrn_halving(self) -> None:
        """Constant at B_u * 2^alpha for E/2, then halved every E/20: ten times in all."""
        config = get_recipe("cifar100-wrn-16-4")
        steps = 12_500
        assert config.images_per_step == 4
        peak = 4 * 2.0**-10
        total = config.optim.epochs * steps
        rates = [
            learning_rate(t, steps, config.optim, config.images_per_step)
            for t in range(0, total, 400)
        ]
        assert rates[0] == peak
        assert learning_rate(total // 2 - 1, steps, config.optim, config.images_per_step) == peak
        assert learning_rate(total // 2, steps, config.optim, config.images_per_step) == peak / 2
        assert learning_rate(total - 1, steps, config.optim, config.images_per_step) == peak / 2**10
        assert len(set(rates)) == 11
        # E/20 = 6.4 epochs is 80,000 updates: no whole number of epochs is assumed.
        assert (
            learning_rate(total // 2 + 79_999, steps, config.optim, config.images_per_step)
            == peak / 2
        )
        assert (
            learning_rate(total // 2 + 80_000, steps, config.optim, config.images_per_step)
            == peak / 4
        )

    def test_nf_resnet_cosine_is_not_scaled(self) -> None:
        config = get_recipe("imagenet-nf-resnet50")
        total = config.optim.epochs * 100
        alpha = -2
        for update in (0, 1, total // 3, total // 2, total - 1):
            expected = 2.0 ** (alpha - 1) * (1 + math.cos(math.pi * update / total))
            assert learning_rate(
                update, 100, config.optim, config.images_per_step
            ) == pytest.approx(expected)

    def test_nfnet_warm_up_then_cosine(self) -> None:
        config = get_recipe("imagenet-nfnet-f0")
        total, warm = 180 * 10, 5 * 10
        assert learning_rate(0, 10, config.optim, config.images_per_step) == 0
        assert learning_rate(25, 10, config.optim, config.images_per_step) == pytest.approx(0.2)
        assert learning_rate(warm, 10, config.optim, config.images_per_step) == pytest.approx(0.4)
        middle = warm + (total - warm) // 2
        assert learning_rate(middle, 10, config.optim, config.images_per_step) == pytest.approx(0.2)
        assert learning_rate(total, 10, config.optim, config.images_per_step) == pytest.approx(0)

    @pytest.mark.parametrize("schedule", ["halving", "cosine", "constant"])
    def test_warm_up_comes_before_every_schedule(self, schedule: str) -> None:
        config = TrainConfig.from_flat(epochs=8, lr=0.2, schedule=schedule, warmup_epochs=1.5).optim
        rates = [learning_rate(update, 10, config, 1) for update in range(80)]
        assert rates[:15] == pytest.approx([0.2 * update / 15 for update in range(15)])
        assert rates[15] == pytest.approx(0.2)
        expected = {
            "halving": [0.2] * 25 + [0.2 / 2**k for k in range(1, 11) for _ in range(4)],
            "cosine": [0.1 * (1 + math.cos(math.pi * k / 65)) for k in range(65)],
            "constant": [0.2] * 65,
        }
        assert rates[15:] == pytest.approx(expected[schedule])

    def test_resnet18_cosine_is_scaled_by_the_unique_images(self) -> None:
        config = get_recipe("cifar100-resnet18")
        assert config.images_per_step == 33
        total = config.optim.epochs * 10
        for update in (0, total // 4, total // 2):
            expected = 33 * 2.0**-11 * (1 + math.cos(math.pi * update / total))
            assert learning_rate(update, 10, config.optim, config.images_per_step) == pytest.approx(
                expected
            )


def test_momentum_in_another_memory_format_is_the_same_momentum() -> None:
    """torch's fused SGD on a CPU takes the values in the order of their memory."""
    config = TrainConfig.from_flat(lr=0.1).optim

    def conv(layout: torch.memory_format) -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(4, 4, 3, bias=False).to(memory_format=layout)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            grad = torch.arange(parameter.numel(), dtype=torch.float32).view_as(parameter)
            parameter.grad = torch.empty_like(parameter).copy_(grad)
        optimizer.step()

    old, new = conv(torch.channels_last), conv(torch.contiguous_format)
    first, second = build_optimizer(old, config), build_optimizer(new, config)
    step(old, first)
    new.load_state_dict(old.state_dict())
    load_optimizer(second, first.state_dict())
    step(old, first)
    step(new, second)
    torch.testing.assert_close(list(new.parameters()), list(old.parameters()), rtol=0, atol=0)
