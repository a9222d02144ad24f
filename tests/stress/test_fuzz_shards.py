"""Shards with damaged bytes at random places, and torn at every byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from image_sets import open_data
from shard_writers import WRITERS, every_format, read_back, small_memory, small_samples

from fastaug.errors import DataError

pytestmark = pytest.mark.usefixtures("own_cache")


def damaged(content: bytes, suffix: str) -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    for _ in range(350):
        out = bytearray(content)
        for place in rng.integers(0, len(out), rng.integers(1, 4)):
            out[place] ^= 1 << int(rng.integers(8))
        if suffix == ".tar":  # else nearly all would end at the check sum of the header
            for i in range(0, len(out), 512):
                block = out[i : i + 512]
                if block[257:262] == b"ustar":
                    block[148:156] = b" " * 8
                    out[i + 148 : i + 156] = b"%06o\0 " % sum(block)
        yield bytes(out)
    for _ in range(150):
        start, end = sorted(rng.integers(0, len(content), 2))
        yield content[:start] + rng.bytes(int(rng.integers(1, 40))) + content[end:]


def refusal(root: Path) -> str:
    """Why the training set is refused; empty where it is not. Any other error comes through."""
    try:
        open_data(str(root), "train")
    except DataError as error:
        return str(error)
    return ""


@every_format
def test_damage_gives_an_error_or_an_index(suffix: str, tmp_path: Path) -> None:
    path = WRITERS[suffix](tmp_path / f"train{suffix}", small_samples())
    taken = 0
    with small_memory():
        for content in damaged(path.read_bytes(), suffix):
            path.write_bytes(content)
            why = refusal(tmp_path)
            assert "\n" not in why
            if why:
                continue
            taken += 1
            images = open_data(str(tmp_path), "train")
            for i in range(len(images)):
                try:
                    assert 0 < len(images.encoded(i)) <= len(content)
                except DataError:
                    assert suffix == ".tfrecord"  # the others have no checksums
    assert 5 < taken < 450


@every_format
def test_torn_at_every_byte(suffix: str, tmp_path: Path) -> None:
    """Noticed, unless whole records are gone or, at the end, what only fills up a block."""
    samples = small_samples()
    path = WRITERS[suffix](tmp_path / f"train{suffix}", samples)
    content, taken = path.read_bytes(), []
    for length in range(0, len(content), 64 if suffix == ".tar" else 1):
        path.write_bytes(content[:length])
        why = refusal(tmp_path)
        if why:
            assert str(path) in why or "found 1 class" in why
            assert "\n" not in why
        else:
            back = read_back(tmp_path)
            assert back == samples[: len(back)]
            taken.append((length, len(back)))
    if suffix == ".tar":  # nothing of it, for it has an end mark
        assert {count for _, count in taken} == {len(samples)}
    else:
        assert len(taken) < len(samples) + 4
