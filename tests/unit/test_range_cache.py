"""The disk cache of remote ranges: contents, size limit, several processes, damage, full disks."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fastaug.data.remote import cache as cache_module
from fastaug.data.remote.cache import RangeCache

RNG = np.random.default_rng(0)
OBJECT = RNG.integers(0, 256, 4 << 20, np.uint8).tobytes()
STEP = 100_000
RANGES = [(offset, STEP - 7) for offset in range(3, len(OBJECT) - STEP, STEP)]


def disk_usage(folder: Path) -> int:
    return sum(512 * file.stat().st_blocks for file in folder.glob("*.ranges"))


def put(cache: RangeCache, key: str, offset: int, size: int) -> None:
    cache.put(key, offset, OBJECT[offset : offset + size])


def get(cache: RangeCache, key: str, offset: int, size: int) -> bytes | None:
    found = cache.get(key, offset, size, zlib.crc32(OBJECT[offset : offset + size]))
    assert found is None or found == OBJECT[offset : offset + size]
    return found


def test_returns_what_was_put(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path / "new/folder", 1 << 30)
    assert get(cache, "a", *RANGES[5]) is None
    put(cache, "a", *RANGES[5])
    assert get(cache, "a", *RANGES[5]) is not None
    assert get(cache, "a", *RANGES[4]) is None  # a hole before it
    assert get(cache, "a", *RANGES[6]) is None  # behind the end of the file
    assert get(cache, "b", *RANGES[5]) is None  # another version of the object
    assert get(RangeCache(tmp_path / "new/folder", 1 << 30), "a", *RANGES[5]) is not None


def test_limit_of_zero_writes_nothing(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path / "cache", 0)
    put(cache, "a", *RANGES[0])
    assert get(cache, "a", *RANGES[0]) is None
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "zeros"])
def test_damaged_range_counts_as_missing(tmp_path: Path, damage: str) -> None:
    cache = RangeCache(tmp_path, 1 << 30)
    for part in RANGES:
        put(cache, "a", *part)
    (file,) = tmp_path.glob("*.ranges")
    content = bytearray(file.read_bytes())
    offset, size = RANGES[7]
    if damage == "flipped bit":
        content[offset + 50] ^= 4
    elif damage == "zeros":
        content[offset : offset + size] = bytes(size)
    else:
        del content[offset + 50 :]
    file.write_bytes(content)
    assert get(cache, "a", *RANGES[6]) is not None
    assert get(cache, "a", *RANGES[7]) is None
    put(cache, "a", *RANGES[7])
    assert get(cache, "a", *RANGES[7]) is not None


def test_full_cache_keeps_what_is_in_use(tmp_path: Path) -> None:
    limit = 1 << 20
    cache = RangeCache(tmp_path, limit)
    for part in RANGES:
        put(cache, "a", *part)
    kept = [part for part in RANGES if get(cache, "a", *part) is not None]
    assert kept == RANGES[: len(kept)]
    assert limit - 2 * STEP < disk_usage(tmp_path) <= limit


def test_full_cache_removes_the_least_recently_used(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path, 1 << 20)
    for i, key in enumerate("abc"):
        for part in RANGES[:3]:
            put(cache, key, *part)
        long_ago = -100 * cache_module.IN_USE + i
        os.utime(tmp_path / f"{key}.ranges", (long_ago + 1e9, long_ago + 1e9))
    assert get(RangeCache(tmp_path, 1 << 20), "a", *RANGES[0]) is not None  # a use
    for part in RANGES[:4]:
        put(cache, "d", *part)
    present = {key for key in "abcd" if (tmp_path / f"{key}.ranges").exists()}
    assert present == {"a", "c", "d"}
    assert disk_usage(tmp_path) <= 1 << 20


def test_disk_keeps_its_free_share(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path, 1 << 50, keep_free=1.0)
    put(cache, "a", *RANGES[0])
    assert get(cache, "a", *RANGES[0]) is None


def _fill(folder: Path, limit: int, order: list[int]) -> int:
    """Read every range through the cache; returns the number of hits."""
    cache = RangeCache(folder, limit)

    def read(i: int) -> int:
        if get(cache, f"object{i % 5}", *RANGES[i]) is not None:
            return 1
        put(cache, f"object{i % 5}", *RANGES[i])
        return 0

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(read, order))


def test_two_processes_share_it_within_the_limit(tmp_path: Path) -> None:
    limit = 2 << 20
    orders = [RNG.permutation(len(RANGES)).tolist() for _ in range(2)]
    with multiprocessing.get_context("forkserver").Pool(2) as pool:
        pool.starmap(_fill, [(tmp_path, limit, order) for order in orders])
        assert disk_usage(tmp_path) <= limit
        cached = limit // STEP - 3
        for hits in pool.starmap(_fill, [(tmp_path, limit, order) for order in orders]):
            assert hits >= cached


def test_writes_wait_for_the_lock(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path, 1 << 30)
    put(cache, "a", *RANGES[0])
    with ThreadPoolExecutor(1) as pool, (tmp_path / "used").open("rb") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        writing = pool.submit(put, cache, "a", *RANGES[1])
        with pytest.raises(TimeoutError):
            writing.result(timeout=0.3)
        assert get(cache, "a", *RANGES[1]) is None
        assert get(cache, "a", *RANGES[0]) is not None  # reads do not wait
        fcntl.flock(counter, fcntl.LOCK_UN)
        writing.result(timeout=20)
    assert get(cache, "a", *RANGES[1]) is not None


def test_full_disk_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = RangeCache(tmp_path, 1 << 30)
    put(cache, "a", *RANGES[0])
    monkeypatch.setattr(os, "pwrite", no_space)
    with caplog.at_level(logging.WARNING, "fastaug"):
        put(cache, "a", *RANGES[1])
        put(cache, "a", *RANGES[2])
    assert len(caplog.records) == 1
    assert os.strerror(errno.ENOSPC) in caplog.text
    assert get(cache, "a", *RANGES[0]) is not None
    assert get(cache, "a", *RANGES[1]) is None


def test_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = RangeCache(tmp_path / "file/cache", 1 << 30)
    with caplog.at_level(logging.WARNING, "fastaug"):
        put(cache, "a", *RANGES[0])
        put(cache, "a", *RANGES[1])
    assert len(caplog.records) == 1
    assert get(cache, "a", *RANGES[0]) is None
