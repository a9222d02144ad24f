"""Image sets: labeled images that are read one by one, encoded or as uint8 [H, W, 3]."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from fastaug.errors import DataError, first_line
from fastaug.views.plan import MAX_PIXELS

Split = Literal["train", "test"]
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif"}


@dataclass(frozen=True)
class Spans:
    """Encoded images in shards: each is bytes [offset, offset + size) of a shard."""

    shards: tuple[Path, ...]
    shard: np.ndarray
    """[N] int32, indices into shards."""
    offset: np.ndarray
    """[N] int64."""
    size: np.ndarray
    """[N] int64."""
    continued: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Image -> (offset, size) of the parts after its first. RecordIO splits an image that contains
    the format's magic number."""
    separator: bytes = b""
    """Bytes between the parts of an image."""

    def read(self, index: int) -> bytes:
        parts = ((self.offset[index], self.size[index]), *self.continued.get(index, ()))
        with open(self.shards[self.shard[index]], "rb") as file:
            read = [os.pread(file.fileno(), int(size), int(offset)) for offset, size in parts]
        if [len(part) for part in read] != [size for _, size in parts]:
            raise OSError(errno.EIO, "the shard ends before the image does")
        return self.separator.join(read)

    def where(self, index: int) -> str:
        return f"{self.shards[self.shard[index]]}, image at byte {self.offset[index]}"


@dataclass(frozen=True)
class Manifest:
    """Size and state of each image in a set, known before decoding; made by data/scan.py."""

    sizes: np.ndarray
    """[N, 2] int32, height and width; 0 for bad images."""
    plain: np.ndarray
    """[N] bool: whether DALI decodes the image to the same pixel values as Pillow."""
    bad: Mapping[int, str] = field(default_factory=dict)
    """Image -> why it cannot be used."""


@dataclass(frozen=True)
class ImageSet:
    """One split of a data set, stored as files, as spans of shards, or as an array."""

    name: str
    """Path and split, for messages."""
    classes: tuple[str, ...]
    labels: np.ndarray
    """[N] int64, indices into classes."""
    files: tuple[Path, ...] = ()
    spans: Spans | None = None
    array: np.ndarray | None = None
    """[N, H, W, 3] uint8."""
    manifest: Manifest | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def bad(self) -> Mapping[int, str]:
        """Index of each unusable image -> reason."""
        return {} if self.manifest is None else self.manifest.bad

    def subset(self, keep: np.ndarray, name: str) -> ImageSet:
        """The images with these indices, without a manifest.

        keep: [n] int64, ascending.
        """
        spans = self.spans
        if spans is not None:
            continued = {
                new: spans.continued[old]
                for new, old in enumerate(keep.tolist())
                if old in spans.continued
            }
            spans = replace(
                spans,
                shard=spans.shard[keep],
                offset=spans.offset[keep],
                size=spans.size[keep],
                continued=continued,
            )
        return replace(
            self,
            name=name,
            labels=self.labels[keep],
            files=tuple(self.files[index] for index in keep.tolist()) if self.files else (),
            spans=spans,
            array=None if self.array is None else self.array[keep],
            manifest=None,
        )

    def image(self, index: int) -> np.ndarray:
        """The decoded image: [H, W, 3] uint8."""
        if self.array is not None:
            return self.array[index]
        return decode(self.encoded(index), self.where(index))

    def encoded(self, index: int) -> bytes:
        """The stored bytes of an image; not available for a set in an array."""
        try:
            if self.spans is not None:
                return self.spans.read(index)
            return self.files[index].read_bytes()
        except FileNotFoundError as error:
            raise DataError(
                f"{self.where(index)}: the file is gone; restore it, or create an empty file"
            ) from error
        except OSError as error:
            raise DataError(f"{self.where(index)}: cannot be read ({error.strerror})") from error

    def where(self, index: int) -> str:
        """The place of an image, for messages."""
        if self.spans is not None:
            return self.spans.where(index)
        return str(self.files[index]) if self.files else f"{self.name}, image {index}"

    @cached_property
    def fingerprint(self) -> str:
        """Equal for the same images in the same order, even if the folder was moved."""
        digest = hashlib.sha256(_bytes("\n".join(self.classes)))
        digest.update(np.ascontiguousarray(self.labels).tobytes())
        for file in self.files:
            digest.update(_bytes(f"{file.parent.name}/{file.name}\n"))
        if self.spans is not None:
            digest.update(_bytes("\n".join(shard.name for shard in self.spans.shards)))
            for numbers in (self.spans.shard, self.spans.offset, self.spans.size):
                digest.update(np.ascontiguousarray(numbers).tobytes())
        if self.array is not None:
            digest.update(str(self.array.shape).encode())
            # One row of pixels per image: enough to tell sets apart, and fast for 50,000 images.
            digest.update(np.ascontiguousarray(self.array[:, self.array.shape[1] // 2]).tobytes())
        return digest.hexdigest()[:16]


def _bytes(text: str) -> bytes:
    """File names may contain bytes that are not valid UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def decode(content: bytes, where: str) -> np.ndarray:
    """Decode an image to uint8 [H, W, 3]; a DataError names where it came from."""
    with open_image(content, where) as image:
        if image.mode.startswith("I"):  # 16 bits or more, which Pillow would clip to 255
            values = np.asarray(image).astype(np.float64).clip(0, 65535) / 257
            return np.repeat(np.rint(values).astype(np.uint8)[..., None], 3, axis=-1)
        return np.asarray(image.convert("RGB"))


def is_storage_error(error: DataError) -> bool:
    """Whether an image could not be read, rather than decoded: Pillow's OSErrors have no errno."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno is not None


@contextmanager
def open_image(content: bytes, where: str) -> Iterator[Image.Image]:
    """Pillow's image with its header read; errors now or within the context become DataErrors."""
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
        raise DataError(f"{where}: cannot be decoded ({reason})") from error
