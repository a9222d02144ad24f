"""What views are made like, besides their plans."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import torch

from fastaug.errors import ConfigError, suggest
from fastaug.views.batch import VIEW_DTYPES
from fastaug.views.config import ViewConfig
from fastaug.views.reference import NORMALIZATION

Interpolation = Literal["bilinear", "bicubic"]
Border = Literal["reflect", "mirror", "edge", "fill"]
Normalization = Literal["imagenet", "cifar"]
INTERPOLATIONS: tuple[str, ...] = get_args(Interpolation)
BORDERS: tuple[str, ...] = get_args(Border)
"""In the order of `Border` in cuda/views.h."""
_AS_THEY_ARE = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@dataclass(frozen=True)
class RenderSpec:
    interpolation: Interpolation = "bicubic"
    antialias: bool = False
    """Shrinking widens the filter, as in Pillow; which leaves out what lies beyond the crop, where
    here its edge is repeated."""
    border: Border = "reflect"
    """What lies beyond the image where a box reaches beyond it. reflect: the image mirrored without
    its edge pixel; mirror: with it; edge: the edge pixel repeated; fill: 128."""
    normalize: Normalization | None = "imagenet"
    """Whose means and deviations; None leaves levels of 0 to 255."""
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("interpolation", self.interpolation, INTERPOLATIONS),
            ("border", self.border, BORDERS),
            ("normalize", self.normalize, (*NORMALIZATION, None)),
            ("dtype", self.dtype, tuple(VIEW_DTYPES.values())),
        ):
            if value not in allowed:
                hint = suggest(str(value), map(str, allowed))
                raise ConfigError(f"{name} cannot be {value!r}: {hint}")

    @cached_property
    def mean(self) -> tuple[float, ...]:
        """Of each channel, in fp32."""
        mean, _ = NORMALIZATION[self.normalize] if self.normalize else _AS_THEY_ARE
        return tuple(np.array(mean, np.float32).tolist())

    @cached_property
    def factor(self) -> tuple[float, ...]:
        """What the difference to the mean is multiplied by; rounded as DALI and torch do."""
        _, deviation = NORMALIZATION[self.normalize] if self.normalize else _AS_THEY_ARE
        return tuple((1 / np.array(deviation, np.float32)).tolist())

    @classmethod
    def of(cls, config: ViewConfig) -> RenderSpec:
        """The spec that the settings name."""
        return cls(
            interpolation=config.interpolation,
            antialias=config.antialias,
            normalize=config.normalize,
            dtype=VIEW_DTYPES[config.views_dtype],
        )
