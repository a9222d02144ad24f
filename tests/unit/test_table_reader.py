"""CSV and TSV files of paths and labels, written by Python's csv module; each mistake has its own
line."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from color_folders import CLASSES, color_image, write_folder
from expect import missing, raises
from image_sets import files_of, open_both, open_data
from PIL import Image

from fastaug.data import sources
from fastaug.data.config import DataConfig
from fastaug.data.readers import folder as folder_reader
from fastaug.data.readers import table
from fastaug.data.sources import DataSource
from fastaug.errors import DataError

Row = Sequence[object]


def write_table(file: Path, rows: Sequence[Row], delimiter: str = ",") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", newline="", encoding="utf-8") as out:
        csv.writer(out, delimiter=delimiter).writerows(rows)
    return file


def write_images(folder: Path, names: Sequence[str]) -> None:
    """Image i is of color i % 3."""
    rng = np.random.default_rng(0)
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(color_image(i % 3, rng, 16)).save(folder / name, "JPEG")


NAMES = [f"images/{i:02}.jpg" for i in range(12)]
ROWS = [(name, CLASSES[i % 3]) for i, name in enumerate(NAMES)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """12 images in images/."""
    write_images(tmp_path, NAMES)
    return tmp_path


def check(images: sources.ImageSet, root: Path) -> None:
    """All images and labels of ROWS."""
    assert files_of(images) == [root / name for name in NAMES]
    assert [images.classes[label] for label in images.labels] == [label for _, label in ROWS]
    assert images.classes == CLASSES


class TestFormats:
    @pytest.mark.parametrize(
        ("name", "delimiter"),
        [("a.csv", ","), ("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", "\t"), ("A.CSV", ",")],
    )
    def test_delimiters(self, root: Path, name: str, delimiter: str) -> None:
        rows = [("path", "label"), *ROWS]
        check(open_data(write_table(root / name, rows, delimiter), "train"), root)

    @pytest.mark.parametrize(
        ("image", "label"),
        [("path", "label"), ("Image Path", "Class"), ("file_name", "target"), ("id", "species")],
    )
    def test_usual_columns_at_any_place(self, root: Path, image: str, label: str) -> None:
        header = ("", "width", label, image)
        rows = [(i, 16, color, name) for i, (name, color) in enumerate(ROWS)]
        check(open_data(write_table(root / "a.csv", [header, *rows]), "train"), root)

    def test_a_path_is_preferred_to_an_id(self, root: Path) -> None:
        rows = [("id", "image_path", "label"), *((i, *row) for i, row in enumerate(ROWS))]
        check(open_data(write_table(root / "a.csv", rows), "train"), root)

    def test_without_a_header(self, root: Path) -> None:
        check(open_data(write_table(root / "a.csv", ROWS), "train"), root)
        reverse = [(label, name) for name, label in ROWS]
        check(open_data(write_table(root / "b.csv", reverse), "train"), root)

    @pytest.mark.parametrize("by_number", [False, True])
    def test_columns_by_flags(self, root: Path, by_number: bool) -> None:
        header = ("file", "shape", "label", "color")
        rows = [(0, name, "square", label) for name, label in ROWS]
        file = write_table(root / "a.csv", [header, *rows])
        flags = ("2", "4") if by_number else ("shape", "color")
        images = open_data(file, "train", image_column=flags[0], label_column=flags[1])
        check(images, root)

    def test_a_name_that_looks_like_data(self, root: Path) -> None:
        file = write_table(root / "a.csv", [("path", "2024"), *ROWS])
        check(open_data(file, "train", image_column="path", label_column="2"), root)

    def test_a_class_named_train(self, root: Path) -> None:
        rows = [(name, ("train", "bus")[i % 2]) for i, name in enumerate(NAMES)]
        assert open_data(write_table(root / "a.csv", rows), "train").classes == ("bus", "train")

    def test_delimiters_within_quotes(self, root: Path) -> None:
        rows = [("path", "label", "a; b, c; d; e; f; g"), *((*row, "s") for row in ROWS)]
        file = root / "a.csv"
        check(open_data(write_table(file, rows), "train"), root)
        assert file.read_text().splitlines()[0].count(";") == 5

    def test_quotes_mark_and_blank_lines(self, root: Path) -> None:
        file = root / "a.csv"
        lines = [f'"{name}" ,"red, or ""rouge"""' for name in NAMES[:2]]
        lines += ["", f"{NAMES[2]},blue", ""]
        file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(["path,label", *lines]).encode())
        images = open_data(file, "train")
        assert images.classes == ("blue", 'red, or "rouge"')
        assert images.labels.tolist() == [1, 1, 0]

    def test_numbers_are_sorted_by_value(self, root: Path) -> None:
        rows = [(name, (2, 10, 1)[i % 3]) for i, name in enumerate(NAMES)]
        images = open_data(write_table(root / "a.csv", [("path", "label"), *rows]), "train")
        assert images.classes == ("1", "2", "10")
        assert images.labels.tolist() == [1, 2, 0] * 4

    def test_absolute_paths(self, root: Path) -> None:
        rows = [(root / name, label) for name, label in ROWS]
        check(open_data(write_table(root / "lists/a.csv", rows), "train"), root)

    def test_the_fingerprint_knows_the_set_but_not_the_place(self, tmp_path: Path) -> None:
        prints = []
        for place, rows in (("a", ROWS), ("b", ROWS), ("c", ROWS[::-1])):
            write_images(tmp_path / place, NAMES)
            file = write_table(tmp_path / place / "labels.csv", rows)
            prints.append(open_data(file, "train").fingerprint)
        assert prints[0] == prints[1] != prints[2]


class TestSplits:
    def rows(self, *splits: str) -> list[Row]:
        return [(*row, splits[i % len(splits)]) for i, row in enumerate(ROWS)]

    @pytest.mark.parametrize("header", [True, False])
    @pytest.mark.parametrize(
        "words", [("train", "val"), ("TRAIN", "validation"), ("training", "test")]
    )
    def test_a_column(self, root: Path, header: bool, words: tuple[str, str]) -> None:
        rows = self.rows(words[0], words[0], words[0], words[0], words[1])
        top = [("path", "label", "split")] if header else []
        train, test = open_both(write_table(root / "a.csv", [*top, *rows]))
        assert files_of(test) == [root / NAMES[4], root / NAMES[9]]
        assert len(train) == 10
        assert [test.classes[label] for label in test.labels] == [ROWS[4][1], ROWS[9][1]]
        assert train.name != test.name

    def test_val_is_preferred_to_a_test_without_labels(self, root: Path) -> None:
        rows: list[Row] = [("path", "label", "split"), *self.rows("train", "train", "train", "val")]
        rows += [(NAMES[0], "", "test")]
        train, test = open_both(write_table(root / "a.csv", rows))
        assert (len(train), len(test)) == (9, 3)

    def test_none(self, root: Path) -> None:
        source = DataSource(DataConfig(data=str(write_table(root / "a.csv", ROWS))))
        assert not source.has_test
        assert len(source.test()) == 3

    @pytest.mark.parametrize("test", ["val", "test", "valid", "validation"])
    def test_two_files(self, root: Path, test: str) -> None:
        header = ("path", "label")
        write_table(root / "train.csv", [header, *ROWS[:9]])
        write_table(root / f"{test}.csv", [header, *ROWS[9:]])
        train, held = open_both(root)
        assert files_of(train) == [root / name for name in NAMES[:9]]
        assert files_of(held) == [root / name for name in NAMES[9:]]


class TestFolders:
    def test_one_table(self, root: Path) -> None:
        write_table(root / "labels.csv", [("path", "label"), *ROWS])
        write_table(root / "notes.csv", [("day", "weather"), ("monday", "rain")])
        check(open_data(root, "train"), root)

    def test_kaggle_s_layout(self, tmp_path: Path) -> None:
        """Names without suffix, images in a folder of the split, test.csv without labels."""
        write_images(tmp_path, [f"train_images/a{i}.jpg" for i in range(6)])
        write_images(tmp_path, [f"test_images/a{i}.jpg" for i in range(3)])
        rows = [(f"a{i}", CLASSES[i % 3]) for i in range(6)]
        write_table(tmp_path / "train.csv", [("image_id", "label"), *rows])
        write_table(tmp_path / "test.csv", [("image_id",), ("a0",), ("a1",)])
        write_table(tmp_path / "sample_submission.csv", [("image_id", "label"), ("a0", "red")])
        source = DataSource(DataConfig(data=str(tmp_path)))
        assert files_of(source.train) == [tmp_path / f"train_images/a{i}.jpg" for i in range(6)]
        assert not source.has_test

    def test_class_folders_win(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path, {"train": 2, "test": 1})
        write_table(root / "train.csv", [("path", "label"), ("train/red/00.jpg", "blue")])
        assert files_of(open_data(root, "train"))[-1].parent.name == "red"
        below = root / "train"
        write_table(below / "labels.csv", [("path", "label"), ("red/00.jpg", "blue")])
        assert len(open_data(below, "train")) == 6

    def test_a_folder_of_images_with_some_other_table(self, root: Path) -> None:
        folder = root / "images"
        for rows in ([("day", "weather")], [("path", "label"), ("gone.jpg", "red")]):
            write_table(folder / "notes.csv", rows)
            assert not table.matches(folder)
        assert folder_reader.open_flat(folder) is not None

    def test_two_tables_of_equal_rank_are_not_guessed(self, root: Path) -> None:
        for name in ("a.csv", "b.csv"):
            write_table(root / name, [("path", "label"), *ROWS])
        assert not table.matches(root)


class TestErrors:
    HEADER = ("path", "label")

    @pytest.mark.parametrize(
        ("rows", "names"),
        [
            ([], ""),
            ([("path", "label")], ""),
            ([("where", "label"), ROWS[0]], "where label --image-column"),
            ([("path", "color"), ROWS[0]], "path color --label-column"),
            ([("path", "label"), ROWS[0], ("images/01.jpg",)], "3 1 2"),
            ([("path", "label"), ROWS[0], ("images/01.jpg", " ")], "3 label"),
            ([("path", "label"), ROWS[0], (" ", "red")], "3 path"),
            ([("path", "label", "split"), (*ROWS[0], "holdout")], "2 holdout split"),
            ([("path", "label"), ("none/0.jpg", "red")], "2 none/0.jpg"),
            ([(*ROWS[0], "x", "y")], "--label-column"),
            ([("images/00.jpg red",)], "images/00.jpg red"),
        ],
    )
    def test_one_line(self, root: Path, rows: list[Row], names: str) -> None:
        with raises(DataError, "a.csv", names):
            open_data(write_table(root / "a.csv", rows), "train")

    @pytest.mark.parametrize("given", ["color", "0", "3"])
    def test_no_such_column(self, root: Path, given: str) -> None:
        file = write_table(root / "a.csv", [self.HEADER, *ROWS])
        with raises(DataError, f"--image-column {given} path label"):
            open_data(file, "train", image_column=given)

    @pytest.mark.parametrize(
        "content", ["path,label\ncafé.jpg,é\n".encode("latin-1"), "path,label".encode("utf-16")]
    )
    def test_not_utf_8(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "a.csv").write_bytes(content)
        with raises(DataError, "a.csv UTF-8"):
            open_data(tmp_path / "a.csv", "train")

    def test_a_cell_of_megabytes(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_bytes(b"path,label\n" + b"x" * 10**6)
        with raises(DataError, "a.csv"):
            open_data(tmp_path / "a.csv", "train")

    def test_a_huge_file_is_not_read(self, tmp_path: Path) -> None:
        with open(tmp_path / "a.csv", "wb") as file:
            file.truncate(2**40)
        with raises(DataError, "a.csv"):
            open_data(tmp_path / "a.csv", "train")

    def test_a_zero_in_a_name(self, root: Path) -> None:
        (root / "a.csv").write_bytes(b"path,label\nimages/00.jpg,red\na\0b.jpg,blue\n")
        with raises(DataError, "a.csv 3"):
            open_data(root / "a.csv", "train")

    def test_one_name_in_two_folders(self, tmp_path: Path) -> None:
        write_images(tmp_path, ["images/a.jpg", "photos/a.jpg"])
        with raises(DataError, "images/a.jpg photos/a.jpg"):
            open_data(write_table(tmp_path / "t.csv", [self.HEADER, ("a", "red")]), "train")

    def test_a_few_missing_images_are_found_by_the_scan(
        self, root: Path, capsys: pytest.CaptureFixture, own_cache: Path
    ) -> None:
        from fastaug import cli, scan

        (root / NAMES[7]).unlink()
        file = write_table(root / "a.csv", [self.HEADER, *ROWS])
        assert cli.run(scan.main, [str(file)]) == 2
        assert missing(capsys.readouterr().err, f"{NAMES[7]} --max-bad") == []
        assert cli.run(scan.main, [str(file), "--max-bad", "0.2"]) == 0
