"""Packed shards in an object store or on a web server, read through their index."""

from __future__ import annotations

from pathlib import Path

from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet, Split
from fastaug.data.readers.packed_index import INDEX_FILES, read_packed_index
from fastaug.data.remote.cache import RangeCache
from fastaug.data.remote.client import Client
from fastaug.data.remote.spans import RemoteSpans
from fastaug.errors import DataError
from fastaug.runtime.cache import cache_dir
from fastaug.urls import RemoteUrl

_MAX_INDEX = 2**32  # bytes; 134 million images


class RemoteReader:
    """The reader of one URL. It needs no listing: the index names the shards."""

    DESCRIPTION: str = "a URL (s3://, gs://, http(s)://) of shards that fastaug.pack wrote"
    LAYOUT: tuple[tuple[str, str], ...] = (
        (
            "`s3://BUCKET/PREFIX`, `gs://...`, `https://...`",
            "what `fastaug.pack` wrote ([object stores](object-stores.md))",
        ),
    )

    def __init__(self, url: RemoteUrl) -> None:
        self._client = Client(url)

    def matches(self, _path: Path, /) -> bool:
        return True

    def has_test(self, _path: Path, /) -> bool:
        try:
            self._client.size(INDEX_FILES["test"])
            return True
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._unreadable(INDEX_FILES["test"], error) from error

    def open_split(self, _path: Path, split: Split, config: DataConfig, /) -> ImageSet:
        name = INDEX_FILES[split]
        try:
            content = self._client.read_object(name, _MAX_INDEX)
        except FileNotFoundError as error:
            raise DataError(
                f"--data {self._client.url}: has no {name}; a URL must be of shards with an index: "
                "run 'python -m fastaug.pack SOURCE OUT' and upload all of OUT"
            ) from error
        except OSError as error:
            raise self._unreadable(name, error) from error
        index = read_packed_index(content, self._client.where(name))
        cache = RangeCache(cache_dir() / "remote", int(config.cache_size * 1e9))
        return ImageSet(
            f"{self._client.url} ({split})",
            index.classes,
            index.labels,
            storage=RemoteSpans(self._client, cache, index),
            manifest=index.manifest,
        )

    def _unreadable(self, name: str, error: OSError) -> DataError:
        return DataError(f"{self._client.where(name)}: cannot be read ({error.strerror})")
