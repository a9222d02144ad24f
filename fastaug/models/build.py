"""Models by name."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from numbers import Integral

import torch
from torch import nn

from fastaug.errors import ConfigError, first_line
from fastaug.models.config import ModelConfig
from fastaug.models.nf import TIMM_NAMES, build_nf
from fastaug.models.resnet18 import ResNet18
from fastaug.models.timm_models import (
    build_timm,
    make_standardized_weights_contiguous,
    patch_size,
)
from fastaug.models.wrn import WideResNet
from fastaug.runtime.device import physical_memory

WRN_NAME = re.compile(r"wrn-(\d{1,4})-(\d{1,4})")
RESNET18_NAME = re.compile(r"resnet18(?:-([1-9]\d{0,3}))?")
SUGGESTIONS = ("wrn-16-4", "wrn-16-8", "wrn-16-16", "wrn-22-4", "wrn-28-4", *TIMM_NAMES, "resnet18")


def build_model(
    name: str,
    num_classes: int,
    *,
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    image_size: int | None = None,
    several_sizes: bool = False,
) -> nn.Module:
    """An untrained network: images [N, 3, H, W] -> logits [N, C], fp32 under autocast too.

    name: wrn-DEPTH-WIDTH, nf_resnet26, nf_resnet50, nf_resnet101, nfnet_f0, resnet18, resnet18-N
    with N channels in its first stage in place of 64, or timm/NAME.
    dropout: rate before the last layer; not in wrn and resnet18.
    stochastic_depth: rate of the deepest block, from 0 in the first; not in wrn and resnet18.
    image_size: used only by timm models that are built for one size, such as ViT.
    several_sizes: the network also takes smaller images, if it can.
    """
    if not isinstance(name, str):
        raise ConfigError(f"the model's name must be a string, got {name!r}")
    if not isinstance(num_classes, Integral) or num_classes < 2:
        raise ConfigError(f"num_classes must be a whole number of at least 2, got {num_classes!r}")
    num_classes = int(num_classes)
    rates = {"dropout": dropout, "stochastic depth": stochastic_depth}
    for setting, rate in rates.items():
        if not isinstance(rate, (int, float)) or not 0 <= rate < 1:
            raise ConfigError(f"{setting} must be at least 0 and below 1, got {rate!r}")

    name = name.lower()
    wrn, resnet18 = WRN_NAME.fullmatch(name), RESNET18_NAME.fullmatch(name)
    if wrn or resnet18:
        for setting, rate in rates.items():
            if rate:
                raise ConfigError(f"{name} has no {setting}, got {rate}; set it to 0")
    model: nn.Module
    if wrn:
        model = WideResNet(int(wrn[1]), int(wrn[2]), num_classes)
    elif resnet18:
        model = ResNet18(num_classes, int(resnet18[1] or 64))
    elif name in TIMM_NAMES:
        model = build_nf(name, num_classes, dropout=dropout, stochastic_depth=stochastic_depth)
    elif name.startswith("timm/"):
        model = build_timm(
            name.removeprefix("timm/"),
            num_classes,
            dropout=dropout,
            stochastic_depth=stochastic_depth,
            image_size=image_size,
            several_sizes=several_sizes,
        )
    else:
        nearest = ", ".join(get_close_matches(name, SUGGESTIONS, cutoff=0.0))
        raise ConfigError(f"unknown model {name}; nearest: {nearest}; or timm/NAME (a timm model)")
    model = model.to(memory_format=torch.channels_last)
    if name in TIMM_NAMES or name.startswith("timm/"):
        make_standardized_weights_contiguous(model)
    return model


def build_configured_model(
    config: ModelConfig, num_classes: int, image_size: int, *, several_sizes: bool = False
) -> nn.Module:
    """The network that the settings name."""
    return build_model(
        config.model,
        num_classes,
        dropout=config.dropout,
        stochastic_depth=config.stochastic_depth,
        image_size=image_size,
        several_sizes=several_sizes,
    )


def layers_in(name: str) -> int:
    """The least number of layers of a network; 0 if its name does not say."""
    wrn = WRN_NAME.fullmatch(name.lower())
    return int(wrn[1]) if wrn else 0


def check_configured_model(config: ModelConfig, sizes: Sequence[int]) -> nn.Module:
    """The network on the meta device, or ConfigError if it cannot be built, is larger than the
    memory, or cannot take views of all sizes.

    sizes: in ascending order. Nothing is computed.
    """
    *smaller, largest = sizes
    with torch.device("meta"), torch.no_grad():
        model = build_configured_model(config, 2, largest, several_sizes=bool(smaller)).eval()
        size_in_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
        if 2 * size_in_bytes > physical_memory():
            raise ConfigError(
                f"--model {config.model}: its weights and their gradients take "
                f"{2 * size_in_bytes / 1e9:,.0f} GB, and this machine has "
                f"{physical_memory() / 1e9:,.0f}; choose a smaller one"
            )
        for size in sizes if smaller else ():
            if reason := _why_not(model, size):
                raise ConfigError(
                    f"{config.model} cannot take views of {size} px, a size of "
                    f"--size {smaller[0]}:{largest} ({reason}); give one --size, or choose another "
                    "model"
                )
    return model


def check_patches(name: str, model: nn.Module, size: int) -> None:
    """Raise ConfigError if the model's patches do not cover views of --size: timm's models ignore
    the pixels that are left."""
    patch = patch_size(model)
    if size % patch:
        below = size // patch * patch
        nearest = " or ".join(str(near) for near in (below, below + patch) if near)
        raise ConfigError(f"--size {size}: {name} has patches of {patch} px; nearest: {nearest}")


def _why_not(model: nn.Module, size: int) -> str:
    """Why the network cannot take images of a size; empty if it can, or if that is unknown."""
    try:
        model(torch.empty(2, 3, size, size))
    except Exception as error:  # each network has its own checks
        only_here = isinstance(error, NotImplementedError) or "meta" in str(error)
        return "" if only_here else first_line(error)
    return ""
