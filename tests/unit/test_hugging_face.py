"""Hugging Face's Parquet files and save_to_disk folders; damaged and odd ones end with one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from color_folders import CLASSES
from expect import missing, raises
from hugging_face_sets import (
    FEATURES,
    IMAGE,
    save_dict_to_disk,
    save_to_disk,
    table,
    with_features,
    write_parquet,
)
from image_sets import open_both, open_data, touch
from shard_writers import Sample, photos

from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.readers import arrow_images, hugging_face
from fastaug.data.readers.arrow_images import ParquetImages
from fastaug.data.scan import scan_set
from fastaug.data.sources import DataSource
from fastaug.errors import DataError

TRAIN, TEST = photos(11), photos(5, seed=1)
LABELS = [label for _, label in TRAIN]


def contents(images: ImageSet) -> list[Sample]:
    return [(bytes(images.encoded(i)), int(images.labels[i])) for i in range(len(images))]


def parquet_files(root: Path) -> Path:
    """As push_to_hub names them."""
    for name, part in (("train-00000-of-00002", TRAIN[:6]), ("train-00001-of-00002", TRAIN[6:])):
        write_parquet(root / f"data/{name}.parquet", table(part))
    write_parquet(root / "data/validation-00000-of-00001.parquet", table(TEST))
    write_parquet(root / "data/test-00000-of-00001.parquet", table([(b"", -1)]))
    (root / "README.md").write_text("---\nconfigs:\n---")
    return root


def converted_files(root: Path) -> Path:
    """As in the Hub's branch of converted data sets."""
    write_parquet(root / "default/train/0000.parquet", table(TRAIN[:6]))
    write_parquet(root / "default/train/0001.parquet", table(TRAIN[6:]))
    write_parquet(root / "default/test/0000.parquet", table(TEST))
    return root


def plain_names(root: Path) -> Path:
    write_parquet(root / "train.parquet", table(TRAIN))
    write_parquet(root / "test.parquet", table(TEST))
    return root


def saved(root: Path) -> Path:
    return save_dict_to_disk(root, train=table(TRAIN), test=table(TEST))


BOTH: list[Callable[[Path], Path]] = [parquet_files, converted_files, plain_names, saved]


class TestLayouts:
    @pytest.mark.parametrize("write", BOTH)
    def test_both_splits(self, write: Callable[[Path], Path], tmp_path: Path) -> None:
        train, test = open_both(write(tmp_path / "set"))
        assert contents(train) == TRAIN
        assert contents(test) == TEST
        assert train.classes == test.classes == CLASSES
        assert train.image(3).shape == (19, 19, 3)

    def test_one_file_or_one_saved_set(self, tmp_path: Path) -> None:
        file = write_parquet(tmp_path / "x.parquet", table(TRAIN))
        folder = save_to_disk(tmp_path / "set", table(TRAIN), files=3)
        for path in (file, folder):
            assert contents(open_data(path, "train")) == TRAIN
            assert not DataSource(DataConfig(data=str(path))).has_test

    def test_files_without_a_split_are_for_training(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "0000.parquet", table(TRAIN[:4]))
        write_parquet(tmp_path / "0001.parquet", table(TRAIN[4:]))
        assert contents(open_data(tmp_path, "train")) == TRAIN

    def test_a_test_split_without_labels_is_not_used(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_parquet(tmp_path / "train.parquet", table(TRAIN))
        for unlabeled in (
            table([(image, -1) for image, _ in TEST]),
            table(TEST).drop_columns("label"),
        ):
            write_parquet(tmp_path / "test.parquet", unlabeled)
            assert not DataSource(DataConfig(data=str(tmp_path))).has_test
            assert missing(caplog.messages[-1], "test.parquet") == []

    def test_other_folders_are_not_taken(self, folder: Path, tmp_path: Path) -> None:
        assert not hugging_face.matches(folder)
        (tmp_path / "state.json").write_text("{}")
        assert not hugging_face.matches(tmp_path)


class TestStorage:
    @pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
    @pytest.mark.parametrize("in_struct", [True, False])
    def test_kinds_of_bytes(self, kind: pa.DataType, in_struct: bool, tmp_path: Path) -> None:
        images = pa.array([image for image, _ in TRAIN], kind)
        if in_struct:
            images = pa.StructArray.from_arrays(
                [pa.nulls(11, pa.string()), images], ["path", "bytes"]
            )
        made = pa.table({"label": LABELS, "picture": images})
        assert contents(open_data(write_parquet(tmp_path / "a.parquet", made), "train")) == TRAIN
        assert contents(open_data(save_to_disk(tmp_path / "a", made), "train")) == TRAIN

    @pytest.mark.parametrize("form", ["parquet", "saved"])
    def test_images_are_not_copied(self, form: str, tmp_path: Path) -> None:
        path = parquet_files(tmp_path / "a") if form == "parquet" else saved(tmp_path / "b")
        images = open_data(path, "train")
        first, again = (np.frombuffer(images.encoded(7), np.uint8) for _ in range(2))
        assert first.__array_interface__["data"] == again.__array_interface__["data"]

    @pytest.mark.parametrize("form", ["parquet", "saved"])
    def test_ends_places_and_stamps(self, form: str, tmp_path: Path) -> None:
        path = parquet_files(tmp_path / "a") if form == "parquet" else saved(tmp_path / "b")
        images = open_data(path, "train")
        storage = images.storage
        assert storage is not None
        content = TRAIN[8][0]
        assert storage.ends(8, 50) == (content[:50], content[-50:], len(content))
        assert storage.ends(8, 10**6) == (content, content, len(content))
        row = 8 - 6 if form == "parquet" else 8
        assert images.where(8).endswith(f"row {row}")
        file = Path(images.where(8).split(",")[0])
        before = storage.stamps(np.arange(11))
        assert len({*before.tolist()}) == 11
        assert storage.stamps(np.array([8]))[0] == before[8]
        touch(file)
        assert storage.stamps(np.array([8]))[0] != before[8]

    def test_the_fingerprint_knows_the_set_but_not_the_place(self, tmp_path: Path) -> None:
        one, two = (open_data(saved(tmp_path / name), "train") for name in "ab")
        assert one.fingerprint == two.fingerprint
        other = save_dict_to_disk(tmp_path / "c", train=table(TRAIN[:-1]))
        assert open_data(other, "train").fingerprint != one.fingerprint

    def test_a_null_in_a_later_part(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(arrow_images, "_PART", 2000)
        rows = [None if i == 9 else {"bytes": TRAIN[i][0], "path": None} for i in range(11)]
        made = pa.table({"image": pa.array(rows, IMAGE), "label": LABELS})
        file = write_parquet(tmp_path / "x.parquet", made)
        with raises(DataError, "x.parquet row 9"):
            hugging_face.open_split(file, "train", DataConfig()).encoded(9)

    def test_nulls(self, tmp_path: Path, own_cache: Path) -> None:
        """A null and a path that is missing are bad images; an image may be in a file."""
        (tmp_path / "a").mkdir()
        (tmp_path / "a/there.jpg").write_bytes(TRAIN[3][0])
        rows: list[dict[str, Any] | None] = [
            {"bytes": TRAIN[0][0], "path": "any.jpg"},
            None,
            {"bytes": None, "path": None},
            {"bytes": None, "path": "there.jpg"},
            {"bytes": None, "path": "gone.jpg"},
            {"bytes": TRAIN[5][0], "path": None},
        ]
        made = pa.table({"image": pa.array(rows, IMAGE), "label": LABELS[:6]})
        write_parquet(tmp_path / "a/x.parquet", made)
        (save_to_disk(tmp_path / "b", made) / "there.jpg").write_bytes(TRAIN[3][0])
        for path in (tmp_path / "a/x.parquet", tmp_path / "b"):
            images = open_data(path, "train")
            assert [bytes(images.encoded(i)) for i in (0, 3, 5)] == [TRAIN[i][0] for i in (0, 3, 5)]
            assert [*scan_set(images).manifest.bad] == [1, 2, 4]
            with raises(DataError, "2"):
                images.encoded(2)

    def test_arrays_that_start_within_their_buffers(self) -> None:
        rows = [None if i == 5 else {"bytes": TRAIN[i][0], "path": None} for i in range(11)]
        parts = [pa.array(rows, IMAGE).slice(3, 4), pa.array(rows, IMAGE).slice(8)]
        found = list(arrow_images.image_chunks(pa.chunked_array(parts)))
        assert [[*chunk.nulls] for chunk in found] == [[2], []]
        files = arrow_images.RowFiles(Path("a"), (Path("a/b"),), (7,))
        images = arrow_images.ArrowImages(files, found)
        expected = [TRAIN[i][0] for i in (3, 4, 6, 8, 9, 10)]
        assert [bytes(images.read(i)) for i in (0, 1, 3, 4, 5, 6)] == expected

    def test_a_forked_process_reads(self, tmp_path: Path) -> None:
        images = open_data(parquet_files(tmp_path), "train")
        if (child := os.fork()) == 0:
            os._exit(0 if contents(images) == TRAIN else 1)
        assert os.waitpid(child, 0)[1] == 0


class TestLargeParquet:
    @pytest.fixture
    def small_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(arrow_images, "memory_bound", lambda: 40_000)

    def test_is_refused_with_the_command(
        self, small_machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = parquet_files(tmp_path)
        assert len(open_data(path, "train")) == 11
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        with raises(DataError, f"fastaug.pack {path} OUT"):
            open_data(path, "train")

    def test_far_too_large_is_not_read_up_to_the_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(arrow_images, "_PART", 1)
        sizes = [len(image) for image, _ in TRAIN]
        monkeypatch.setattr(arrow_images, "memory_bound", lambda: sum(sizes) // 3)
        images = hugging_face.open_split(parquet_files(tmp_path), "train", DataConfig())
        assert isinstance(images.storage, ParquetImages)
        read = []
        real = ParquetImages._read_part
        monkeypatch.setattr(
            ParquetImages, "_read_part", lambda own, part: read.append(part) or real(own, part)
        )
        with raises(DataError, "fastaug.pack"):
            images.storage.for_random_access()
        assert len(read) == 1

    def test_equal_images_that_the_file_has_once(self, tmp_path: Path, small_machine: None) -> None:
        """Dictionary encoding: the file is small, the column is not."""
        made = table([TRAIN[10]] * 200)
        file = write_parquet(tmp_path / "a.parquet", made, rows=100)
        assert file.stat().st_size < 40_000
        with raises(DataError, f"fastaug.pack {file} OUT"):
            open_data(file, "train")

    def test_is_read_in_order(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As fastaug.pack does: each file is opened once, each row group is read once."""
        monkeypatch.setattr(arrow_images, "_PART", 2000)
        path = parquet_files(tmp_path)
        images = hugging_face.open_split(path, "train", DataConfig())
        opened: list[Path] = []
        read: list[int] = []

        def open_parquet(file: Path) -> SimpleNamespace:
            opened.append(file)
            real = pq.ParquetFile(file)

            def read_row_groups(groups: range, *args: Any, **kwargs: Any) -> pa.Table:
                read.extend(groups)
                return real.read_row_groups(groups, *args, **kwargs)

            return SimpleNamespace(read_row_groups=read_row_groups)

        monkeypatch.setattr(arrow_images, "open_parquet", open_parquet)
        assert contents(images) == TRAIN
        assert [file.name[:11] for file in opened] == ["train-00000", "train-00001"]
        assert read == [0, 1, 0, 1]
        for index in (7, 3, 7, 3):  # threads at the border of two parts
            images.encoded(index)
        assert len(read) <= 6
        assert [images.where(i).split("row ")[1] for i in (0, 5, 6, 10)] == ["0", "5", "0", "4"]


class TestLabels:
    def open(self, tmp_path: Path, made: pa.Table, **settings: Any) -> ImageSet:
        return open_data(write_parquet(tmp_path / "a.parquet", made), "train", **settings)

    def test_without_metadata(self, tmp_path: Path) -> None:
        images = self.open(
            tmp_path, table([(image, 2 + 8 * label) for image, label in TRAIN], None)
        )
        assert images.classes == ("2", "10", "18")
        assert images.labels.tolist() == LABELS

    @pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
    @pytest.mark.parametrize("encoded", [True, False])
    def test_text(self, tmp_path: Path, kind: pa.DataType, encoded: bool) -> None:
        texts = pa.array([("zebra", "ant", "yak")[label] for label in LABELS], kind)
        column = texts.dictionary_encode() if encoded else texts
        made = table(TRAIN, None).set_column(1, "label", column)
        images = self.open(tmp_path, made)
        assert images.classes == ("ant", "yak", "zebra")
        assert [images.classes[label] for label in images.labels] == texts.to_pylist()

    def test_features_of_dataset_info(self, tmp_path: Path) -> None:
        images = open_data(save_to_disk(tmp_path / "a", table(TRAIN, None)), "train")
        assert images.classes == CLASSES

    def two_of_each(self) -> pa.Table:
        """As CIFAR-100 has it: fine_label and coarse_label."""
        made = table(TRAIN).rename_columns(["img", "fine"])
        made = made.append_column("coarse", pa.array([label // 2 for label in LABELS]))
        made = made.append_column("mask", made.column("img"))
        image, label = FEATURES["image"], FEATURES["label"]
        coarse = {"names": ["x", "y"], "_type": "ClassLabel"}
        features = {"img": image, "fine": label, "coarse": coarse, "mask": image}
        return with_features(made, features)

    def test_several_columns(self, tmp_path: Path) -> None:
        made = self.two_of_each()
        with raises(DataError, "img mask --image-column"):
            self.open(tmp_path, made)
        with raises(DataError, "fine coarse --label-column"):
            self.open(tmp_path, made, image_column="img")
        usual = made.rename_columns(["image", "label", "coarse", "mask"]).replace_schema_metadata()
        assert self.open(tmp_path, usual).labels.tolist() == LABELS
        images = self.open(tmp_path, made, image_column="img", label_column="3")
        assert images.classes == ("x", "y")
        assert images.labels.tolist() == [label // 2 for label in LABELS]

    @pytest.mark.parametrize(
        ("made", "names"),
        [
            (table(TRAIN).drop_columns("label"), "image --label-column"),
            (table(TRAIN).drop_columns("image"), "label --image-column"),
            (table([*TRAIN[:7], (b"", -1)]), "row 7 -1 0 2"),
            (table([*TRAIN[:7], (b"", 3)]), "row 7 3 0 2"),
            (table([*TRAIN[:7], (b"", None)]), "row 7"),
            (table(TRAIN, None).set_column(1, "label", pa.array([0.5] * 11)), "label double"),
            (table([]), ""),
        ],
    )
    def test_errors(self, tmp_path: Path, made: pa.Table, names: str) -> None:
        with raises(DataError, "a.parquet", names):
            self.open(tmp_path, made)

    @pytest.mark.parametrize("flag", ["image", "label"])
    def test_no_such_column(self, tmp_path: Path, flag: str) -> None:
        with raises(DataError, f"--{flag}-column nope image label"):
            self.open(tmp_path, table(TRAIN), **{f"{flag}_column": "nope"})

    def test_a_column_without_images(self, tmp_path: Path) -> None:
        with raises(DataError, "--image-column label int64"):
            self.open(tmp_path, table(TRAIN), image_column="label")


class TestDamage:
    @pytest.mark.parametrize("write", [parquet_files, saved])
    @pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
    def test_a_truncated_file(self, write: Callable, share: float, tmp_path: Path) -> None:
        root = write(tmp_path)
        file = sorted(f for f in root.rglob("*train*") if f.is_file() and f.suffix != ".json")[:1]
        file = file or [next((root / "train").glob("*.arrow"))]
        size = file[0].stat().st_size
        os.truncate(file[0], int(size * share))
        with raises(DataError, file[0].name):
            open_data(root, "train")

    def test_a_file_that_ends_after_a_batch(self, tmp_path: Path) -> None:
        """pyarrow reads it without an error."""
        root = save_to_disk(tmp_path / "a", table(TRAIN))
        file = next(root.glob("*.arrow"))
        os.truncate(file, file.stat().st_size - 8)
        assert len(pa.ipc.open_stream(file.read_bytes()).read_all()) == 11
        with raises(DataError, file.name):
            open_data(root, "train")

    @pytest.mark.parametrize("write", [parquet_files, saved])
    def test_any_byte(self, write: Callable, tmp_path: Path) -> None:
        """Either the file is refused or images are read, right or wrong; nothing else happens."""
        root = write(tmp_path)
        file = next(f for f in sorted(root.rglob("*.*")) if f.suffix in (".parquet", ".arrow"))
        content, rng = file.read_bytes(), np.random.default_rng(0)
        places = [*rng.integers(0, len(content), 40), *range(len(content) - 300, len(content), 9)]
        for place in [*places, *range(0, 900, 31)]:
            damaged = bytearray(content)
            damaged[place] ^= 1 << int(rng.integers(8))
            file.write_bytes(damaged)
            with suppress(DataError):
                for images in open_both(root):
                    contents(images)

    def test_offsets_out_of_the_buffer(self, tmp_path: Path) -> None:
        root = save_to_disk(tmp_path / "a", table(TRAIN), rows=11)
        file = next(root.glob("*.arrow"))
        ends = np.cumsum([0, *(len(image) for image, _ in TRAIN)]).astype("<i4").tobytes()
        content = file.read_bytes()
        assert content.count(ends) == 1
        file.write_bytes(content.replace(ends, ends[:-4] + (2**30).to_bytes(4, "little")))
        with raises(DataError, file.name):
            open_data(root, "train")

    def test_compressed_buffers(self, tmp_path: Path) -> None:
        root = save_to_disk(tmp_path / "a", table(TRAIN))
        file = next(root.glob("*.arrow"))
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(file, table(TRAIN).schema, options=options) as out:
            out.write_table(table([(bytes(10_000), 0)] * 20))
        with raises(DataError, file.name):
            open_data(root, "train")

    @pytest.mark.parametrize(
        ("state", "names"),
        [
            ({"_data_files": []}, "state.json"),
            ({"_data_files": [{"filename": "../x.arrow"}]}, "../x.arrow"),
            ({"_data_files": [{"filename": "x.arrow"}]}, "x.arrow"),
            ({"_data_files": 3}, "state.json"),
            ({"_indices_files": [{"filename": "indices.arrow"}]}, "state.json"),
            ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "state.json"),
        ],
    )
    def test_a_wrong_state(self, tmp_path: Path, state: dict[str, Any], names: str) -> None:
        save_to_disk(tmp_path / "other", table(TRAIN))
        (tmp_path / "other/data-00000-of-00001.arrow").rename(tmp_path / "x.arrow")
        with raises(DataError, names):
            open_data(save_to_disk(tmp_path / "a", table(TRAIN), **state), "train")

    @pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
    @pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b"[" * 100_000])
    def test_not_json(self, tmp_path: Path, name: str, content: bytes) -> None:
        (save_to_disk(tmp_path / "a", table(TRAIN)) / name).write_bytes(content)
        with raises(DataError, name):
            open_data(tmp_path / "a", "train")

    def test_no_training_split(self, tmp_path: Path) -> None:
        with raises(DataError, "train validation"):
            open_data(save_dict_to_disk(tmp_path / "a", validation=table(TEST)), "train")
