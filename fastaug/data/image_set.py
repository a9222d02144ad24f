"""Image sets: labeled images that are read one by one, encoded or as uint8 [H, W, 3]."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

import numpy as np
from PIL import Image

from fastaug.data.dataset_images import DatasetImages, MapDataset, dataset_classes, dataset_labels
from fastaug.data.labels import index_labels
from fastaug.data.pixels import rgb_pixels
from fastaug.data.storage import Files, Storage, Subset
from fastaug.errors import DataError, DecodeError, first_line
from fastaug.views.plan import MAX_PIXELS

Split = Literal["train", "test"]
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif"}


@dataclass(frozen=True)
class Manifest:
    """Size and state of each image in a set, known before decoding; made by data/scan.py, or
    read from the index of a packed set."""

    sizes: np.ndarray
    """[N, 2] int32, height and width; 0 for bad images."""
    plain: np.ndarray
    """[N] bool: whether DALI decodes the image to the same pixel values as Pillow."""
    bad: Mapping[int, str] = field(default_factory=dict)
    """Image -> why it cannot be used."""
    stamps: np.ndarray | None = None
    """[N] uint64, those of the storage when the images were scanned; None: the storage compares
    every image with its checksum."""

    def subset(self, keep: np.ndarray) -> Manifest:
        """keep: [n] int64, ascending."""
        place = np.searchsorted(keep, np.fromiter(self.bad, np.int64, len(self.bad))).tolist()
        found = zip(place, self.bad.items(), strict=True)
        bad = {at: reason for at, (i, reason) in found if at < len(keep) and keep[at] == i}
        stamps = None if self.stamps is None else self.stamps[keep]
        return Manifest(self.sizes[keep], self.plain[keep], bad, stamps)


@dataclass(frozen=True)
class ImageSet:
    """One split of a data set: encoded images in a storage, or pixels in an array."""

    name: str
    """Path and split, for messages."""
    classes: tuple[str, ...]
    labels: np.ndarray
    """[N] int64, indices into classes."""
    storage: Storage | None = None
    array: np.ndarray | None = None
    """[N, H, W, 3] uint8."""
    manifest: Manifest | None = None
    origin: str = ""
    """Name of the set that this one is a subset of."""

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def from_files(
        cls,
        paths: Sequence[str | Path],
        labels: Sequence[int] | Sequence[str] | np.ndarray,
        classes: Sequence[str] | None = None,
    ) -> Self:
        """Image files of your own, with their labels: class names, or indices into `classes`."""
        if len(paths) == 0:
            raise DataError("the list of image files is empty; give at least one path")
        if len(paths) != len(labels):
            raise DataError(f"{len(paths):,} image files need as many labels, got {len(labels):,}")
        names = [os.fspath(path) for path in paths]
        name = f"{os.path.dirname(names[0]) or '.'} (list of {len(names):,} files)"
        known, indices = index_labels(labels, classes, name)
        return cls(name, known, indices, Files.of(names))

    @classmethod
    def from_dataset(cls, dataset: MapDataset, *, thread_safe: bool = False) -> Self:
        """The images of a torch map-style Dataset, whose items are (image, label).

        thread_safe: whether several threads may read it at once; if not, they take turns.
        """
        storage = DatasetImages(dataset, thread_safe=thread_safe)
        if len(storage) == 0:
            raise DataError(f"{type(dataset).__name__}: the Dataset is empty")
        labels = dataset_labels(storage, dataset)
        known, indices = index_labels(labels, dataset_classes(dataset), storage.name)
        return cls(storage.name, known, indices, storage)

    @property
    def bad(self) -> Mapping[int, str]:
        """Index of each unusable image -> reason."""
        return {} if self.manifest is None else self.manifest.bad

    def subset(self, keep: np.ndarray, name: str) -> ImageSet:
        """The images with these indices.

        keep: [n] int64, ascending.
        """
        return replace(
            self,
            name=name,
            labels=self.labels[keep],
            storage=None if self.storage is None else Subset(self.storage, keep),
            array=None if self.array is None else self.array[keep],
            manifest=None if self.manifest is None else self.manifest.subset(keep),
            origin=self.origin or self.name,
        )

    def image(self, index: int) -> np.ndarray:
        """The decoded image: [H, W, 3] uint8."""
        if self.array is not None:
            return self.array[index]
        return decode(self.encoded(index), self.where(index))

    def encoded(self, index: int) -> bytes | memoryview:
        """The stored bytes of an image; not available for a set in an array."""
        assert self.storage is not None
        try:
            return self.storage.read(index)
        except FileNotFoundError as error:
            raise DataError(
                f"{self.where(index)}: the file is gone; restore it, or create an empty file"
            ) from error
        except OSError as error:
            raise DataError(f"{self.where(index)}: cannot be read ({error.strerror})") from error

    def where(self, index: int) -> str:
        """The place of an image, for messages."""
        return f"{self.name}, image {index}" if self.storage is None else self.storage.where(index)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for the same images in the same order, even if the folder was moved."""
        digest = hashlib.sha256(os.fsencode("\n".join(self.classes)))
        digest.update(np.ascontiguousarray(self.labels).tobytes())
        if self.storage is not None:
            self.storage.update_fingerprint(digest)
        if self.array is not None:
            digest.update(str(self.array.shape).encode())
            # One row of pixels per image: enough to tell sets apart, and fast for 50,000 images.
            digest.update(np.ascontiguousarray(self.array[:, self.array.shape[1] // 2]).tobytes())
        return digest.hexdigest()[:16]


def decode(content: bytes | memoryview, where: str) -> np.ndarray:
    """Decode an image to uint8 [H, W, 3]; a DataError names where it came from."""
    with open_image(content, where) as image:
        return rgb_pixels(image)


def is_storage_error(error: DataError) -> bool:
    """Whether an image could not be read, rather than decoded: Pillow's OSErrors have no errno."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno is not None


@contextmanager
def open_image(content: bytes | memoryview, where: str) -> Iterator[Image.Image]:
    """Pillow's image with its header read; errors now or within the context become DecodeErrors."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels, too large")
            yield image
    except Exception as error:  # damaged headers raise almost anything in Pillow's many readers
        if not content:
            reason = "it is empty"
        elif isinstance(error, Image.UnidentifiedImageError):
            reason = "not an image of a known format"
        else:
            reason = first_line(error)
        raise DecodeError(f"{where}: cannot be decoded ({reason})", content) from error
