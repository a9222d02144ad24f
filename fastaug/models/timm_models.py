"""Image classifiers from timm: `timm/NAME` or `timm/NAME.TAG`."""

from contextlib import suppress
from difflib import get_close_matches
from types import ModuleType

import torch
from torch import nn

from fastaug.errors import ConfigError
from fastaug.models.head import keep_head_in_fp32


def require_timm(name: str) -> ModuleType:
    """Import timm for the model `name`; `import fastaug` itself needs only torch."""
    try:
        import timm
    except ImportError as error:
        raise ConfigError(f"model {name} needs timm: pip install timm ({error})") from error
    return timm


def build_timm(
    name: str,
    num_classes: int,
    *,
    dropout: float,
    stochastic_depth: float,
    image_size: int | None,
    several_sizes: bool,
) -> nn.Module:
    """Untrained network: images [N, 3, H, W] -> logits [N, C] fp32. `name` is timm's, without the
    prefix; a tag only decides for which image size and weights the network is made."""
    timm = require_timm(f"timm/{name}")
    check_timm_name(timm, name)
    options: dict[str, float] = {}
    if dropout:
        options["drop_rate"] = dropout
    if stochastic_depth:
        options["drop_path_rate"] = stochastic_depth
    if image_size is not None and timm.get_pretrained_cfg(name).fixed_input_size:
        options["img_size"] = image_size
    try:
        model = _create(timm, name, num_classes, options, several_sizes)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        given = f"dropout {dropout}, stochastic depth {stochastic_depth}, image size {image_size}"
        reason = " ".join(str(error).split())
        raise ConfigError(f"timm/{name} cannot be built with {given}: {reason}") from error
    if dropout and not _has_dropout(model, dropout):
        raise ConfigError(f"timm/{name} ignores dropout, got {dropout}; set it to 0")
    if stochastic_depth and not _has_stochastic_depth(model):
        raise ConfigError(
            f"timm/{name} ignores stochastic depth, got {stochastic_depth}; set it to 0"
        )
    return keep_head_in_fp32(model, num_classes)


def check_timm_name(timm: ModuleType, name: str) -> None:
    """Refuse what is neither NAME nor NAME.TAG; timm would also accept, e.g., hf-hub:NAME."""
    known = timm.list_pretrained() if "." in name else timm.list_models()
    if name not in known:
        nearest = [f"timm/{match}" for match in get_close_matches(name, known, cutoff=0.0)]
        raise ConfigError(f"unknown model timm/{name}; nearest: {', '.join(nearest)}")


def _create(
    timm: ModuleType, name: str, num_classes: int, options: dict[str, float], several_sizes: bool
) -> nn.Module:
    """several_sizes: let a model that is built for one size take others, if it has that option."""
    if several_sizes and "img_size" in options:
        with suppress(TypeError):  # unknown to this model
            dynamic = options | {"dynamic_img_size": True}
            return timm.create_model(name, num_classes=num_classes, **dynamic)
    return timm.create_model(name, num_classes=num_classes, **options)


def patch_size(model: nn.Module) -> int:
    """Side of the patches into which a network cuts its images, in pixels; 1 for other networks,
    and for those that pad the images to whole patches."""
    if not hasattr(model, "patch_embed") and not hasattr(model, "stem"):
        return 1  # timm is not imported for a network that is not its own
    from timm.layers import PatchEmbed

    for name in ("patch_embed", "stem"):
        part = getattr(model, name, None)
        if isinstance(part, PatchEmbed) and not part.dynamic_img_pad:
            return max(part.patch_size)
    return 1


def make_standardized_weights_contiguous(model: nn.Module) -> None:
    """Convolutions that standardize their weights see each filter as a row: contiguous weights need
    no copy for that, and their gradients have the same strides, as DDP wants."""
    from timm.layers import std_conv

    kinds = (
        *(std_conv.StdConv2d, std_conv.StdConv2dSame),
        *(std_conv.ScaledStdConv2d, std_conv.ScaledStdConv2dSame),
    )
    for module in model.modules():
        if isinstance(module, kinds):
            weight = module.weight
            # Not contiguous(): it accepts any strides for sides of 1.
            rows = torch.empty_like(weight, memory_format=torch.contiguous_format)
            weight.data = rows.copy_(weight.data)


# Some models accept a rate and ignore it (convmixer, hrnet, res2net), so check the modules.


def _has_dropout(model: nn.Module, rate: float) -> bool:
    return any(
        rate in (getattr(module, "p", None), getattr(module, "drop_rate", None))
        for module in model.modules()
    )


def _has_stochastic_depth(model: nn.Module) -> bool:
    from timm.layers.drop import DropPath

    return any(isinstance(module, DropPath) and module.drop_prob > 0 for module in model.modules())
