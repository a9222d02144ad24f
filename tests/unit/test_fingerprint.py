"""Fingerprints of the content of image sets, which ranks compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastaug.data import fingerprint
from fastaug.data.fingerprint import content_fingerprints, sample_indices, sizes_fingerprint
from fastaug.data.image_set import ImageSet, Manifest


def arrays(count: int, bad: tuple[int, ...] = ()) -> ImageSet:
    pixels = np.random.default_rng(0).integers(0, 255, (count, 3, 4, 3), np.uint8)
    sizes = np.tile(np.array([3, 4], np.int32), (count, 1))
    manifest = Manifest(sizes, np.ones(count, bool), dict.fromkeys(bad, "bad"))
    labels = np.arange(count) % 2
    return ImageSet("pixels", ("a", "b"), labels, array=pixels, manifest=manifest)


def test_a_sample_covers_the_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sample_indices(arrays(7, bad=(2,))).tolist() == [0, 1, 3, 4, 5, 6]
    monkeypatch.setattr(fingerprint, "_SAMPLE", 10)
    found = sample_indices(arrays(1000))
    assert len(found) == 10
    assert (found[0], found[-1]) == (0, 999)
    assert set(np.diff(found)) == {111}


def test_pixels_of_an_array_count() -> None:
    images, every = arrays(5), np.arange(5)
    before = content_fingerprints(images, every, workers=0)
    assert images.array is not None
    images.array[3, 2, 1, 0] ^= 1
    after = content_fingerprints(images, every, workers=0)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, True, False, True]


def test_files_count_by_ends_and_size(tmp_path: Path) -> None:
    content = bytes(range(256)) * 100  # 25,600 bytes
    files = {
        "same": content,
        "start": b"x" + content[1:],
        "end": content[:-1] + b"x",
        "longer": content[:10_000] + b"x" + content[10_000:],
    }
    for name, written in ({"original": content} | files).items():
        (tmp_path / name).write_bytes(written)
    names = ("original", *files, "missing")
    images = ImageSet.from_files([tmp_path / name for name in names], [0] * 6, ["a"])
    original, same, *others, missing = content_fingerprints(images, np.arange(6), workers=2)
    assert original == same
    assert len({original, *others}) == 4
    assert missing == ""


def test_sizes_count_but_for_bad_images() -> None:
    images = arrays(4, bad=(1,))
    assert images.manifest is not None
    for index, is_equal in ((1, True), (2, False)):
        sizes = images.manifest.sizes.copy()
        sizes[index] = 9
        other = replace(images, manifest=replace(images.manifest, sizes=sizes))
        assert (sizes_fingerprint(other) == sizes_fingerprint(images)) is is_equal
