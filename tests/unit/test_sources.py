"""Data sources: real formats, made here; every wrong layout has its own message."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from color_folders import CLASSES, write_folder
from expect import missing, raises
from image_sets import files_of, open_both, open_data, open_training_or_flat
from PIL import Image

from fastaug.data import sources
from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet, decode
from fastaug.data.sources import DataSource, align_classes
from fastaug.errors import DataError


class TestFolder:
    def test_images_labels_and_classes(self, folder: Path) -> None:
        train, test = open_both(str(folder))
        assert train.classes == test.classes == CLASSES
        assert np.bincount(train.labels).tolist() == [12, 12, 12]
        assert np.bincount(test.labels).tolist() == [5, 5, 5]
        for index in (0, 13, 35):
            expected = np.asarray(Image.open(Path(train.where(index))).convert("RGB"))
            np.testing.assert_array_equal(train.image(index), expected)
            assert Path(train.where(index)).parent.name == CLASSES[train.labels[index]]

    @pytest.mark.parametrize("name", ["val", "valid", "validation", "test"])
    def test_names_of_the_test_set(self, name: str, tmp_path: Path) -> None:
        root = write_folder(tmp_path, {"train": 2, name: 1})
        assert len(open_data(str(root), "test")) == 3

    def test_hidden_folders_are_ignored(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / ".hidden", {"train": 2, "test": 1})
        for copy in (".ipynb_checkpoints", "red/.ipynb_checkpoints", "blue/more/.thumbnails/a"):
            shutil.copytree(root / "train/green", root / "train" / copy)
        images = open_data(str(root), "train")
        assert images.classes == CLASSES
        assert np.bincount(images.labels).tolist() == [2, 2, 2]

    def test_images_may_lie_deeper(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path, {"train": 2, "test": 1})
        (root / "train/red/more").mkdir()
        (root / "train/red/00.jpg").rename(root / "train/red/more/00.JPG")
        assert len(open_data(str(root), "train")) == 6

    def test_no_such_path(self) -> None:
        with raises(DataError, "--data nowhere"):
            open_data("nowhere", "train")

    def test_no_data_given(self) -> None:
        with raises(DataError, "--data PATH"):
            open_data("", "train")

    def test_no_split_folders(self, tmp_path: Path) -> None:
        with raises(DataError, str(tmp_path)):
            open_data(str(tmp_path), "train")
        (tmp_path / "val/a").mkdir(parents=True)
        with raises(DataError, "val/ train/"):
            open_data(str(tmp_path), "train")

    def test_no_class_folders(self, tmp_path: Path) -> None:
        (tmp_path / "train").mkdir()
        (tmp_path / "train/a.jpg").touch()
        with raises(DataError, "train"):
            open_data(str(tmp_path), "train")

    def test_a_class_without_images(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        root = write_folder(tmp_path, {"train": 1, "test": 1})
        (root / "train/green/00.jpg").rename(root / "train/green/00.txt")
        images = open_data(str(root), "train")
        assert images.classes == CLASSES
        assert images.labels.tolist() == [CLASSES.index("blue"), CLASSES.index("red")]
        (line,) = caplog.messages
        assert missing(line, f"{root / 'train'} green") == []

    @pytest.mark.parametrize("has_train", [True, False])
    @pytest.mark.parametrize(("share", "held"), [(0.0, 1), (0.3, 4), (0.5, 6)])
    def test_without_test_images_some_are_held_out(
        self,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        has_train: bool,
        share: float,
        held: int,
    ) -> None:
        caplog.set_level("INFO", "fastaug")
        root = write_folder(tmp_path, {"train": 12})
        if not has_train:
            root = root / "train"
        source = DataSource(DataConfig(data=str(root), validation=share))
        (train, validation), test = source.training(), source.test()
        assert validation is None
        assert np.bincount(test.labels).tolist() == [held] * 3
        assert np.bincount(train.labels).tolist() == [12 - held] * 3
        assert not {*files_of(train)} & {*files_of(test)}
        for part in (train, test):
            for file, label in zip(files_of(part), part.labels, strict=True):
                assert file.parent.name == CLASSES[label]
        (line,) = caplog.messages
        assert missing(line, f"{3 * held} 36 --validation") == []
        again = DataSource(DataConfig(data=str(root), validation=share))
        assert files_of(again.test()) == files_of(test)

    def test_test_images_may_lack_classes(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path, {"train": 2, "test": 1})
        shutil.rmtree(root / "test/green")
        train, test = open_both(root)
        assert test.classes == train.classes == CLASSES
        assert [CLASSES[label] for label in test.labels] == ["blue", "red"]

    def test_one_class_only(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path, {"train": 1, "test": 1})
        shutil.rmtree(root / "train/green")
        shutil.rmtree(root / "train/red")
        with raises(DataError, "train blue"):
            open_data(str(root), "train")

    def test_classes_that_differ(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path, {"train": 1, "test": 1})
        (root / "test/red").rename(root / "test/rouge")
        with raises(DataError, "rouge red"):
            open_both(str(root))

    def test_the_fingerprint_knows_the_set_but_not_the_place(
        self, folder: Path, tmp_path: Path
    ) -> None:
        moved = Path(shutil.copytree(folder, tmp_path / "moved"))
        before = open_data(str(folder), "train").fingerprint
        assert open_data(str(moved), "train").fingerprint == before
        (moved / "train/red/03.jpg").unlink()
        assert open_data(str(moved), "train").fingerprint != before


class TestDecode:
    @pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1", "I;16"])
    def test_every_mode_becomes_rgb(self, mode: str, tmp_path: Path) -> None:
        file = tmp_path / ("x.tif" if mode in ("CMYK", "I;16") else "x.png")
        Image.new("L", (5, 4), 200).convert(mode).save(file)
        image = decode(file.read_bytes(), str(file))
        assert image.shape == (4, 5, 3)
        assert image.dtype == np.uint8

    @pytest.mark.parametrize("damage", ["truncate", "empty", "noise"])
    def test_a_bad_file_is_named(self, damage: str, tmp_path: Path) -> None:
        file = tmp_path / "bad.jpg"
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(file)
        content = file.read_bytes()
        damaged = {"truncate": content[:900], "empty": b"", "noise": os.urandom(500)}[damage]
        with raises(DataError, "bad.jpg"):
            decode(damaged, "bad.jpg")

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        images = open_data(str(write_folder(tmp_path, {"train": 2})), "train")
        Path(images.where(3)).unlink()
        with raises(DataError, "green/01.jpg"):
            images.image(3)

    def test_a_header_that_claims_a_huge_image(self, tmp_path: Path) -> None:
        file = tmp_path / "bomb.png"
        Image.new("1", (20_000, 20_000)).save(file)
        assert file.stat().st_size < 100_000
        with raises(DataError, "bomb.png"):
            decode(file.read_bytes(), str(file))


def cifar_pixels(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), np.uint8)


def write_cifar(root: Path, kind: int, protocol: int = 2) -> Path:
    """CIFAR-10's or CIFAR-100's python files, with bytes as keys as Python 2 left them."""
    folder = root / {10: "cifar-10-batches-py", 100: "cifar-100-python"}[kind]
    folder.mkdir(parents=True)

    def dump(name: str, content: dict) -> None:
        (folder / name).write_bytes(pickle.dumps(content, protocol))

    if kind == 10:
        dump("batches.meta", {b"label_names": [f"class{i}".encode() for i in range(10)]})
        for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
            labels = [(seed + i) % 10 for i in range(4)]
            dump(name, {b"data": cifar_pixels(4, seed), b"labels": labels})
    else:
        dump("meta", {b"fine_label_names": [f"class{i}".encode() for i in range(100)]})
        for seed, name in enumerate(["train", "test"]):
            labels = [(7 * seed + i) % 100 for i in range(4)]
            dump(name, {b"data": cifar_pixels(4, seed), b"fine_labels": labels})
    return folder


class TestCifar:
    @pytest.mark.parametrize("kind", [10, 100])
    @pytest.mark.parametrize("form", ["folder", "parent", "tar.gz"])
    @pytest.mark.parametrize("protocol", [2, 4])
    def test_every_form(self, kind: int, form: str, protocol: int, tmp_path: Path) -> None:
        folder = write_cifar(tmp_path, kind, protocol)
        path = {"folder": folder, "parent": tmp_path, "tar.gz": tmp_path / "cifar.tar.gz"}[form]
        if form == "tar.gz":
            with tarfile.open(path, "w:gz") as archive:
                archive.add(folder, folder.name)
            shutil.rmtree(folder)
        train, test = open_both(str(path))
        assert len(train) == (20 if kind == 10 else 4)
        assert len(test) == 4
        assert train.classes[:2] == ("class0", "class1")
        assert len(train.classes) == kind
        # Rows are planes of red, green and blue, each 32 x 32.
        red, green, blue = cifar_pixels(4, 0)[2].reshape(3, 1024)
        np.testing.assert_array_equal(train.image(2)[..., 0].ravel(), red)
        np.testing.assert_array_equal(train.image(2)[..., 1].ravel(), green)
        np.testing.assert_array_equal(train.image(2)[..., 2].ravel(), blue)
        assert test.labels.tolist() == ([5, 6, 7, 8] if kind == 10 else [7, 8, 9, 10])

    def test_a_pickle_cannot_run_code(self, tmp_path: Path) -> None:
        folder = write_cifar(tmp_path, 10)
        proof = tmp_path / "executed"

        class Malice:
            def __reduce__(self):
                return (os.system, (f"touch {proof}",))

        (folder / "data_batch_3").write_bytes(pickle.dumps({b"data": Malice()}))
        with raises(DataError, "data_batch_3 pickle"):
            open_data(str(folder), "train")
        assert not proof.exists()

    @pytest.mark.parametrize("content", [b"", b"\x80\x02garbage", pickle.dumps([1, 2])])
    def test_a_torn_file(self, content: bytes, tmp_path: Path) -> None:
        folder = write_cifar(tmp_path, 10)
        (folder / "data_batch_2").write_bytes(content)
        with raises(DataError, "pickle"):
            open_data(str(folder), "train")

    def test_a_missing_file(self, tmp_path: Path) -> None:
        folder = write_cifar(tmp_path, 10)
        (folder / "data_batch_5").unlink()
        with raises(DataError, "data_batch_5"):
            open_data(str(folder), "train")

    def test_an_archive_with_another_layout(self, tmp_path: Path) -> None:
        path = tmp_path / "other.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("photos/a.jpg"), io.BytesIO())
        with raises(DataError, "photos/a.jpg"):
            open_data(str(path), "train")

    def test_not_an_archive(self, tmp_path: Path) -> None:
        path = tmp_path / "cifar-10-python.tar.gz"
        path.write_bytes(b"no archive at all")
        with raises(DataError, path.name):
            open_data(str(path), "train")

    def test_a_truncated_archive(self, tmp_path: Path) -> None:
        folder, path = write_cifar(tmp_path, 10), tmp_path / "cifar.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            archive.add(folder, folder.name)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with raises(DataError, "cifar.tar.gz"):
            open_data(str(path), "train")

    def test_a_path_out_of_the_archive_writes_nothing(self, tmp_path: Path) -> None:
        inside = tmp_path / "inside"
        inside.mkdir()
        path = inside / "evil.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            member = tarfile.TarInfo("../escaped")
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
        with pytest.raises(DataError):
            open_data(str(path), "train")
        assert not (tmp_path / "escaped").exists()


def npz(path: Path, **arrays: np.ndarray) -> str:
    np.savez(path / "set.npz", **arrays)
    return str(path / "set.npz")


class TestNpz:
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 9, 3), np.uint8)
    labels = np.arange(40) % 4

    @pytest.mark.parametrize(
        "names",
        [
            ("train_images", "train_labels", "test_images", "test_labels"),
            ("x_train", "y_train", "x_test", "y_test"),
            ("images", "labels", "val_images", "val_labels"),
        ],
    )
    def test_both_splits(self, names: tuple[str, ...], tmp_path: Path) -> None:
        arrays = (self.images, self.labels, self.images[:7], self.labels[:7, None])
        train, test = open_both(npz(tmp_path, **dict(zip(names, arrays, strict=True))))
        assert (len(train), len(test)) == (40, 7)
        np.testing.assert_array_equal(train.image(3), self.images[3])
        assert test.labels.tolist() == [0, 1, 2, 3, 0, 1, 2]
        assert train.classes == ("0", "1", "2", "3")

    def test_a_test_set_is_held_out_where_there_is_none(self, tmp_path: Path) -> None:
        train, test = open_both(npz(tmp_path, images=self.images, labels=self.labels))
        assert (len(train), len(test)) == (36, 4)
        assert sorted(test.labels.tolist()) == [0, 1, 2, 3]
        seen = {image.tobytes() for image in (*train.array, *test.array)}
        assert seen == {image.tobytes() for image in self.images}

    def test_names_of_the_classes(self, tmp_path: Path) -> None:
        path = npz(tmp_path, images=self.images, labels=self.labels, classes=list("abcd"))
        assert open_data(path, "train").classes == ("a", "b", "c", "d")

    def test_a_class_without_images_is_reported(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = npz(tmp_path, images=self.images, labels=np.where(self.labels == 1, 9, self.labels))
        assert len(open_data(path, "train").classes) == 10
        assert "no images of 1, 4, 5 and 3 more" in caplog.text

    def test_names_allow_any_gap(self, tmp_path: Path) -> None:
        names = [f"n{i}" for i in range(5001)]
        labels = np.where(self.labels == 3, 5000, self.labels)
        path = npz(tmp_path, images=self.images, labels=labels, classes=names)
        assert len(open_data(path, "train").classes) == 5001

    def test_grey_images(self, tmp_path: Path) -> None:
        train = open_data(npz(tmp_path, images=self.images[..., 0], labels=self.labels), "train")
        np.testing.assert_array_equal(train.image(0), np.repeat(self.images[0, ..., :1], 3, -1))

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"images": images / 255, "labels": labels}, "uint8 float64"),
            ({"images": images[:, 0], "labels": labels[:3]}, "image"),
            ({"images": images.transpose(0, 3, 1, 2), "labels": labels}, "[40 3 8 9]"),
            ({"images": images, "labels": labels[:30]}, "[40] [30]"),
            ({"images": images, "labels": labels - 1}, "0 2 -1"),
            ({"images": images, "labels": labels.astype(str)}, ""),
            ({"images": images, "labels": labels * 0}, ""),
            (
                {"pictures": images},
                "pictures",
            ),
            ({"images": images[:0], "labels": labels[:0]}, ""),
            # A label like 5000 would make a network of 5001 classes.
            ({"images": images, "labels": np.where(labels == 3, 5000, labels)}, "5,000 4 5,001"),
            ({"images": images, "labels": labels + 200}, "203 4 204"),
        ],
    )
    def test_wrong_layouts(self, arrays: dict, message: str, tmp_path: Path) -> None:
        with raises(DataError, "set.npz", message):
            open_data(npz(tmp_path, **arrays), "train")

    def test_object_arrays_are_not_unpickled(self, tmp_path: Path) -> None:
        path = npz(tmp_path, images=np.array([{}, {}], object), labels=self.labels)
        with raises(DataError, "set.npz"):
            open_data(path, "train")

    def test_not_an_npz(self, tmp_path: Path) -> None:
        (tmp_path / "x.npz").write_bytes(b"nothing of the kind")
        with raises(DataError, "x.npz"):
            open_data(str(tmp_path / "x.npz"), "train")


def test_an_unknown_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "x.csv").touch()
    with raises(DataError, "x.csv"):
        open_data(str(tmp_path / "x.csv"), "train")


def test_labels_follow_the_classes_of_a_checkpoint(folder: Path) -> None:
    test = open_data(str(folder), "test")
    known = ("other", *CLASSES[::-1])
    aligned = align_classes(test, known, "the checkpoint")
    assert aligned.classes == known
    for index in range(len(test)):
        assert known[aligned.labels[index]] == Path(test.where(index)).parent.name


def test_a_reader_is_asked_before_a_folder_counts_as_flat(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format may have its images directly in the folder, beside their labels."""
    images = folder / "train" / "red"
    assert open_training_or_flat(str(images)).classes == ("red",)

    def open_split(_path: Path, split: sources.Split, _config: DataConfig) -> ImageSet:
        return open_data(str(folder), split)

    csv = SimpleNamespace(
        matches=lambda path: path == images, has_test=lambda _: True, open_split=open_split
    )
    monkeypatch.setattr(sources, "READERS", (csv, *sources.READERS))
    assert open_training_or_flat(str(images)).classes == ("blue", "green", "red")
