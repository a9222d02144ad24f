"""Weights and data settings that timm publishes with its networks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, get_args, get_type_hints

from torch import Tensor, nn

from fastaug.errors import ConfigError, describe_error
from fastaug.models.nf import TIMM_NAMES
from fastaug.models.timm_models import check_timm_name, require_timm
from fastaug.normalization import NORMALIZATION, check_normalization, pixel_statistics
from fastaug.runtime.logs import silenced
from fastaug.views.config import ViewConfig

log = logging.getLogger("fastaug")


def timm_name(model: str) -> str | None:
    """timm's name of a network whose published weights fit into --model; None if there is none."""
    model = model.lower()
    if model == "nfnet_f0":
        return TIMM_NAMES[model]
    return model.removeprefix("timm/") if model.startswith("timm/") else None


def pretrained_weights(model: str, image_size: int) -> dict[str, Tensor]:
    """timm's own weights of a model, from the Hugging Face cache or downloaded, for images of this
    size."""
    timm = require_timm(model)
    name = timm_name(model)
    if name is None:
        raise ConfigError(
            f"--pretrained: there are no weights of {model}; use {_alternative(timm, model)}"
        )
    check_timm_name(timm, name)
    source = timm.get_pretrained_cfg(name)
    if not source.has_weights:
        raise ConfigError(f"--pretrained: timm has no weights of {model}; use --weights FILE")
    options = {"img_size": image_size} if source.fixed_input_size else {}
    place = source.hf_hub_id or source.url
    log.info("timm's weights %s, from the cache %s or downloaded", place, _hub_cache())
    try:
        with silenced():
            network = timm.create_model(name, pretrained=True, **options)
    except FileNotFoundError as error:
        raise ConfigError(
            f"--pretrained: {place} is not in the cache {_hub_cache()} and cannot be downloaded; "
            "copy the cache of a machine that has it and set HF_HUB_OFFLINE=1, or give --weights "
            "FILE"
        ) from error
    except Exception as error:  # any class: of the connection, or of a damaged file
        raise ConfigError(
            f"--pretrained: {place} cannot be loaded ({describe_error(error)}); remove it from the "
            f"cache {_hub_cache()} to download it again, or give --weights FILE"
        ) from error
    return network.state_dict()


def _alternative(timm: ModuleType, model: str) -> str:
    if model.lower() in timm.list_models():
        return f"timm/{model}, which is another network, or --weights FILE"
    return "a timm/NAME model, or --weights FILE"


def _hub_cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return HF_HUB_CACHE


def data_settings(model: str) -> dict[str, Any]:
    """Settings of the views with which timm's weights of a model were trained."""
    if (name := timm_name(model)) is None:
        return {}
    timm = require_timm(model)
    check_timm_name(timm, name)
    source = timm.get_pretrained_cfg(name)
    normalize = check_normalization("--normalize", (source.mean, source.std))
    if pixel_statistics(normalize) == NORMALIZATION["imagenet"]:
        normalize = "imagenet"  # the shorter form of the same values
    interpolation = source.interpolation
    if interpolation not in get_args(get_type_hints(ViewConfig)["interpolation"]):
        log.info("the weights were trained with --interpolation %s; using bicubic", interpolation)
        interpolation = "bicubic"
    # Pillow and torchvision, which timm resizes with, widen the filter when they shrink.
    return {"normalize": normalize, "interpolation": interpolation, "antialias": True}


def convert_for_timm(
    model: nn.Module, weights: Mapping[str, Tensor], name: str
) -> dict[str, Tensor]:
    """Weights in timm's names and shapes, by the function that timm has for a family of models. It
    also resizes position embeddings to the network's image size."""
    timm = require_timm(f"timm/{name}")
    family = sys.modules[timm.model_entrypoint(name).__module__]
    if (convert := getattr(family, "checkpoint_filter_fn", None)) is None:
        return dict(weights)
    try:
        return convert(dict(weights), model)
    except Exception:  # weights of something else: refused or reported by what matches as they are
        return dict(weights)
