"""Settings of the views: how many, how large, how augmented."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from fastaug.errors import ConfigError
from fastaug.normalization import Normalization, check_normalization
from fastaug.settings import Settings, flag, setting

SMALLEST = 8
"""Least side of a view in pixels."""
LARGEST = 8192
"""Largest side: a view takes size**2 memory, and a stranger's checkpoint may claim any size."""
MOST_VIEWS = 4096
"""Most views of one image."""


@dataclass(frozen=True)
class ViewConfig(Settings):
    """How each image becomes K views."""

    views: int = setting(4, at_least=1, at_most=MOST_VIEWS)
    """K, the number of random views of each image in a step."""
    size: int = setting(32, at_least=SMALLEST, at_most=LARGEST)
    """Side of the square views in pixels. FIRST:LAST, such as 128:224, is short for --initial-size
    FIRST --size LAST."""
    initial_size: int = setting(0, at_least=0)
    """Side of the views in the first epoch. It grows linearly, in multiples of 32 pixels (of 8 if
    --size is below 128), and is --size in the last fifth of the epochs. 0: --size throughout."""
    augment: Literal["none", "crop-flip", "randaugment"] = "crop-flip"
    """none: central crop; crop-flip: random crop and flip; randaugment: also RandAugment."""
    crop: Literal["resized", "pad"] = "resized"
    """resized: random area and aspect ratio, resized to --size; pad: 4 reflected pixels on each
    side, then a crop of --size (CIFAR)."""
    crop_area: tuple[float, float] = (0.35, 1.0)
    """Smallest and largest area of a resized crop, as a share of the image."""
    crop_sampling: Literal["dali", "tf"] = "dali"
    """Distribution of resized crops. dali: uniform area, log-uniform aspect ratio; tf: uniform
    aspect ratio and height, at least 0.1 of the image, as in DeepMind's NFNet code."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Filter that resizes crops to views. DeepMind's NFNet code uses bicubic."""
    antialias: bool = False
    """Widen the filter when a crop is shrunk, so that every pixel of the crop counts, as in Pillow
    (except for the outermost pixels of a view). DeepMind's NFNet code does not."""
    randaugment_policy: Literal["nfnet", "dali"] = "nfnet"
    """nfnet: the 16 operations of NFNet, which the paper uses; dali: DALI's own 14 (only in the
    dali loader)."""
    randaugment_layers: int = setting(4, at_least=1, at_most=16)
    """N, the number of operations that RandAugment applies in a row."""
    randaugment_magnitude: float = setting(5.0, at_least=0)
    """M, the strength of RandAugment's operations: 0 to 10, or 0 to 30 with the dali policy."""
    normalize: Normalization = "imagenet"
    """Data set whose channel means and standard deviations normalize the views, or MEAN STD of
    pixel values from 0 to 1, each one number or three with commas: 0.5 0.5, or
    0.485,0.456,0.406 0.229,0.224,0.225."""
    views_dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """Dtype of the views. fp16 and bf16 halve their memory and need --precision fp16 or bf16; auto:
    that of --precision."""
    views_engine: Literal["auto", "fused", "dali"] = setting("auto", free_on_resume=True)
    """What makes the views in the dali loader. fused: one kernel for the whole view (on a CPU
    prebuilt, or compiled by g++ or clang++); dali: DALI's operators; auto: fused if it passes its
    admission check, otherwise dali. The run logs the choice."""

    def __post_init__(self) -> None:
        if isinstance(self.size, str):
            raise ConfigError(
                f"--size must be a whole number, got {self.size!r}; for 128:224 in Python give "
                "initial_size=128, size=224"
            )
        super().__post_init__()
        normalize = check_normalization(flag("normalize"), self.normalize)
        object.__setattr__(self, "normalize", normalize)  # equal values compare equal
        self._check_initial_size()
        self._check_crop_area()
        self._check_magnitude()
        if self.views_engine == "fused" and self.uses_dali_policy:
            raise ConfigError(
                "--views-engine fused cannot make --randaugment-policy dali: use "
                "--views-engine dali or auto, or --randaugment-policy nfnet"
            )

    @property
    def uses_dali_policy(self) -> bool:
        """True if views get DALI's own RandAugment operations."""
        return self.augment == "randaugment" and self.randaugment_policy == "dali"

    def _check_initial_size(self) -> None:
        initial = self.initial_size
        if initial and not SMALLEST <= initial <= self.size:
            raise ConfigError(
                f"--size FIRST:LAST must have FIRST from {SMALLEST} to LAST, got "
                f"--size {initial}:{self.size} (--initial-size {initial} --size {self.size})"
            )
        if initial and self.crop == "pad":
            raise ConfigError(
                "--crop pad makes views of the images' own size, which cannot grow, got "
                f"--size {initial}:{self.size}; use --crop resized, or --size {self.size}"
            )

    def _check_crop_area(self) -> None:
        given = str(self.crop_area)
        with suppress(TypeError, ValueError):  # not two numbers
            low, high = self.crop_area
            if 0 < low <= high <= 1:
                return
            given = f"{low} {high}"
        raise ConfigError(
            f"--crop-area must be two numbers LOW HIGH with 0 < LOW <= HIGH <= 1, got {given}"
        )

    def _check_magnitude(self) -> None:
        magnitude = self.randaugment_magnitude
        if self.randaugment_policy == "nfnet" and magnitude > 10:
            raise ConfigError(f"--randaugment-magnitude must be at most 10, got {magnitude}")
        if self.randaugment_policy == "dali" and (magnitude > 30 or magnitude != int(magnitude)):
            raise ConfigError(
                "--randaugment-magnitude must be a whole number from 0 to 30 with "
                f"--randaugment-policy dali, got {magnitude}"
            )
