"""The fuzz targets without the fuzzer: seeds are accepted, and former findings stay fixed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checksums import sign_png, sign_tar, sign_zip
from mutants import whole_images
from shard_writers import small_samples, write_tar
from target import SOURCES, join, replay, split
from targets import TARGETS

from fastaug.errors import FastaugError

REGRESSIONS = sorted((SOURCES / "regressions").glob("*/*"))


@pytest.mark.parametrize("name", TARGETS)
def test_the_first_seed_is_accepted(name: str, tmp_path: Path) -> None:
    """Else mutations would only ever be refused."""
    (tmp_path / "seeds").mkdir()
    (tmp_path / "files").mkdir()
    seed = TARGETS[name].seeds(tmp_path / "seeds")[0]
    assert len(seed) <= TARGETS[name].max_len
    TARGETS[name].read(seed, tmp_path / "files")


@pytest.mark.parametrize("file", REGRESSIONS, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_former_findings(file: Path) -> None:
    replay(TARGETS[file.parent.name], file.read_bytes())


def test_inputs_are_small() -> None:
    assert all(file.stat().st_size < 2048 for file in REGRESSIONS)


@pytest.mark.parametrize(
    "name", ["tfrecord", "recordio", "cifar", "imagenet-devkit", "packed-index"]
)
def test_damage_is_refused(name: str, tmp_path: Path) -> None:
    seed = TARGETS[name].seeds(tmp_path)[0]
    with pytest.raises(FastaugError):
        TARGETS[name].read(seed[: len(seed) // 2], tmp_path / "files")


def test_checksums_of_sound_files_are_those_they_have(tmp_path: Path) -> None:
    sound = TARGETS["npz"].seeds(tmp_path)[0]
    assert sign_zip(sound) == sound
    damaged = bytearray(sound)
    damaged[14:18] = bytes(4)
    assert sign_zip(bytes(damaged)) == sound
    png = whole_images(np.random.default_rng(0))["png"]
    assert sign_png(png) == png
    tar = write_tar(tmp_path / "x.tar", small_samples()).read_bytes()
    assert sign_tar(tar) == tar


def test_several_files_are_one_input() -> None:
    assert split(join(b"ab", b"", b"c"), 3) == [b"ab", b"", b"c"]
    assert split(b"\xff", 2) == [b"", b""]
