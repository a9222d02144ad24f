"""ImageNet as it is distributed, in small: the samples that were written are the oracle."""

from __future__ import annotations

import logging
import struct
import tarfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from expect import raises
from image_sets import open_both, open_data
from imagenet_sets import (
    DEVKIT,
    LAYOUTS,
    NAMES,
    WORDS,
    Sample,
    jpeg,
    synsets,
    training,
    validation,
    write_devkit,
    write_flat,
    write_folders,
    write_kaggle,
    write_packed_devkit,
    write_tars,
    write_training_tar,
)
from scipy.io import savemat
from shard_writers import header, small_memory, tar

from fastaug import cli, pack
from fastaug.data.image_set import ImageSet
from fastaug.data.readers.mat_file import read_struct_array
from fastaug.data.sources import align_classes
from fastaug.errors import DataError

Write = Callable[[Path], Path]
pytestmark = pytest.mark.usefixtures("own_cache")


def contents(images: ImageSet) -> list[tuple[str, bytes]]:
    return [
        (images.classes[images.labels[index]], bytes(images.encoded(index)))
        for index in range(len(images))
    ]


def expected(samples: list[Sample]) -> list[tuple[str, bytes]]:
    names = dict(zip(WORDS, NAMES, strict=True))
    return [(names[sample.wnid], sample.content) for sample in samples]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_images_and_labels(layout: str, tmp_path: Path) -> None:
    train, test = open_both(LAYOUTS[layout](tmp_path / "in"))
    assert train.classes == NAMES
    # Files are sorted by name, tars keep their order.
    assert sorted(contents(train)) == sorted(expected(training()))
    assert train.labels.tolist() == sorted(train.labels.tolist())
    assert contents(test) == expected(validation())


@pytest.mark.parametrize("below", ["", "ILSVRC", "ILSVRC/Data/CLS-LOC"])
def test_any_folder_of_kaggle_s_download(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_kaggle(tmp_path)
    assert contents(open_data(root / below, "test")) == expected(validation())
    monkeypatch.chdir(root / below)
    assert open_data(".", "train").classes == NAMES


def test_kaggle_without_names(tmp_path: Path) -> None:
    (write_kaggle(tmp_path) / "LOC_synset_mapping.txt").unlink()
    train, test = open_both(tmp_path)
    assert train.classes == test.classes == tuple(WORDS)


def test_validation_images_that_were_sorted_into_class_folders(tmp_path: Path) -> None:
    val = write_kaggle(tmp_path) / "ILSVRC/Data/CLS-LOC/val"
    for sample in validation():
        (val / sample.wnid).mkdir(exist_ok=True)
        (val / sample.name).rename(val / sample.wnid / sample.name)
    train, test = open_both(tmp_path)
    assert train.classes == test.classes == NAMES
    assert sorted(contents(test)) == sorted(expected(validation()))


def test_kaggle_without_validation_images(tmp_path: Path) -> None:
    for file in [*(val := write_kaggle(tmp_path) / "ILSVRC/Data/CLS-LOC/val").iterdir()]:
        file.unlink()
    val.rmdir()
    train, test = open_both(tmp_path)
    assert (len(train), len(test)) == (15, 3)  # a tenth of each class is held out


def test_class_names_of_another_layout_are_the_same_classes(tmp_path: Path) -> None:
    named = open_data(write_kaggle(tmp_path), "test")
    plain = align_classes(named, tuple(reversed(WORDS)), "a checkpoint")
    assert [plain.classes[i] for i in plain.labels] == [s.wnid for s in validation()]
    assert contents(align_classes(plain, NAMES, "a checkpoint")) == expected(validation())


@pytest.mark.parametrize("place", ["", ".."])
@pytest.mark.parametrize("write", [write_devkit, write_packed_devkit])
def test_the_devkit_may_be_packed_or_one_folder_up(
    place: str, write: Write, tmp_path: Path
) -> None:
    data = write_folders(tmp_path / "in")
    write(data / place)
    assert contents(open_data(data, "test")) == expected(validation())


def test_a_part_of_the_validation_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write_flat(tmp_path)
    for sample in validation()[:4]:
        (data / "val" / sample.name).unlink()
    with caplog.at_level(logging.WARNING, "fastaug"):
        assert contents(open_data(data, "test")) == expected(validation()[4:])
    assert "2 of the 6" in caplog.text


def test_the_index_of_a_tar_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_tars(tmp_path / "in")
    before = contents(open_data(data, "train"))
    monkeypatch.setattr("fastaug.data.readers.imagenet.tar_members", None)
    assert contents(open_data(data, "train")) == before


def test_images_are_ranges_of_the_outer_tar(tmp_path: Path) -> None:
    """Python's tarfile, reading tar in tar, is the oracle."""
    path = write_tars(tmp_path / "in") / "ILSVRC2012_img_train.tar"
    found = []
    with tarfile.open(path) as outer:
        for member in outer:
            with tarfile.open(fileobj=outer.extractfile(member)) as inner:
                found += [inner.extractfile(image).read() for image in inner]  # type: ignore[union-attr]
    images = open_data(path.parent, "train")
    assert [images.encoded(index) for index in range(len(images))] == found
    assert images.where(0).startswith(str(path))


def test_a_training_tar_that_was_unpacked_once(tmp_path: Path) -> None:
    """train/WNID.tar; with class folders next to them, those are read."""
    root = write_tars(tmp_path / "in")
    with tarfile.open(root / "ILSVRC2012_img_train.tar") as outer:
        outer.extractall(root / "train", filter="data")
    (root / "ILSVRC2012_img_train.tar").unlink()
    train, test = open_both(root)
    assert train.classes == NAMES
    assert sorted(contents(train)) == sorted(expected(training()))
    assert contents(test) == expected(validation())
    for wnid in WORDS:
        (root / "train" / wnid).mkdir()
        (root / "train" / wnid / f"{wnid}_1.JPEG").write_bytes(jpeg(0, 0))
    assert len(open_data(root, "train")) == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_can_be_packed(layout: str, tmp_path: Path) -> None:
    source, packed = LAYOUTS[layout](tmp_path / "in"), tmp_path / "packed"
    assert cli.run(pack.main, [str(source), str(packed)]) == 0
    train, test = open_both(packed)
    assert train.classes == NAMES
    assert sorted(contents(train)) == sorted(expected(training()))
    assert contents(test) == expected(validation())


class TestLabelsThatAreWrong:
    def test_no_labels(self, tmp_path: Path) -> None:
        (write_kaggle(tmp_path) / "LOC_val_solution.csv").unlink()
        with raises(DataError, "LOC_val_solution.csv", DEVKIT, str(tmp_path)):
            open_data(tmp_path, "test")
        assert len(open_data(tmp_path, "train")) == 18

    def test_an_image_that_the_csv_does_not_know(self, tmp_path: Path) -> None:
        val = write_kaggle(tmp_path) / "ILSVRC/Data/CLS-LOC/val"
        (val / "ILSVRC2012_val_00000077.JPEG").write_bytes(jpeg(0, 0))
        with raises(DataError, "ILSVRC2012_val_00000077.JPEG", "LOC_val_solution.csv"):
            open_data(tmp_path, "test")

    def test_an_image_of_another_name(self, tmp_path: Path) -> None:
        (write_flat(tmp_path) / "val/holiday.jpg").write_bytes(jpeg(0, 0))
        with raises(DataError, "holiday.jpg"):
            open_data(tmp_path, "test")

    @pytest.mark.parametrize("row", ["ILSVRC2012_val_00000001", "x,n01440764 1 2", ",", "1,2,3"])
    def test_a_wrong_row(self, row: str, tmp_path: Path) -> None:
        file = write_kaggle(tmp_path) / "LOC_val_solution.csv"
        file.write_text(file.read_text() + row + "\n")
        with raises(DataError, "LOC_val_solution.csv", repr(row)):
            open_data(tmp_path, "test")

    def test_a_class_without_training_images(self, tmp_path: Path) -> None:
        file = write_kaggle(tmp_path) / "LOC_val_solution.csv"
        file.write_text(file.read_text().replace("n02012849", "n09999999"))
        with raises(DataError, "n09999999", "train"):
            open_both(tmp_path)

    def test_a_folder_that_cannot_be_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def denied(folder: Path) -> None:
            raise PermissionError(13, "Permission denied", str(folder))

        data = write_flat(tmp_path)
        monkeypatch.setattr("fastaug.data.readers.imagenet.os.scandir", denied)
        with raises(DataError, str(data / "val")):
            open_data(data, "train")

    def test_a_wrong_line_of_names(self, tmp_path: Path) -> None:
        (write_kaggle(tmp_path) / "LOC_synset_mapping.txt").write_text("tench\n")
        with raises(DataError, "LOC_synset_mapping.txt", "'tench'"):
            open_data(tmp_path, "train")

    @pytest.mark.parametrize("name", ["LOC_val_solution.csv", "LOC_synset_mapping.txt"])
    @pytest.mark.parametrize("content", [b"\xff\xfe", None])
    def test_binary_or_huge_files(self, name: str, content: bytes | None, tmp_path: Path) -> None:
        file = write_kaggle(tmp_path) / name
        file.write_bytes(content or b"")
        if content is None:
            with file.open("r+b") as sparse:
                sparse.truncate(2**40)
        with small_memory(), raises(DataError, name):
            open_data(tmp_path, "test")

    @pytest.mark.parametrize("number", ["0", "1001", "-1", "4", "x", "9" * 5000])
    def test_a_wrong_number_of_the_devkit(self, number: str, tmp_path: Path) -> None:
        """1001 is a group of classes; 4 is not in meta.mat."""
        file = write_flat(tmp_path) / DEVKIT / "data/ILSVRC2012_validation_ground_truth.txt"
        file.write_text(file.read_text() + number + "\n")
        with raises(DataError, "line 7", number[:20]):
            open_data(tmp_path, "test")

    def test_fewer_numbers_than_images(self, tmp_path: Path) -> None:
        file = write_flat(tmp_path) / DEVKIT / "data/ILSVRC2012_validation_ground_truth.txt"
        file.write_text("1\n" * 5)
        with raises(DataError, "ILSVRC2012_val_00000006.JPEG"):
            open_data(tmp_path, "test")

    @pytest.mark.parametrize("name", ["meta.mat", "ILSVRC2012_validation_ground_truth.txt"])
    def test_a_file_of_the_devkit_is_missing(self, name: str, tmp_path: Path) -> None:
        (write_flat(tmp_path) / DEVKIT / "data" / name).unlink()
        with raises(DataError, name):
            open_data(tmp_path, "test")

    def test_a_packed_devkit_without_its_files(self, tmp_path: Path) -> None:
        write_folders(tmp_path)
        tar(tmp_path / f"{DEVKIT}.tar", [("readme.txt", b"x")])
        with raises(DataError, "meta.mat", f"{DEVKIT}.tar"):
            open_data(tmp_path, "train")

    def test_a_truncated_devkit(self, tmp_path: Path) -> None:
        file = write_packed_devkit(write_folders(tmp_path))
        file.write_bytes(file.read_bytes()[:-200])
        with raises(DataError, f"{DEVKIT}.tar.gz"):
            open_data(tmp_path, "train")


def _images(synset: str, count: int) -> list[tuple[str, bytes]]:
    return [(f"{synset}_{i}.JPEG", jpeg(0, i)) for i in range(count)]


class TestDamagedTars:
    @pytest.mark.parametrize("split", ["train", "val"])
    @pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.7, 0.95])
    def test_truncated(self, split: str, share: float, tmp_path: Path) -> None:
        path = write_tars(tmp_path / "in") / f"ILSVRC2012_img_{split}.tar"
        content = path.read_bytes()
        padding = len(content) - len(content.rstrip(b"\0"))
        path.write_bytes(content[: int(share * (len(content) - padding))])
        with raises(DataError, path.name):
            open_data(path.parent, "train" if split == "train" else "test")

    def test_an_inner_tar_that_is_truncated(self, tmp_path: Path) -> None:
        inner = tar(tmp_path / "x.tar", _images("n01440764", 3)).read_bytes()
        path = tmp_path / "in/ILSVRC2012_img_train.tar"
        tar(path, [("n01440764.tar", inner[:2000]), ("n02012849.tar", inner)])
        with raises(DataError, path.name):
            open_data(path.parent, "train")

    @pytest.mark.parametrize("copies", [1, 2])
    def test_an_image_that_is_there_twice(self, copies: int, tmp_path: Path) -> None:
        inner = [
            tar(tmp_path / "x.tar", _images(name, 2) * count).read_bytes()
            for name, count in (("n01440764", 1), ("n02012849", copies))
        ]
        path = tmp_path / "in/ILSVRC2012_img_train.tar"
        tar(path, [("n01440764.tar", inner[0]), ("n02012849.tar", inner[1])])
        if copies == 1:
            assert len(open_data(path.parent, "train")) == 4
            return
        with raises(DataError, path.name, "n02012849_0.JPEG"):
            open_data(path.parent, "train")

    def test_an_inner_tar_cannot_reach_out_of_itself(self, tmp_path: Path) -> None:
        """A member that claims the bytes of the next class."""
        claim = header("n01440764_1.JPEG", b"%011o\0" % 3000) + bytes(512)
        inner = tar(tmp_path / "x.tar", _images("n02012849", 9)).read_bytes()
        path = tmp_path / "in/ILSVRC2012_img_train.tar"
        tar(path, [("n01440764.tar", claim), ("n02012849.tar", inner)])
        with raises(DataError, path.name):
            open_data(path.parent, "train")

    @pytest.mark.parametrize(
        ("outer", "inner"),
        [
            ("readme.txt", "n01440764_1.JPEG"),
            ("tench.tar", "n01440764_1.JPEG"),
            ("n01440764.tar", "n01440764_1.txt"),
        ],
    )
    def test_members_of_other_names(self, outer: str, inner: str, tmp_path: Path) -> None:
        content = tar(tmp_path / "x.tar", [(inner, jpeg(0, 0))]).read_bytes()
        path = tar(tmp_path / "in/ILSVRC2012_img_train.tar", [(outer, content)])
        with raises(DataError, outer if "JPEG" in inner else inner):
            open_data(path.parent, "train")

    def test_a_validation_image_of_another_name(self, tmp_path: Path) -> None:
        path = write_tars(tmp_path / "in") / "ILSVRC2012_img_val.tar"
        tar(path, [("holiday.jpg", jpeg(0, 0))])
        with raises(DataError, "holiday.jpg"):
            open_data(path.parent, "test")

    def test_only_the_training_tar(self, tmp_path: Path) -> None:
        write_training_tar(tmp_path / "in", training())
        train, test = open_both(tmp_path / "in")
        assert (len(train), len(test)) == (15, 3)


def mat_header() -> bytes:
    return b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", 0x0100) + b"IM"


def element(kind: int, content: bytes) -> bytes:
    """A data element as MATLAB writes it: up to 4 bytes are in the tag."""
    if 0 < len(content) <= 4:
        return struct.pack("<HH", kind, len(content)) + content.ljust(4, b"\0")
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def matrix(class_number: int, name: bytes, *elements: bytes, shape: tuple[int, int]) -> bytes:
    head = element(6, struct.pack("<II", class_number, 0)) + element(5, struct.pack("<ii", *shape))
    return element(14, head + element(1, name) + b"".join(elements))


def text(value: str) -> bytes:
    return matrix(4, b"", element(4, value.encode("utf-16-le")), shape=(1, len(value)))


def number(value: int) -> bytes:
    return matrix(6, b"", element(2, bytes([value])), shape=(1, 1))


def struct_array(values: bytes, shape: tuple[int, int], name: bytes = b"synsets") -> bytes:
    names = b"".join(field.ljust(32, b"\0") for field in (b"ILSVRC2012_ID", b"WNID"))
    return matrix(
        2, name, element(5, struct.pack("<i", 32)), element(1, names), values, shape=shape
    )


class TestMatFile:
    @pytest.mark.parametrize("compress", [True, False])
    def test_what_scipy_writes(self, compress: bool, tmp_path: Path) -> None:
        file, other = tmp_path / "meta.mat", np.arange(5.0)
        savemat(file, {"other": other, "synsets": synsets()}, do_compression=compress)
        found = read_struct_array(file.read_bytes(), "synsets", file)
        for row, original in zip(found, synsets()[:, 0], strict=True):
            assert list(row) == list(synsets().dtype.names)
            assert row["ILSVRC2012_ID"] == original["ILSVRC2012_ID"]
            assert row["WNID"] == original["WNID"]
            assert row["words"] == original["words"]

    def test_what_matlab_writes(self) -> None:
        """Text in UTF-16, small numbers in the tag."""
        values = number(7) + text("n01440764") + number(8) + text("né")
        content = mat_header() + struct_array(values, (2, 1))
        assert read_struct_array(content, "synsets", "x") == [
            {"ILSVRC2012_ID": 7, "WNID": "n01440764"},
            {"ILSVRC2012_ID": 8, "WNID": "né"},
        ]

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\x89HDF\r\n\x1a\n" + bytes(600),  # version 7.3
            mat_header(),
            mat_header() + struct_array(b"", (1, 1), b"other"),
            mat_header() + struct_array(number(7), (1, 1)),
            mat_header() + struct.pack("<II", 14, 2**31),
            mat_header() + struct.pack("<II", 15, 5) + b"noise",
            mat_header() + element(15, zlib.compress(bytes(2**26))),
            mat_header() + matrix(2, b"synsets", element(5, bytes(4)), shape=(1, 1)),
        ],
    )
    def test_damaged_files(self, content: bytes) -> None:
        with small_memory(64 * 2**20), raises(DataError, "meta.mat"):
            read_struct_array(content, "synsets", "meta.mat")

    def test_a_claimed_size_is_not_allocated(self) -> None:
        content = mat_header() + struct_array(number(7) + text("n01440764"), (2**31 - 1, 2**31 - 1))
        with small_memory():
            assert len(read_struct_array(content, "synsets", "x")) == 1

    def test_torn_or_damaged_anywhere(self) -> None:
        whole = mat_header() + struct_array(number(7) + text("n01440764"), (1, 1))
        rng = np.random.default_rng(0)
        for place in range(len(whole)):
            for content in (
                whole[:place],
                whole[:place] + bytes([rng.integers(256)]) + whole[place + 1 :],
            ):
                with suppress(DataError):
                    read_struct_array(content, "synsets", "x")
