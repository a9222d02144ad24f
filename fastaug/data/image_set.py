"""An image set: labelled images that can be had one by one, encoded or as uint8 [H, W, 3]."""

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

import numpy as np
from PIL import Image

from fastaug.errors import DataError, first_line
from fastaug.views.plan import MAX_PIXELS


@dataclass(frozen=True)
class Spans:
    """Encoded images that lie in shards: bytes [offset, offset + size) of a shard each."""

    shards: tuple[Path, ...]
    shard: np.ndarray
    """[N] int32, places in shards."""
    offset: np.ndarray
    """[N] int64."""
    size: np.ndarray
    """[N] int64."""
    continued: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Image -> (offset, size) of its further parts: RecordIO breaks an image at its own magic."""
    glue: bytes = b""
    """What the parts are joined with."""

    def read(self, index: int) -> bytes:
        parts = ((self.offset[index], self.size[index]), *self.continued.get(index, ()))
        with open(self.shards[self.shard[index]], "rb") as file:
            read = [os.pread(file.fileno(), int(size), int(offset)) for offset, size in parts]
        if [len(part) for part in read] != [size for _, size in parts]:
            raise OSError(errno.EIO, "the shard ends before it")
        return self.glue.join(read)

    def where(self, index: int) -> str:
        return f"{self.shards[self.shard[index]]}, image at byte {self.offset[index]}"


@dataclass(frozen=True)
class Manifest:
    """What is known of each image of a set before it is decoded; data/manifest.py makes it."""

    sizes: np.ndarray
    """[N, 2] int32, height and width; 0 where the image is bad."""
    plain: np.ndarray
    """[N] bool: 8-bit and of a format that DALI decodes to the same levels as Pillow."""
    bad: Mapping[int, str] = field(default_factory=dict)
    """Image -> why it cannot be used."""


@dataclass(frozen=True)
class ImageSet:
    """One split. Files, spans of shards, or an array hold the images."""

    name: str
    """What to call it in messages: the path and the split."""
    classes: tuple[str, ...]
    labels: np.ndarray
    """[N] int64, places in classes."""
    files: tuple[Path, ...] = ()
    spans: Spans | None = None
    array: np.ndarray | None = None
    """[N, H, W, 3] uint8."""
    manifest: Manifest | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def bad(self) -> Mapping[int, str]:
        """Images that are quarantined, and why."""
        return {} if self.manifest is None else self.manifest.bad

    def subset(self, keep: np.ndarray, name: str) -> ImageSet:
        """The images of some numbers, in their order, before any is looked at.

        keep: [n] int64, ascending.
        """
        spans = self.spans
        if spans is not None:
            continued = {
                place: spans.continued[number]
                for place, number in enumerate(keep.tolist())
                if number in spans.continued
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
            files=tuple(self.files[number] for number in keep.tolist()) if self.files else (),
            spans=spans,
            array=None if self.array is None else self.array[keep],
            manifest=None,
        )

    def image(self, index: int) -> np.ndarray:
        """Image number index: [H, W, 3] uint8."""
        if self.array is not None:
            return self.array[index]
        return decode(self.encoded(index), self.where(index))

    def encoded(self, index: int) -> bytes:
        """The bytes of image number index as they are stored; an array has none."""
        try:
            if self.spans is not None:
                return self.spans.read(index)
            return self.files[index].read_bytes()
        except FileNotFoundError as error:
            raise DataError(
                f"{self.where(index)}: the file is gone; put it back, or an empty file in its place"
            ) from error
        except OSError as error:
            raise DataError(f"{self.where(index)}: cannot be read ({error.strerror})") from error

    def where(self, index: int) -> str:
        """Image number index, as a message names it."""
        if self.spans is not None:
            return self.spans.where(index)
        return str(self.files[index]) if self.files else f"{self.name}, image {index}"

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same images in the same order, also where the folder has moved."""
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
            # One pixel row of each image: enough to tell sets apart, and quick for 50,000 of them.
            digest.update(np.ascontiguousarray(self.array[:, self.array.shape[1] // 2]).tobytes())
        return digest.hexdigest()[:16]


def _bytes(text: str) -> bytes:
    """Names of files may hold bytes that are no text."""
    return text.encode("utf-8", "surrogateescape")


def decode(content: bytes, where: str) -> np.ndarray:
    """An encoded image as uint8 [H, W, 3], or a DataError that names where it came from."""
    with open_image(content, where) as image:
        if image.mode.startswith("I"):  # 16 bits and more: Pillow would clip them to 255
            levels = np.asarray(image).astype(np.float64).clip(0, 65535) / 257
            return np.repeat(np.rint(levels).astype(np.uint8)[..., None], 3, axis=-1)
        return np.asarray(image.convert("RGB"))


@contextmanager
def open_image(content: bytes, where: str) -> Iterator[Image.Image]:
    """Pillow's image, its header read; what is wrong with it then or later is a DataError."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are too many")
            yield image
    except Exception as error:  # damaged headers raise almost anything in Pillow's many readers
        if not content:
            reason = "it is empty"
        elif isinstance(error, Image.UnidentifiedImageError):
            reason = "not an image of a known format"
        else:
            reason = first_line(error)
        raise DataError(f"{where}: cannot be decoded ({reason})") from error
