"""Recipes: a run is a function that returns a TrainConfig. Flags change single values of it.

What the paper leaves open is chosen here and said in the docstring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, suggest


def shapes() -> TrainConfig:
    """The built-in data set on any machine, in about 2 minutes on two CPU cores: the defaults.

    Crops of 0.08 of the area, as on ImageNet, would miss half of the shapes.
    """
    return TrainConfig()


def cifar100_wrn_16_4() -> TrainConfig:
    """WRN-16-4 on CIFAR-100 at K=16. Rate and epochs: from the middle of the paper's grids."""
    return TrainConfig(
        recipe="cifar100-wrn-16-4",
        data="",
        model="wrn-16-4",
        crop="pad",
        normalise="cifar",
        views=16,
        batch_size=64,
        epochs=128,
        lr=2**-10,
        lr_scaling="unique-images",
        schedule="halving",
        tta=16,
    )


def cifar100_resnet18() -> TrainConfig:
    """ResNet-18 with batch norm on CIFAR-100 (the paper's appendix), K=16."""
    return replace(
        cifar100_wrn_16_4(),
        recipe="cifar100-resnet18",
        model="resnet18",
        batch_size=528,
        epochs=304,
        lr=2**-10,
        schedule="cosine",
    )


def imagenet_nf_resnet50() -> TrainConfig:
    """NF-ResNet-50 on ImageNet at K=8. bf16: the paper does not say; the last layer is fp32.

    Crops as TensorFlow draws them, which the paper's data pipeline is written in.
    """
    return TrainConfig(
        recipe="imagenet-nf-resnet50",
        data="",
        model="nf_resnet50",
        dropout=0.25,
        stochastic_depth=0.1,
        size=224,
        crop_area=(0.08, 1.0),
        crop_sampling="tf",
        views=8,
        batch_size=1024,
        label_smoothing=0.1,
        epochs=128,
        lr=2**-2,
        schedule="cosine",
        precision="bf16",
        tta=8,
    )


def imagenet_nf_resnet101() -> TrainConfig:
    """NF-ResNet-101 on ImageNet at K=8."""
    return replace(imagenet_nf_resnet50(), recipe="imagenet-nf-resnet101", model="nf_resnet101")


def imagenet_nfnet_f0() -> TrainConfig:
    """NFNet-F0 on ImageNet with RandAugment at K=8, without AGC, CutMix and Mixup."""
    return replace(
        imagenet_nf_resnet50(),
        recipe="imagenet-nfnet-f0",
        model="nfnet_f0",
        dropout=0.2,
        stochastic_depth=0.25,
        augment="randaugment",
        epochs=180,
        lr=0.4,
        schedule="warmup-cosine",
        weight_decay=2e-5,
    )


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    make().recipe: make
    for make in (
        shapes,
        cifar100_wrn_16_4,
        cifar100_resnet18,
        imagenet_nf_resnet50,
        imagenet_nf_resnet101,
        imagenet_nfnet_f0,
    )
}


def get_recipe(name: str) -> TrainConfig:
    if name not in RECIPES:
        raise ConfigError(f"no recipe {name!r}: {suggest(name, RECIPES)}")
    return RECIPES[name]()
