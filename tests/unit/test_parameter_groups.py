"""Layer-wise rates, the rate of the classifier, and what --freeze freezes."""

from __future__ import annotations

import copy

import pytest
import torch
from expect import missing, raises
from torch import nn

import fastaug
from fastaug.config import TrainConfig
from fastaug.engine.config import OptimConfig
from fastaug.engine.parameter_groups import depths, freeze, parameter_groups
from fastaug.errors import ConfigError
from fastaug.models.head import head_parameters


def scales_of(model: nn.Module, **settings: object) -> dict[str, float]:
    groups = parameter_groups(model, TrainConfig.from_flat(**settings).optim)
    by_id = {id(p): g.get("lr_scale", 1.0) for g in groups for p in g["params"]}
    return {n: by_id[id(p)] for n, p in model.named_parameters() if id(p) in by_id}


class TestRates:
    def test_by_default_there_are_two_groups_at_the_rate_of_the_schedule(self) -> None:
        model = fastaug.build_model("resnet18", 5)
        groups = parameter_groups(model, OptimConfig())
        assert [set(group) for group in groups] == [{"params", "weight_decay"}] * 2

    def test_wrn(self) -> None:
        """wrn-16-1 has 6 blocks: the classifier's rate, and from there half of it per block."""
        scales = scales_of(fastaug.build_model("wrn-16-1", 5), layer_decay=0.5)
        assert (scales["head.weight"], scales["head.bias"]) == (1, 1)
        assert scales["blocks.5.conv1.weight"] == scales["blocks.5.skip_gain"] == 0.5
        assert scales["blocks.0.conv2.bias"] == 0.5**6
        assert scales["stem.weight"] == 0.5**7

    def test_resnet18_has_its_stem_in_one_layer(self) -> None:
        scales = scales_of(fastaug.build_model("resnet18", 5), layer_decay=0.5)
        assert scales["stem.weight"] == scales["stem_norm.bias"] == 0.5**9

    def test_a_vit_of_timm(self) -> None:
        """12 blocks; the embeddings are below them, and the last norm is with the last block."""
        model = fastaug.build_model("timm/vit_tiny_patch16_224", 5, image_size=32)
        scales = scales_of(model, layer_decay=0.75)
        assert scales["head.weight"] == 1
        assert scales["norm.weight"] == scales["blocks.11.mlp.fc1.weight"] == 0.75
        assert scales["blocks.0.attn.qkv.weight"] == pytest.approx(0.75**12)
        assert scales["pos_embed"] == scales["patch_embed.proj.weight"] == pytest.approx(0.75**13)

    @pytest.mark.parametrize("name", ["wrn-10-1", "nf_resnet26", "timm/test_vit", "timm/resnet10t"])
    def test_the_classifier_has_its_own_rate(self, name: str) -> None:
        model = fastaug.build_model(name, 5, image_size=32)
        scales = scales_of(model, lr=0.02, head_lr=0.1, layer_decay=0.9)
        heads = {n for n, scale in scales.items() if scale == pytest.approx(5)}
        outputs = {n for n, p in model.named_parameters() if p.shape[:1] == (5,)}
        assert heads == outputs
        assert max(scale for n, scale in scales.items() if n not in heads) == pytest.approx(0.9)

    def test_decay_is_as_without_layer_wise_rates(self) -> None:
        model = fastaug.build_model("nf_resnet26", 5)

        def decayed(**settings: object) -> set[int]:
            groups = parameter_groups(model, TrainConfig.from_flat(**settings).optim)
            assert {g["weight_decay"] for g in groups} == {0.0, 5e-4}
            return {id(p) for g in groups if g["weight_decay"] for p in g["params"]}

        assert decayed() == decayed(layer_decay=0.5, head_lr=1.0)

    def test_muon_leaves_what_is_no_matrix_to_adamw(self) -> None:
        model = fastaug.build_model("timm/test_vit", 5, image_size=32)
        groups = parameter_groups(model, OptimConfig(optimizer="muon"))
        fallback = {id(p) for g in groups if g.get("use_fallback") for p in g["params"]}
        names = {n for n, p in model.named_parameters() if id(p) in fallback}
        assert {"pos_embed", "cls_token", "norm.weight", "head.bias"} <= names
        assert "blocks.0.attn.qkv.weight" not in names


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


class TestFreeze:
    def test_modules_and_parameters_by_name(self) -> None:
        model = fastaug.build_model("wrn-10-1", 5)
        names = {name for name, _ in model.named_parameters()}
        frozen = freeze(model, ("stem", "blocks.1", "head.bias"))
        expected = {
            n for n in names if not n.startswith(("stem.", "blocks.1.")) and n != "head.bias"
        }
        assert trained(model) == expected
        assert frozen is not None
        assert frozen.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert f"{frozen.trained:,}" in str(frozen)

    @pytest.mark.parametrize(
        ("model", "names", "modules"),
        [
            ("timm/test_vit", ("3",), "cls_token pos_embed patch_embed blocks.0 blocks.1"),
            ("timm/test_vit", ("patch_embed", "blocks.0"), "patch_embed blocks.0"),
            ("timm/resnet10t", ("conv1", "bn1", "layer1"), "conv1 bn1 layer1"),
            ("timm/resnet10t", ("backbone",), "conv1 bn1 layer1 layer2 layer3 layer4"),
            ("wrn-10-1", ("stem.weight",), "stem.weight"),
        ],
    )
    def test_the_log_names_the_frozen_modules(self, model: str, names: tuple, modules: str) -> None:
        frozen = freeze(fastaug.build_model(model, 5, image_size=32), names)
        assert frozen is not None
        assert frozen.modules == tuple(modules.split())
        assert missing(str(frozen), modules) == []

    def test_a_name_is_no_prefix_of_another(self) -> None:
        model = fastaug.build_model("wrn-64-1", 5)  # blocks.1 and blocks.10 to blocks.19
        freeze(model, ("blocks.1",))
        assert "blocks.10.conv1.weight" in trained(model)

    @pytest.mark.parametrize(
        ("name", "stages", "frozen"),
        [
            ("wrn-16-1", 1, ("stem.",)),
            ("wrn-16-1", 2, ("stem.", "blocks.0.", "blocks.1.")),
            ("resnet18", 3, ("stem", "blocks.0.", "blocks.1.", "blocks.2.", "blocks.3.")),
            ("timm/resnet10t", 2, ("conv1.", "bn1.", "layer1.")),
            ("nf_resnet26", 4, ("stem.", "stages.0.", "stages.1.", "stages.2.")),
        ],
    )
    def test_stages_from_the_input(self, name: str, stages: int, frozen: tuple) -> None:
        model = fastaug.build_model(name, 5)
        names = {name for name, _ in model.named_parameters()}
        freeze(model, (str(stages),))
        assert trained(model) == {n for n in names if not n.startswith(frozen)}

    @pytest.mark.parametrize("name", ["wrn-10-1", "nf_resnet26", "timm/resnet10t", "timm/test_vit"])
    def test_all_stages_are_the_backbone(self, name: str) -> None:
        by_number, by_word = (fastaug.build_model(name, 5, image_size=32) for _ in range(2))
        freeze(by_number, (str(max(depths(by_number, coarse=True).values())),))
        freeze(by_word, ("backbone",))
        assert trained(by_number) == trained(by_word) == head_parameters(by_word)

    @pytest.mark.parametrize(
        ("names", "named"),
        [
            (("stam",), "--freeze stam stem"),
            (("blocks.0.conv1.wieght",), "blocks.0.conv1.weight"),
            (("xyz",), "xyz stem blocks head"),
            (("0",), "--freeze 0 4"),
            (("5",), "--freeze 5 4"),
            (("stem", "blocks", "head"), "--freeze stem blocks head"),
            (("4", "head"), "--freeze 4 head"),
        ],
    )
    def test_mistakes(self, names: tuple, named: str) -> None:
        with raises(ConfigError, named):
            freeze(fastaug.build_model("wrn-10-1", 5), names)

    def test_frozen_batch_norm_keeps_its_statistics(self) -> None:
        model = fastaug.build_model("resnet18", 5)
        freeze(model, ("2",))
        for network in (model, copy.deepcopy(model)):  # the moving average is a deep copy
            network.eval()
            network.train()
            before = {name: buffer.clone() for name, buffer in network.named_buffers()}
            network(torch.randn(4, 3, 32, 32))
            changed = {n for n, b in network.named_buffers() if not torch.equal(b, before[n])}
            assert changed == {
                n for n in before if not n.startswith(("stem", "blocks.0", "blocks.1."))
            }
            assert network.training

    def test_no_gradient_is_computed_below_a_trained_classifier(self) -> None:
        model = fastaug.build_model("resnet18", 5)
        freeze(model, ("backbone",))
        seen = []
        model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        model(torch.randn(2, 3, 8, 8)).sum().backward()
        assert seen[0].grad_fn is None
        assert {n for n, p in model.named_parameters() if p.grad is not None} == head_parameters(
            model
        )
