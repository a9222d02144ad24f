"""Pixels: from Pillow's images to uint8 [H, W, 3], and to a file that every decoder reads."""

from __future__ import annotations

import numpy as np
from PIL import Image


def rgb_pixels(image: Image.Image) -> np.ndarray:
    """[H, W, 3] uint8."""
    if image.mode.startswith("I"):  # 16 bits or more, which Pillow would clip to 255
        values = np.asarray(image).astype(np.float64).clip(0, 65535) / 257
        return np.repeat(np.rint(values).astype(np.uint8)[..., None], 3, axis=-1)
    return np.asarray(image.convert("RGB"))


def to_ppm(pixels: np.ndarray) -> bytes:
    """[H, W, 3] uint8 as a PPM file, which every decoder reads losslessly."""
    height, width, _ = pixels.shape
    return b"P6 %d %d 255\n" % (width, height) + np.ascontiguousarray(pixels).tobytes()
