"""The input of an exported network, with numpy and Pillow only. Copied beside every export."""

import numpy as np
from PIL import Image


def preprocess(image: Image.Image, about: dict) -> np.ndarray:
    """A Pillow image and the content of preprocess.json -> [1, 3, size, size] float32."""
    if image.mode.startswith("I"):  # 16-bit gray, which convert() would clip
        image = Image.fromarray(np.rint(np.asarray(image).clip(0, 65535) / 257).astype(np.uint8))
    pixels = np.asarray(image.convert("RGB"))
    side = max(1, round(min(pixels.shape[:2]) * about["crop_share"]))
    scale = side / about["size"]
    width = max(1.0, scale) if about["antialias"] else 1.0  # of the filter
    source = np.arange(-int(2 * width) - 1, side + int(2 * width) + 1)
    center = (np.arange(about["size"])[:, None] + 0.5) * scale
    weight = FILTERS[about["interpolation"]](np.abs(source + 0.5 - center) / width)
    weight /= weight.sum(1, keepdims=True)
    inside = source.clip(0, side - 1)  # beyond the crop, its edge pixels are repeated
    rows, columns = ((length - side) // 2 + inside for length in pixels.shape[:2])
    view = weight @ pixels[rows][:, columns].transpose(2, 0, 1) @ weight.T
    mean, std = (np.reshape(about[name], (3, 1, 1)) for name in ("mean", "std"))
    return ((view - mean) / std).astype(np.float32)[None]


def bilinear(d: np.ndarray) -> np.ndarray:
    return (1 - d).clip(min=0)


def bicubic(d: np.ndarray) -> np.ndarray:
    far = ((2.5 - 0.5 * d) * d - 4) * d + 2
    return np.where(d <= 1, (1.5 * d - 2.5) * d**2 + 1, np.where(d <= 2, far, 0))


FILTERS = {"bilinear": bilinear, "bicubic": bicubic}
