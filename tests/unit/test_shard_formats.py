"""What a tar, a TFRecord and a RecordIO file may hold, and what is wrong with the others."""

from __future__ import annotations

import io
import struct
import tarfile
from pathlib import Path

import pytest
from expect import raises
from image_sets import open_data
from shard_writers import (
    BACK,
    BROKEN,
    HUGE,
    MAGIC,
    bytes_feature,
    crc32c,
    example,
    header,
    image_record,
    int64_feature,
    photos,
    read_back,
    recordio,
    small_memory,
    small_samples,
    tar,
    tfrecord,
    varint,
    write_recordio,
    write_tar,
    write_tfrecord,
)

from fastaug.data.image_set import is_storage_error
from fastaug.data.scan import scan_set
from fastaug.errors import DataError

pytestmark = pytest.mark.usefixtures("own_cache")


# WebDataset


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_dialects_and_members(format: int, tmp_path: Path) -> None:
    long = "folder/" * 12 + "n" * 90 if format == tarfile.USTAR_FORMAT else "d/" * 80 + "n" * 200
    members = [
        ("./", b""),
        (f"{long}.JPEG", b"one"),
        (f"{long}.cls", b" 7\n"),
        ("a/x.json", b'{"label": 8, "caption": "a.b"}'),
        ("a/x.seg.png", b"a mask"),
        ("a/x.png", b"two"),
        ("b/x.cls", b"9"),
        ("b/x.json", b'{"label": 1}'),
        ("b/._x.webp", b"what macOS leaves"),
        ("b/x.webp", b"three"),
        ("../../up.jpg", b"four"),
        ("../../up.cls", b"7"),
        ("/etc/x.jpg", b"five"),
        ("/etc/x.cls", b"0"),
        ("notes.txt", b"no sample"),
    ]
    path = tar(tmp_path / "inside/train.tar", members, format)
    with tarfile.open(path, "a", format=format) as archive:
        for name, kind in (("dir.jpg", tarfile.DIRTYPE), ("link.png", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a/x.png"
            archive.addfile(info)
    wanted = [(b"one", 7), (b"two", 8), (b"three", 9), (b"four", 7), (b"five", 0)]
    assert read_back(tmp_path / "inside") == wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "inside"]


_TWICE = [
    *(("a.jpg", b"x"), ("a.cls", b"1"), ("b.jpg", b"x"), ("b.cls", b"2")),
    *(("c.jpg", b"x"), ("c.cls", b"1"), ("b.jpg", b"y"), ("b.cls", b"2")),
]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.jpg", b"x"), ("b.jpg", b"x")], "a.jpg label"),
        ([("a.jpg", b"x"), ("a.json", b'{"label": true}')], "a.jpg label"),
        ([("a.jpg", b"x"), ("a.json", b'{"label": 1.0}')], "a.jpg label"),
        ([("a.jpg", b"x"), ("a.json", b"[" * 100_000)], "a.jpg label"),
        ([("a.jpg", b"x"), ("b.jpg", b"x"), ("a.cls", b"1")], "a.jpg label"),
        ([("a.jpg", b"x"), ("a.cls", b"1"), ("a.cls", b"2")], "a.cls label"),
        ([("a.jpg", b"x"), ("a.png", b"x"), ("a.cls", b"2")], "a.png image"),
        ([("a.jpg", b"x"), ("a.cls", b"cat")], "a.cls cat"),
        ([("a.jpg", b"x"), ("a.cls", b"1_0")], ""),
        ([("a.jpg", b"x"), ("a.cls", b"1" * 65)], ""),
        ([("a.jpg", b"x"), ("a.cls", b"1" * 30)], "label 64-bit"),
        ([("a.jpg", b"x"), ("a.cls", b"")], ""),
        ([("a.jpg", b""), ("a.cls", b"1")], "image 0 1"),
        ([("a.jp2", b"x"), ("a.cls", b"1")], "a.cls image"),
        (2 * [("a.jpg", b"x"), ("a.cls", b"1")], "a.jpg image"),
        (_TWICE, "b.jpg b"),
        ([("a.jpg", b"x"), ("a.cls", b"-1"), ("b.jpg", b"x"), ("b.cls", b"1")], "-1 0 1,048,575"),
        ([("a.jpg", b"x"), ("a.cls", b"5000000000")], "5000000000 0 1,048,575"),
        ([("a.jpg", b"x"), ("a.json", b'{"label": -1}')], "-1"),
        ([("a.txt", b"x")], "train.tar"),
        ([], "train.tar"),
    ],
)
def test_wrong_samples(members: list[tuple[str, bytes]], message: str, tmp_path: Path) -> None:
    tar(tmp_path / "train.tar", members)
    with raises(DataError, "train.tar", message):
        open_data(str(tmp_path), "train")


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
@pytest.mark.parametrize("name", ["train.tar", "train.tar.gz", "train.tgz"])
def test_compressed_tars_are_refused(mode: str, name: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / name, mode) as archive:
        archive.addfile(tarfile.TarInfo("a.jpg"))
    with raises(DataError, name, "compressed"):
        open_data(str(tmp_path), "train")


def test_a_tar_that_goes_on_after_its_end(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "train.tar", photos(3))
    path.write_bytes(path.read_bytes() * 2)
    with raises(DataError, "train.tar"):
        open_data(str(tmp_path), "train")


def test_a_member_that_claims_another_size(tmp_path: Path) -> None:
    """A pax header can raise the size that tarfile gives, and not move the next header."""
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        for name in ("a.jpg", "a.cls"):
            info = tarfile.TarInfo(name)
            info.size = 1
            info.pax_headers = {"GNU.sparse.realsize": "99999"} if name == "a.jpg" else {}
            archive.addfile(info, io.BytesIO(b"1"))
    with raises(DataError, "99999"):
        open_data(str(tmp_path), "train")


def test_a_tar_of_many_members_takes_little_memory(tmp_path: Path) -> None:
    samples = [(b"x", i % 2) for i in range(6000)]
    write_tar(tmp_path / "train.tar", samples)
    with small_memory(2**21):  # 12,000 TarInfos have 7 MiB
        images = open_data(str(tmp_path), "train")
    assert images.labels.tolist() == [label for _, label in samples]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header("a.jpg", HUGE), ""),
        (header("a.jpg", b"7" * 11 + b"\0"), ""),
        (header("a.jpg", BACK), ""),
        # From the fourth header back to the second, and round for ever.
        (header("a.txt", b"0" * 12) * 3 + header("b.txt", BACK), ""),
        (header("a.jpg", HUGE, b"L"), ""),
        (header("a.jpg", BACK, b"x") + bytes(2**24), ""),
        (header("a.jpg", b"%011o\0" % 2**21, b"x") + bytes(2**22), "2097152"),
        (header("a.jpg", b"0" * 12, b"x") * 5000, ""),
        (header("a.jpg", b"0" * 12, b"S"), "a.jpg"),
    ],
)
def test_hostile_tar_headers(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.tar").write_bytes(content + bytes(1024))
    with small_memory(), raises(DataError, f"train.tar {message}"):
        open_data(str(tmp_path), "train")


# TFRecord


def write_examples(path: Path, *examples: bytes) -> None:
    path.write_bytes(b"".join(map(tfrecord, examples)))


def test_check_sum_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_other_forms_of_an_example(tmp_path: Path) -> None:
    """Other names, another order, numbers that are not packed, a split map, unknown fields."""
    unknown = varint(9 << 3) + b"\x05" + varint(9 << 3 | 1) + bytes(8) + varint(9 << 3 | 5) + b"fou"
    one = ("image", bytes_feature(b"one"))
    write_examples(
        tmp_path / "train.tfrecord",
        example(("label", int64_feature(3)), one),
        example(one) + example(("label", int64_feature(2**20 - 1, packed=False))),
        unknown + b"r" + example(("label", int64_feature(1)), one),
        example(one, ("image/encoded", bytes_feature(b"two")), ("label", int64_feature(1))),
        example(("a/long/name" * 200_000, b""), ("label", int64_feature(1)), one),
    )
    wanted = [(b"one", 3), (b"one", 2**20 - 1), (b"one", 1), (b"two", 1), (b"one", 1)]
    assert read_back(tmp_path) == wanted


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (example(("image", bytes_feature(b"x"))), "image/class/label label"),
        (example(("label", int64_feature(1))), "image/encoded image"),
        (b"", ""),
        (
            example(("image", bytes_feature(b"x")), ("label", int64_feature(1, 2))),
            "label type int64",
        ),
        (
            example(("image", bytes_feature(b"x")), ("label", int64_feature(1, 2, packed=False))),
            "label",
        ),
        (
            example(("image", bytes_feature(b"x")), ("label", bytes_feature(b"cat"))),
            "label type int64",
        ),
        (
            example(("image", bytes_feature(b"x", b"y")), ("label", int64_feature(1))),
            "image type",
        ),
        (
            example(("image", bytes_feature(b"")), ("label", int64_feature(1))),
            "image 0",
        ),
        (
            example(*[("label", int64_feature(1))] * 2, ("image", bytes_feature(b"x"))),
            "label",
        ),
        (example(("image", bytes_feature(b"x")), ("label", int64_feature(-1))), "-1"),
        (example(("image", bytes_feature(b"x")), ("label", int64_feature(10**10))), "10000000000"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", ""),
        (b"\x0a" + b"\xff" * 12, ""),
        (b"\x0b", "type"),
    ],
)
def test_wrong_examples(content: bytes, message: str, tmp_path: Path) -> None:
    write_examples(tmp_path / "train.tfrecord", content)
    with raises(DataError, "train.tfrecord", message):
        open_data(str(tmp_path), "train")


def test_a_wrong_check_sum_of_the_length(tmp_path: Path) -> None:
    path = write_tfrecord(tmp_path / "train.tfrecord", small_samples())
    content = bytearray(path.read_bytes())
    content[9] ^= 1
    path.write_bytes(content)
    with raises(DataError, "0"):
        open_data(str(tmp_path), "train")


@pytest.mark.parametrize("place", [-1, -5, "pixel"])
def test_a_wrong_check_sum_of_a_record(place: int | str, tmp_path: Path) -> None:
    """The checksum itself, the label behind the image, a byte of the image: it is a bad image."""
    samples = photos(20, labels=(0, 2))  # the last one has label 2, and 3 if a bit is flipped
    path = write_tfrecord(tmp_path / "train.tfrecord", samples)
    content = bytearray(path.read_bytes())
    last = samples[-1][0]
    content[content.rindex(last) + len(last) // 2 if place == "pixel" else place] ^= 1
    path.write_bytes(content)
    images = open_data(str(tmp_path), "train")
    assert [images.encoded(i) for i in range(19)] == [image for image, _ in samples[:-1]]
    with raises(DataError, "train.tfrecord byte checksum"):
        images.encoded(19)
    found = scan_set(images, full=True).manifest.bad
    assert list(found) == [19]
    assert "checksum" in found[19]


def test_a_shard_that_is_cut_while_it_is_used(tmp_path: Path) -> None:
    """The storage failed: this is retried, unlike wrong bytes."""
    path = write_tfrecord(tmp_path / "train.tfrecord", photos(4))
    images = open_data(str(tmp_path), "train")
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 2)
    with raises(DataError, "train.tfrecord") as caught:
        images.encoded(3)
    assert is_storage_error(caught.value)


def test_a_compressed_tfrecord(tmp_path: Path) -> None:
    (tmp_path / "train.tfrecord").write_bytes(b"\x1f\x8b\x08" + bytes(50))
    with raises(DataError, "train.tfrecord compressed"):
        open_data(str(tmp_path), "train")


# RecordIO


def test_images_that_hold_the_magic_number(tmp_path: Path) -> None:
    """Also in an id, which breaks the header, and right after the labels."""
    samples = [(image, i % 3) for i, image in enumerate(BROKEN)]
    content = b"".join(
        [
            *[image_record(*sample) for sample in samples],
            *[image_record(*sample, id=0xCED7230A) for sample in samples],
            *[image_record(image, label, 77.0) for image, label in samples],
        ]
    )
    (tmp_path / "train.rec").write_bytes(content)
    write_recordio(tmp_path / "train-1.rec", samples)
    assert read_back(tmp_path) == samples * 4


def test_the_first_of_several_labels(tmp_path: Path) -> None:
    records = [image_record(b"image", 5.0, 1.0, 2.5), image_record(b"image", 2.0)]
    (tmp_path / "train.rec").write_bytes(b"".join(records))
    assert read_back(tmp_path) == [(b"image", 5), (b"image", 2)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (image_record(b"x", 0.5), "label 0.5"),
        (image_record(b"x", float("nan")), "label nan"),
        (image_record(b"x", 1e30), "64-bit"),
        (image_record(b"x", -1.0), "-1"),
        (image_record(b"x", 5e9), "5000000000"),
        (image_record(b"", 1.0), "image 0"),
        (recordio(b"short"), ""),
        (recordio(struct.pack("<IfQQ", 2**32 - 1, 0, 0, 0) + b"image"), "4294967295"),
        (MAGIC + struct.pack("<I", 2 << 29 | 4) + b"part", "2"),
        (MAGIC + struct.pack("<I", 7 << 29 | 4) + b"part", "7"),
        ((MAGIC + struct.pack("<I", 1 << 29 | 4) + b"part") * 2, "1"),
        (MAGIC + struct.pack("<I", 1 << 29 | 4) + b"part", "8"),
        (MAGIC + struct.pack("<I", 2**29 - 1) + b"part", "536870911"),
        (
            MAGIC
            + struct.pack("<I", 1 << 29 | 22)
            + bytes(24)  # the header ends in the magic number
            + MAGIC
            + struct.pack("<I", 3 << 29 | 8)
            + bytes(8),
            "0",
        ),
        (b"not of the kind", ""),
    ],
)
def test_wrong_records(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.rec").write_bytes(content)
    with raises(DataError, "train.rec", message):
        open_data(str(tmp_path), "train")
