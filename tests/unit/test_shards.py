"""Sharded sets: shards written here byte by byte, read back, and read by DALI's own readers too."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from color_folders import CLASSES, write_folder
from expect import raises
from image_sets import open_both, open_data
from PIL import Image
from shard_writers import (
    BROKEN,
    WRITERS,
    Sample,
    every_format,
    image_record,
    photos,
    read_back,
    write_recordio,
    write_tar,
    write_tfrecord,
)

from fastaug.data.readers.shards import find_shards
from fastaug.errors import DataError

pytestmark = pytest.mark.usefixtures("own_cache")


@every_format
def test_images_labels_and_classes(suffix: str, tmp_path: Path) -> None:
    write, samples, held_out = WRITERS[suffix], photos(14), photos(5, seed=1)
    for i in range(3):
        write(tmp_path / f"set/train/{i:05}{suffix}", samples[5 * i : 5 * i + 5])
    write(tmp_path / f"set/val/00000{suffix}", held_out)
    train, test = open_both(str(tmp_path / "set"))
    assert train.classes == test.classes == ("0", "1", "2")
    assert read_back(tmp_path / "set") == samples
    assert read_back(tmp_path / "set", "test") == held_out
    for i in (0, 13):
        expected = np.asarray(Image.open(io.BytesIO(samples[i][0])))
        np.testing.assert_array_equal(train.image(i), expected)
    assert train.name == f"{tmp_path / 'set'} (train)"
    assert train.where(13).startswith(f"{tmp_path / 'set/train'}/00002{suffix}, image at byte ")
    moved = (tmp_path / "set").rename(tmp_path / "moved")
    assert open_data(str(moved), "train").fingerprint == train.fingerprint


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train/0.tar", "val/0.tar"),
        ("train/0.tar", "test/0.tar"),
        ("train/0.tar", "validation/0.tar"),
        ("train/0.tar", "val.tar"),
        ("train.rec", "val.rec"),
        ("imagenet-train-000000.tar", "imagenet-validation-000000.tar"),
        ("train-00000-of-00001", "validation-00000-of-00001"),
        ("x_train.TFRECORDS", "x_test.tfrec"),
        ("train000.tar", "test000.tar"),
        ("testbed-train-0.tar", "testbed-val-0.tar"),
        ("set.train.0.rec", "set.val.0.rec"),
    ],
)
def test_where_shards_may_lie(train: str, test: str, tmp_path: Path) -> None:
    samples, held_out = photos(6), photos(3, seed=1)
    for name, content in ((train, samples), (test, held_out)):
        kind = next((s for s in WRITERS if name.endswith(s)), ".tfrecord")
        WRITERS[kind](tmp_path / name, content)
    for other in (".hidden-train.tar", "train.idx", "train.lst", "strain-0.rec", "README-train.md"):
        (tmp_path / other).write_bytes(b"of no concern")
    assert read_back(tmp_path) == samples
    assert read_back(tmp_path, "test") == held_out


def test_val_goes_before_test(tmp_path: Path) -> None:
    for name in ("train", "val", "test", "validation"):
        write_tar(tmp_path / f"x-{name}-0.tar", photos(3))
    assert [shard.name for shard in find_shards(tmp_path, "test")] == ["x-val-0.tar"]


def test_class_folders_go_before_shards(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"train": 2, "test": 1})
    for name in ("train.tar", "train/0.tar", "val.tar", "test/0.tar"):
        (root / name).write_bytes(b"what the folders were unpacked from")
    train, test = open_both(str(root))
    assert train.classes == CLASSES
    assert (len(train), len(test)) == (6, 3)


def test_hidden_folders_are_no_class_folders(tmp_path: Path) -> None:
    write_tar(tmp_path / "train/0.tar", photos(6))
    (tmp_path / "train/.cache").mkdir()
    assert len(open_data(str(tmp_path), "train")) == 6


def test_without_test_shards_images_are_held_out(tmp_path: Path) -> None:
    write_tar(tmp_path / "train/0.tar", photos(20))
    train, test = open_both(tmp_path)
    assert len(train) + len(test) == 20
    assert np.bincount(test.labels).min() == 1
    assert not {*map(train.where, range(len(train)))} & {*map(test.where, range(len(test)))}


def test_mixed_formats(tmp_path: Path) -> None:
    write_tar(tmp_path / "train/0.tar", photos(6))
    write_recordio(tmp_path / "train/1.rec", photos(6))
    with raises(DataError, "0.tar 1.rec"):
        open_data(str(tmp_path), "train")


def test_a_broken_link_is_not_passed_over(tmp_path: Path) -> None:
    write_tar(tmp_path / "train/0.tar", photos(6))
    (tmp_path / "train/1.tar").symlink_to("gone")
    with raises(DataError, "1.tar"):
        open_data(str(tmp_path), "train")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    write_tar(tmp_path / "train/0.tar", photos(6))
    os.mkfifo(tmp_path / "train/1.tar")
    with raises(DataError, "1.tar"):
        open_data(str(tmp_path), "train")


# Labels


def test_the_training_labels_number_the_classes(tmp_path: Path) -> None:
    write_tfrecord(tmp_path / "train.tfrecord", photos(9, labels=(1000, 1, 7)))
    write_tfrecord(tmp_path / "val.tfrecord", photos(4, labels=(1000,)))
    train, test = open_both(str(tmp_path))
    assert train.classes == test.classes == ("1", "7", "1000")
    assert train.labels.dtype == np.int64
    assert train.labels.tolist() == [2, 0, 1] * 3
    assert test.labels.tolist() == [2] * 4


def test_a_label_that_training_does_not_have(tmp_path: Path) -> None:
    write_tar(tmp_path / "train.tar", photos(9, labels=(1, 2, 5)))
    write_tar(tmp_path / "val.tar", photos(9, labels=(1, 3, 9)))
    with raises(DataError, "label 3 1 5"):
        open_data(str(tmp_path), "test")


def test_names_of_the_classes(tmp_path: Path) -> None:
    write_tar(tmp_path / "train.tar", photos(9, labels=(3, 2, 1)))
    names = tmp_path / "classes.txt"
    names.write_text("ein Apfel\ncrâne\r\ncrane\n", encoding="utf-8")
    train = open_data(str(tmp_path), "train")
    assert train.classes == ("ein Apfel", "crâne", "crane")
    assert train.labels.tolist() == [2, 1, 0] * 3
    for wrong, lines in (("a\nb\n", 2), ("a\nb\nc\nd", 4), ("a\n\nc", 3), ("", 1)):
        names.write_text(wrong)
        with raises(DataError, f"3 {lines}"):
            open_data(str(tmp_path), "train")
    names.write_bytes(b"\xff\xfe\xff")
    with raises(DataError, "classes.txt UTF-8"):
        open_data(str(tmp_path), "train")


def test_one_class_only(tmp_path: Path) -> None:
    write_tar(tmp_path / "train.tar", photos(3, labels=(4,)))
    with raises(DataError, "4"):
        open_data(str(tmp_path), "train")


# DALI's readers, which know nothing of ours, find the same


def dali_samples(reader: str, count: int, **arguments: object) -> list[Sample]:
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=count, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def pipeline():  # type: ignore[no-untyped-def]
        out = getattr(fn.readers, reader)(**arguments)
        return tuple(out.values()) if isinstance(out, dict) else tuple(out)

    pipe = pipeline()
    pipe.build()
    images, labels = pipe.run()
    out = []
    for i in range(count):
        label = labels.at(i)
        number = int(bytes(label)) if label.dtype == np.uint8 else int(label.ravel()[0])
        out.append((images.at(i).tobytes(), number))
    return out


def script(name: str, *arguments: Path) -> None:
    """One of the scripts that come with DALI."""
    subprocess.run([Path(sys.executable).with_name(name), *arguments], check=True, timeout=60)


def test_dali_reads_the_same_tar(tmp_path: Path) -> None:
    samples, index = photos(7), tmp_path / "train.idx"
    path = write_tar(tmp_path / "train.tar", samples)
    script("wds2idx", path, index)
    arguments = {"paths": str(path), "index_paths": str(index), "ext": ["jpg", "cls"]}
    assert dali_samples("webdataset", 7, **arguments) == read_back(tmp_path) == samples


def test_dali_reads_the_same_tfrecord(tmp_path: Path) -> None:
    from nvidia.dali import tfrecord as tfrec

    samples, index = photos(7), tmp_path / "train.idx"
    path = write_tfrecord(tmp_path / "train.tfrecord", samples)
    script("tfrecord2idx", path, index)
    features = {
        "image/encoded": tfrec.FixedLenFeature((), tfrec.string, ""),
        "image/class/label": tfrec.FixedLenFeature([1], tfrec.int64, -1),
    }
    arguments = {"path": str(path), "index_path": str(index), "features": features}
    assert dali_samples("tfrecord", 7, **arguments) == read_back(tmp_path) == samples


def test_dali_reads_the_same_recordio(tmp_path: Path) -> None:
    """rec2idx needs MXNet, so the index is written here."""
    samples = [*photos(4), *[(image, i % 3) for i, image in enumerate(BROKEN)]]
    records = [image_record(*sample) for sample in samples]
    (tmp_path / "train.rec").write_bytes(b"".join(records))
    places = np.cumsum([0, *map(len, records[:-1])])
    index = tmp_path / "train.idx"
    index.write_text("".join(f"{i}\t{place}\n" for i, place in enumerate(places)))
    arguments = {"path": [str(tmp_path / "train.rec")], "index_path": [str(index)]}
    assert dali_samples("mxnet", len(samples), **arguments) == read_back(tmp_path) == samples
