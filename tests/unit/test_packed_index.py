"""The index of a packed split: what it holds, and that a damaged or hostile one is an error."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expect import raises

from fastaug.data.readers.packed_index import (
    PackedIndex,
    PackedShard,
    read_packed_index,
    write_packed_index,
)
from fastaug.errors import DataError

IMAGES = [
    # offset, size, crc32, label, height, width, plain
    (512, 100, 7, 0, 30, 40, 1),
    (2048, 2000, 2**32 - 1, 2, 1, 1, 0),
    (512, 5, 0, 1, 3000, 4000, 1),
]
HEADER = {
    "classes": ["a", "b é", "c"],
    "shards": [
        {"name": "train/00000.tar", "bytes": 10240, "images": 2, "sha256": "0" * 64},
        {"name": "train/00001.tar", "bytes": 5120, "images": 1, "sha256": "f" * 64},
    ],
    "made_with": {"max_side": 256},
}


def index_bytes(images: list[tuple] = IMAGES, **header: Any) -> bytes:
    """An index as its description has it, byte by byte."""
    text = json.dumps(HEADER | header).encode()
    rows = b"".join(struct.pack("<QIIIiiI", *image) for image in images)
    content = b"fastaug packed 1" + struct.pack("<Q", len(text)) + text + rows
    return content + hashlib.sha256(content).digest()


def shard(**changes: Any) -> list[dict[str, Any]]:
    return [{**HEADER["shards"][0], **changes}, HEADER["shards"][1]]  # type: ignore[index]


def test_every_field() -> None:
    index = read_packed_index(index_bytes(), "here")
    assert index.classes == ("a", "b é", "c")
    assert index.shards[1] == PackedShard("train/00001.tar", 5120, 1, "f" * 64)
    assert index.shard.tolist() == [0, 0, 1]
    assert index.rows["offset"].tolist() == [512, 2048, 512]
    assert index.rows["crc32"].tolist() == [7, 2**32 - 1, 0]
    assert index.labels.tolist() == [0, 2, 1]
    assert index.labels.dtype == np.int64
    assert index.manifest.sizes.tolist() == [[30, 40], [1, 1], [3000, 4000]]
    assert index.manifest.plain.tolist() == [True, False, True]
    assert index.made_with == {"max_side": 256}


def test_written_and_mapped(tmp_path: Path) -> None:
    read = read_packed_index(index_bytes(), "here")
    file = tmp_path / "train.index"
    write_packed_index(file, read)
    again = read_packed_index(file, str(file))
    assert (again.classes, again.shards, again.made_with) == (
        read.classes,
        read.shards,
        read.made_with,
    )
    assert again.rows.tobytes() == read.rows.tobytes()
    assert again.rows.flags.aligned
    assert not again.rows.flags.owndata  # mapped: ranks share the pages
    assert list(tmp_path.iterdir()) == [file]


def test_any_damaged_byte_is_noticed() -> None:
    content = index_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        with raises(DataError, "here"):
            read_packed_index(bytes(damaged), "here")
        with raises(DataError, "here"):
            read_packed_index(content[:place], "here")


@pytest.mark.parametrize(
    "image",
    [
        (10240, 1, 0, 0, 1, 1, 1),
        (10000, 241, 0, 0, 1, 1, 1),
        (2**64 - 1, 2, 0, 0, 1, 1, 1),
        (0, 0, 0, 0, 1, 1, 1),
        (0, 1, 0, 3, 1, 1, 1),
        (0, 1, 0, 0, 0, 1, 1),
        (0, 1, 0, 0, -1, -1, 1),
        (0, 1, 0, 0, 2**31 - 1, 2**31 - 1, 1),
        (0, 1, 0, 0, 1, 1, 2),
    ],
)
def test_impossible_images(image: tuple) -> None:
    with raises(DataError, "here"):
        read_packed_index(index_bytes([image, *IMAGES[1:]]), "here")


@pytest.mark.parametrize(
    "header",
    [
        {"shards": shard(name="../../etc/passwd")},
        {"shards": shard(name="/train/00000.tar")},
        {"shards": shard(name="train/00001.tar")},
        {"shards": shard(name=5)},
        {"shards": shard(images=2**62)},
        {"shards": shard(images=-1)},
        {"shards": shard(bytes=-1)},
        {"shards": shard(bytes=1e300)},
        {"shards": shard(bytes=2**70)},
        {"shards": shard(extra=1)},
        {"shards": 5},
        {"shards": []},
        {"classes": [1, 2, 3]},
        {"classes": None},
        {"made_with": 3},
    ],
)
def test_impossible_headers(header: dict) -> None:
    with raises(DataError, "here"):
        read_packed_index(index_bytes(**header), "here")


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04" * 50, bytes(10_000)])
def test_foreign_files(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "train.index"
    file.write_bytes(content)
    for given in (content, file):
        with raises(DataError, "here"):
            read_packed_index(given, "here")


def test_a_header_that_claims_too_much() -> None:
    content = b"fastaug packed 1" + struct.pack("<Q", 2**63) + bytes(100)
    with raises(DataError, "here"):
        read_packed_index(content + hashlib.sha256(content).digest(), "here")


def test_a_wrong_index_is_not_written(tmp_path: Path) -> None:
    index = read_packed_index(index_bytes(), "here")
    wrong = PackedIndex(index.classes[:2], index.shards, index.rows)
    with pytest.raises(ValueError, match="label"):
        write_packed_index(tmp_path / "train.index", wrong)
    assert list(tmp_path.iterdir()) == []
