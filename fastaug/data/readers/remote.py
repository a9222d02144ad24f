"""Packed shards in an object store or on a web server, read through their index."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet, Manifest, Split
from fastaug.data.readers.packed_index import CLASSES_NAME, INDEX_NAMES, PackedIndex, decode_index
from fastaug.data.remote.cache import RangeCache
from fastaug.data.remote.client import Client
from fastaug.data.remote.spans import RemoteSpans
from fastaug.errors import DataError
from fastaug.runtime.cache import cache_dir
from fastaug.urls import RemoteUrl

_MAX_NAMES = 2**26  # bytes of classes.txt


class RemoteReader:
    """The reader of one URL. It needs no listing: the index names the shards."""

    DESCRIPTION = "a URL (s3://, gs://, http(s)://) of shards written by fastaug.pack"
    LAYOUT = (
        (
            "`s3://BUCKET/PREFIX`, `gs://...`, `https://...`",
            "packed shards with their index ([object stores](object-stores.md))",
        ),
    )

    def __init__(self, url: RemoteUrl) -> None:
        self._client = Client(url)

    def matches(self, _path: Path, /) -> bool:
        return True

    def has_test(self, _path: Path, /) -> bool:
        return self._find_index("test") is not None

    def open_split(self, _path: Path, split: Split, config: DataConfig, /) -> ImageSet:
        found = self._find_index(split)
        url = self._client.url
        if found is None:
            raise DataError(
                f"--data {url}: found no {INDEX_NAMES[split][0]}; a remote set needs the index "
                "that 'python -m fastaug.pack SOURCE OUT' writes with the shards: upload all of OUT"
            )
        classes = self._classes()
        index = decode_index(self._read(found), self._client.where(found), len(classes))
        cache = RangeCache(cache_dir() / "remote", int(config.cache_size * 1e9))
        return ImageSet(
            f"{url} ({split})",
            classes,
            index.label,
            storage=RemoteSpans(self._client, cache, index),
            manifest=_manifest(index),
        )

    def _find_index(self, split: Split) -> str | None:
        for name in INDEX_NAMES[split]:
            try:
                self._client.size(name)
                return name
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._unreadable(name, error) from error
        return None

    def _read(self, name: str) -> bytes:
        try:
            return self._client.read_object(name)
        except OSError as error:
            raise self._unreadable(name, error) from error

    def _classes(self) -> tuple[str, ...]:
        where = self._client.where(CLASSES_NAME)
        content = self._read(CLASSES_NAME)
        if len(content) > _MAX_NAMES:
            raise DataError(f"{where}: {len(content)} bytes are too many for class names")
        try:
            names = tuple(line.strip() for line in content.decode().rstrip().split("\n"))
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: is not UTF-8 text; upload it again") from error
        if not all(names):
            raise DataError(f"{where}: has an empty line; give every class a name")
        return names

    def _unreadable(self, name: str, error: OSError) -> DataError:
        return DataError(f"{self._client.where(name)}: cannot be read ({error.strerror})")


def _manifest(index: PackedIndex) -> Manifest:
    """Sizes and kinds as the packer found them, so that no image is read before training."""
    return Manifest(np.stack([index.height, index.width], axis=1), index.plain)
