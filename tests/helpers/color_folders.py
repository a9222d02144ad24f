"""Class folders of small colored images, from which a class can be learned in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("blue", "green", "red")


def color_image(label: int, rng: np.random.Generator, size: int) -> np.ndarray:
    """[size, size, 3] uint8: noise with one channel raised."""
    image = rng.integers(0, 120, (size, size, 3))
    image[..., 2 - label] += 100
    return image.astype(np.uint8)


def write_folder(root: Path, counts: dict[str, int], size: int = 20) -> Path:
    """root/SPLIT/CLASS/NN.jpg with counts[SPLIT] images per class."""
    rng = np.random.default_rng(0)
    for split, count in counts.items():
        for label, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(color_image(label, rng, size)).save(folder / f"{i:02}.jpg")
    return root
