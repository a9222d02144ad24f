"""Preprocessing: how an image becomes the input of a trained network, for whoever uses it later.

It is the central crop of an evaluation. Exports describe it in their metadata, `preprocess.json`
has the same fields, and fastaug.predict applies it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from fastaug.normalization import pixel_statistics
from fastaug.views.config import ViewConfig
from fastaug.views.plan import central_boxes, central_share
from fastaug.views.reference import resize


@dataclass(frozen=True)
class Preprocessing:
    """Crop a square in the middle of the image, resize it, normalize it."""

    crop_share: float
    """Side of the square relative to the shorter side of the image; rounded, halves to even."""
    size: int
    """Side of the input in pixels."""
    interpolation: Literal["bicubic", "bilinear"]
    """bicubic: Keys' filter with a = -0.5."""
    antialias: bool
    """Whether the filter is widened when the square is shrunk."""
    mean: tuple[float, ...]
    """Subtracted from the pixel values 0 to 255: red, green, blue."""
    std: tuple[float, ...]
    """Divides the result."""
    decoding: str = (
        "RGB, uint8, as Pillow's convert('RGB') makes it: gray is repeated, a palette is looked "
        "up, alpha is dropped, CMYK is converted; 16-bit gray is divided by 257 and rounded; EXIF "
        "orientation is ignored"
    )
    layout: str = "NCHW, float32"

    @classmethod
    def from_config(cls, config: ViewConfig) -> Self:
        """The preprocessing of a network that was trained with these settings."""
        mean, std = pixel_statistics(config.normalize)
        return cls(
            crop_share=central_share(config),
            size=config.size,
            interpolation=config.interpolation,
            antialias=config.antialias,
            mean=mean,
            std=std,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values by field name."""
        return asdict(self)

    def apply(self, image: np.ndarray) -> Tensor:
        """[H, W, 3] uint8 -> [3, size, size] fp32, to the bit what an evaluation makes with the
        torch loader."""
        ((top, left, height, width),) = central_boxes(np.array([image.shape[:2]]), self.crop_share)
        crop = image[top : top + height, left : left + width].astype(np.float32)
        view = resize(torch.from_numpy(crop), self.size, self.interpolation, self.antialias)
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return view.sub_(mean).mul_(1 / std).permute(2, 0, 1).contiguous()
