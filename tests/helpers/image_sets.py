"""Image sets of any contents, for the tests of the manifest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mutants import encode, photo

from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet, Split
from fastaug.data.sources import DataSource, align_classes, open_flat
from fastaug.data.storage import Files, Spans

RNG = np.random.default_rng(0)
RGB = photo(RNG)
JPEG = encode(RGB, "JPEG")
PNG = encode(RGB, "PNG")


def image_set(folder: Path, contents: dict[str, bytes] | Sequence[bytes]) -> ImageSet:
    """Files of these contents."""
    folder.mkdir(exist_ok=True)
    if not isinstance(contents, dict):
        contents = {f"{i:03}.jpg": content for i, content in enumerate(contents)}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    files = tuple(folder / name for name in contents)
    return ImageSet(str(folder), ("a", "b"), np.arange(len(files)) % 2, Files.of(files))


def span_set(folder: Path, contents: Sequence[bytes], **changes: object) -> ImageSet:
    """The same in two shards, with a gap before each image."""
    folder.mkdir(exist_ok=True)
    shards = (folder / "0.tar", folder / "1.tar")
    blobs, places = [b"", b""], []
    for i, content in enumerate(contents):
        blobs[i % 2] += bytes(100)
        places.append((i % 2, len(blobs[i % 2]), len(content)))
        blobs[i % 2] += content
    for shard, blob in zip(shards, blobs, strict=True):
        shard.write_bytes(blob)
    shard, offset, size = np.array(places, np.int64).T
    spans = Spans(shards, shard.astype(np.int32), offset, size, **changes)
    return ImageSet(str(folder), ("a", "b"), np.zeros(len(contents), np.int64), storage=spans)


def files_of(images: ImageSet) -> list[Path]:
    """The files of a set, in order."""
    return [Path(images.where(index)) for index in range(len(images))]


def open_data(path: Path | str, split: Split, **settings: Any) -> ImageSet:
    """All images of one split, as the reader of the path finds them."""
    source = DataSource(DataConfig(data=str(path), **settings))
    return source.train if split == "train" else source.test()


def open_both(path: Path | str, **settings: Any) -> tuple[ImageSet, ImageSet]:
    """All training and all test images, with the same classes."""
    source = DataSource(DataConfig(data=str(path), **settings))
    train, _ = source.training()
    return train, align_classes(source.test(), train.classes, train.name)


def open_training_or_flat(path: Path | str) -> ImageSet:
    config = DataConfig(data=str(path))
    return open_flat(config) or DataSource(config).train


def touch(file: Path) -> None:
    """Another time, as a file that was written again has."""
    later = file.stat().st_mtime_ns + 10_000_000
    os.utime(file, ns=(later, later))
