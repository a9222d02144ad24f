"""Shards that are torn, hostile or huge, and the indexes that are kept of them."""

from __future__ import annotations

import io
import logging
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from expect import raises
from image_sets import open_data
from shard_writers import (
    HUGE,
    WRITERS,
    every_format,
    example,
    field,
    header,
    int64_feature,
    masked,
    read_back,
    small_memory,
    small_samples,
    varint,
    write_recordio,
    write_tar,
)

from fastaug.data.readers import shard_index
from fastaug.errors import DataError

pytestmark = pytest.mark.usefixtures("own_cache")


@every_format
def test_garbage(suffix: str, tmp_path: Path) -> None:
    for content in (b"", b"\0" * 5, b"\0" * 5000, b"\xff" * 5000, b"<html>404</html>" * 99):
        (tmp_path / f"train{suffix}").write_bytes(content)
        with raises(DataError, f"train{suffix}"):
            open_data(str(tmp_path), "train")


def around(number: int, start: bytes, size: int) -> tuple[bytes, int]:
    """Start and size of a protobuf field whose content starts so and has this size."""
    tag = varint(number << 3 | 2) + varint(size)
    return tag + start, len(tag) + size


@pytest.mark.parametrize("suffix", [".tar", ".tfrecord"])
def test_a_huge_hole_is_not_read(suffix: str, tmp_path: Path) -> None:
    """An image of a terabyte that is there, by the file system's grace. RecordIO's end at 2**29."""
    if suffix == ".tar":
        label = header("a.cls", b"%011o\0" % 1) + b"1".ljust(512, b"\0")
        start, size = label + header("a.jpg", HUGE), 2**40 + 1536
    else:
        start, size = around(2, *around(1, *around(1, b"", 2**40)))
        name, label = field(1, b"image"), example(("label", int64_feature(1)))
        start, size = around(1, *around(1, name + start, len(name) + size))
        start, size = label + start, len(label) + size
        length = struct.pack("<Q", size)
        start = length + masked(length) + start
    with (tmp_path / f"train{suffix}").open("wb") as file:
        file.write(start)
        file.truncate(size + (16 if suffix == ".tfrecord" else 1024))
    with small_memory(), raises(DataError, "image 1099511627776 1"):
        open_data(str(tmp_path), "train")


@every_format
def test_images_are_not_read_for_the_index(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    samples = [(rng.bytes(300_000), i % 2) for i in range(10)]
    WRITERS[suffix](tmp_path / f"train{suffix}", samples)
    read, pread = [0], os.pread

    def counting(file: int, size: int, offset: int) -> bytes:
        read[0] += size
        return pread(file, size, offset)

    monkeypatch.setattr(os, "pread", counting)
    images = open_data(str(tmp_path), "train")
    assert read[0] < 20_000 * len(samples)
    assert [images.encoded(i) for i in range(10)] == [image for image, _ in samples]


# Kept indexes


def test_indexes_are_kept(
    own_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "fastaug")
    samples = small_samples()
    for i in range(3):
        write_recordio(tmp_path / f"train-{i}.rec", samples)
    before = open_data(str(tmp_path), "train")
    assert caplog.messages == [f"indexing 3 shards of {tmp_path}"]
    assert sorted(p.suffix for p in (own_cache / "indexes").iterdir()) == [".npz"] * 3
    monkeypatch.setattr(shard_index, "_find", None)  # would fail
    after = open_data(str(tmp_path), "train")
    assert len(caplog.messages) == 1
    assert after.fingerprint == before.fingerprint
    assert [after.encoded(i) for i in range(18)] == [image for image, _ in samples * 3]


@pytest.mark.parametrize("change", ["size", "time"])
def test_a_changed_shard_is_indexed_again(change: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "train.tar", [(b"one", 1), (b"two", 2)])
    time = path.stat().st_mtime_ns
    assert read_back(tmp_path) == [(b"one", 1), (b"two", 2)]
    changed = [(b"one", 1), (b"two", 3)] + [(b"x", 1)] * (20 if change == "size" else 0)
    write_tar(path, changed)
    os.utime(path, ns=(time, time + (change == "time")))
    assert read_back(tmp_path) == changed


@pytest.mark.parametrize(
    "damage", ["empty", "torn", "flipped", "noise", "other", "beyond", "dtype", "shape"]
)
def test_a_damaged_index_is_made_again(damage: str, own_cache: Path, tmp_path: Path) -> None:
    samples = small_samples()
    write_recordio(tmp_path / "train.rec", samples)
    read_back(tmp_path)
    (file,) = (own_cache / "indexes").iterdir()
    content, arrays = file.read_bytes(), dict(np.load(file))
    changed = {
        "other": {"something": np.arange(3)},
        "beyond": arrays | {"offset": arrays["offset"] + 10_000},
        "dtype": arrays | {"label": arrays["label"].astype(float)},
        "shape": arrays | {"size": arrays["size"][:-1]},
    }
    if damage in changed:
        np.savez(file, **changed[damage])
    else:
        flipped = bytearray(content)
        flipped[content.index(arrays["offset"].tobytes()) + 1] ^= 255
        file.write_bytes(
            {"empty": b"", "torn": content[:900], "flipped": flipped, "noise": os.urandom(99)}[
                damage
            ]
        )
    assert read_back(tmp_path) == samples
    np.testing.assert_equal(dict(np.load(file)), arrays)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTAUG_CACHE", str(tmp_path / "file"))
    write_tar(tmp_path / "train.tar", small_samples())
    assert read_back(tmp_path) == small_samples()


def test_a_full_disk_leaves_no_part(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: io.BufferedWriter, **_: object) -> None:
        file.write(b"a part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    write_tar(tmp_path / "train.tar", small_samples())
    assert read_back(tmp_path) == small_samples()
    assert list((own_cache / "indexes").iterdir()) == []


def test_one_bad_shard_of_many_is_named(tmp_path: Path) -> None:
    for i in range(30):
        write_tar(tmp_path / f"train-{i:02}.tar", small_samples())
    (tmp_path / "train-17.tar").write_bytes(b"bad")
    with raises(DataError, "train-17.tar"):
        open_data(str(tmp_path), "train")
