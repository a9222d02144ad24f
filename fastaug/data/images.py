"""An image set: labelled images that can be had one by one, decoded to uint8 [H, W, 3]."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from fastaug.errors import DataError

# A header can claim any size; 180 megapixels (Pillow's own bomb limit) are 0.5 GB decoded.
MAX_PIXELS = 180_000_000


@dataclass(frozen=True)
class ImageSet:
    """One split. Either files or an array holds the images."""

    name: str
    """What to call it in messages: the path and the split."""
    classes: tuple[str, ...]
    labels: np.ndarray
    """[N] int64, places in classes."""
    files: tuple[Path, ...] = ()
    array: np.ndarray | None = None
    """[N, H, W, 3] uint8."""

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> np.ndarray:
        """Image number index: [H, W, 3] uint8."""
        return self.array[index] if self.array is not None else decode(self.files[index])

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same images in the same order, also where the folder has moved."""
        digest = hashlib.sha256("\n".join(self.classes).encode())
        digest.update(np.ascontiguousarray(self.labels).tobytes())
        for file in self.files:
            digest.update(f"{file.parent.name}/{file.name}\n".encode())
        if self.array is not None:
            digest.update(str(self.array.shape).encode())
            # One pixel row of each image: enough to tell sets apart, and quick for 50,000 of them.
            digest.update(np.ascontiguousarray(self.array[:, self.array.shape[1] // 2]).tobytes())
        return digest.hexdigest()[:16]


def decode(file: Path) -> np.ndarray:
    """A file's image as uint8 [H, W, 3], or a DataError that names the file."""
    try:
        with Image.open(file) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are too many")
            return np.asarray(image.convert("RGB"))
    except FileNotFoundError as error:
        raise DataError(f"{file}: the file is gone") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).splitlines()[0].replace(f" {str(file)!r}", "")
        raise DataError(f"{file}: cannot be decoded ({reason}); mend or remove it") from error
