"""RenderSpec: how views are made from their plans."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import torch

from fastaug.errors import ConfigError, suggest
from fastaug.normalization import Normalization, check_normalization, pixel_statistics
from fastaug.views.batch import VIEW_DTYPES, view_dtype
from fastaug.views.config import ViewConfig

Interpolation = Literal["bilinear", "bicubic"]
Border = Literal["reflect", "mirror", "edge", "fill"]
INTERPOLATIONS: tuple[str, ...] = get_args(Interpolation)
BORDERS: tuple[str, ...] = get_args(Border)
"""In the order of `enum Border` in cuda/views.h."""
_NOT_NORMALIZED = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@dataclass(frozen=True)
class RenderSpec:
    """Resampling, border, normalization and dtype of views."""

    interpolation: Interpolation = "bicubic"
    antialias: bool = False
    """Widen the filter when shrinking, as Pillow does. Beyond the crop, its edge pixel is repeated;
    Pillow ignores pixels there."""
    border: Border = "reflect"
    """Pixels of a box that lie outside the image. reflect: the image mirrored without its edge
    pixel; mirror: with it; edge: the edge pixel repeated; fill: 128."""
    normalize: Normalization | None = "imagenet"
    """Data set whose means and deviations are used, or (mean, deviation) of pixel values from 0 to
    1; None: pixel values stay 0 to 255."""
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("interpolation", self.interpolation, INTERPOLATIONS),
            ("border", self.border, BORDERS),
            ("dtype", self.dtype, tuple(VIEW_DTYPES.values())),
        ):
            if value not in allowed:
                hint = suggest(str(value), map(str, allowed))
                raise ConfigError(f"{name} cannot be {value!r}: {hint}")
        if self.normalize is not None:
            object.__setattr__(self, "normalize", check_normalization("normalize", self.normalize))

    @cached_property
    def mean(self) -> tuple[float, ...]:
        """Channel means in fp32."""
        mean, _ = pixel_statistics(self.normalize) if self.normalize else _NOT_NORMALIZED
        return tuple(np.array(mean, np.float32).tolist())

    @cached_property
    def factor(self) -> tuple[float, ...]:
        """Reciprocal channel deviations, rounded to fp32 as DALI and torch do."""
        _, deviation = pixel_statistics(self.normalize) if self.normalize else _NOT_NORMALIZED
        return tuple((1 / np.array(deviation, np.float32)).tolist())

    @classmethod
    def of(cls, config: ViewConfig) -> RenderSpec:
        """The spec that the settings name."""
        return cls(
            interpolation=config.interpolation,
            antialias=config.antialias,
            normalize=config.normalize,
            dtype=view_dtype(config.views_dtype),
        )
