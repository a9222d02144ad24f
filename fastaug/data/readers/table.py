"""Tables: a CSV or TSV file with a path and a label for each image, with or without a split."""

from __future__ import annotations

import csv
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from fastaug.data.config import DataConfig
from fastaug.data.image_set import IMAGE_SUFFIXES, ImageSet, Split
from fastaug.data.readers.columns import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    SPLIT_COLUMNS,
    named_column,
    sort_classes,
    usual_column,
)
from fastaug.data.readers.folder import visible_folders
from fastaug.data.readers.splits import SPLIT_WORDS, split_word
from fastaug.data.storage import Files
from fastaug.errors import DataError, few
from fastaug.runtime.device import memory_bound

log = logging.getLogger("fastaug")

DESCRIPTION = "a CSV or TSV of paths and labels"
LAYOUT: tuple[tuple[str, str], ...] = (
    (
        "`.csv` or `.tsv`",
        "a path and a label in each row, and optionally a split (`train`, `val`, `test`); paths "
        "start at the folder of the file",
    ),
    (
        "a folder with such a file",
        "`labels.csv` next to the images, or `train.csv` and `val.csv` or `test.csv`",
    ),
)
_SUFFIXES = (".csv", ".tsv")
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_IMAGE_FOLDER = re.compile(
    r"(train|val|valid|validation|test|images?|imgs?|jpe?gs?|pngs?|photos?|pictures?|data|[-_ ])+"
)
"""Names of folders that are not classes, such as train_images."""
_FIRST_ROWS = 5  # whose images are looked for


def matches(path: Path) -> bool:
    if path.is_dir():
        return bool(_tables_in(path))
    return path.suffix.lower() in _SUFFIXES


def has_test(path: Path) -> bool:
    return "test" in _tables_in(path) if path.is_dir() else _test_value(_Table(path)) is not None


def open_split(path: Path, split: Split, config: DataConfig) -> ImageSet:
    if not path.is_dir():
        return _open(_Table(path, config.image_column, config.label_column), split)
    tables = _tables_in(path)
    file = tables[split]
    table = _Table(file, config.image_column, config.label_column)
    return _open(table, split, is_split=len({*tables.values()}) > 1)


# --- one file ---


class _Table:
    """A file of rows with named or numbered columns."""

    def __init__(self, file: Path, image_column: str = "", label_column: str = "") -> None:
        """image_column, label_column: name, or number from 1; empty: recognized."""
        self.file, self._image_column, self._label_column = file, image_column, label_column
        # Lines are read one by one, but a line may be as long as the file.
        if (size := file.stat().st_size) > (allowed := memory_bound() // 4):
            raise DataError(
                f"{file}: {size:,} bytes, more than the {allowed:,} that fit into memory"
            )

    def rows(self, *columns: int) -> Iterator[tuple[int, list[str]]]:
        """Line number and cells of each row after the header; all have these columns."""
        rows = self._all_rows()
        if self.has_header:
            next(rows)
        width = 1 + max(columns)
        for line, row in rows:
            if len(row) < width:
                raise DataError(
                    f"{self.file}, line {line}: {len(row)} columns, need at least {width}"
                )
            yield line, row

    @cached_property
    def names(self) -> list[str]:
        """Names of the columns; numbers if there is no header."""
        count = len(self._first_row)
        return self._first_row if self.has_header else [str(i + 1) for i in range(count)]

    @cached_property
    def has_header(self) -> bool:
        """Whether the first row has a column that was given by name, or no image and no number."""
        given = {name for name in (self._image_column, self._label_column) if not name.isdecimal()}
        if given & {*self._first_row} - {""}:
            return True
        return not any(_is_image(cell) or cell.isdecimal() for cell in self._first_row)

    @cached_property
    def image(self) -> int:
        """Index of the column with the paths."""
        if self._image_column:
            return self._named("--image-column", self._image_column)
        if self.has_header:
            found = usual_column(self.names, IMAGE_COLUMNS)
        else:
            found = next((i for i, cell in enumerate(self._first_row) if _is_image(cell)), None)
        return self._found(found, "paths of the images", "--image-column")

    @cached_property
    def label(self) -> int:
        """Index of the column with the labels."""
        if self._label_column:
            return self._named("--label-column", self._label_column)
        if self.has_header:
            found = usual_column(self.names, LABEL_COLUMNS)
        else:
            rest = {*range(len(self._first_row))} - {self.image, self.split}
            found = rest.pop() if len(rest) == 1 else None
        return self._found(found, "labels", "--label-column")

    @cached_property
    def split(self) -> int | None:
        """Index of the column with the split, if there is one."""
        if self.has_header:
            return usual_column(self.names, SPLIT_COLUMNS)
        if len(self._first_row) < 3:
            return None
        cells = enumerate(self._first_row)
        return next((i for i, cell in cells if cell.lower() in _SPLITS), None)

    @cached_property
    def _first_row(self) -> list[str]:
        first = next(self._all_rows(), None)
        if first is None:
            raise DataError(f"{self.file}: is empty; it needs a path and a label in each row")
        return first[1]

    @cached_property
    def _delimiter(self) -> str:
        if self.file.suffix.lower() == ".tsv":
            return "\t"
        with open(self.file, encoding="utf-8-sig") as file:
            unquoted = re.sub(r'"[^"]*"', "", file.readline())
        return max(",;\t", key=unquoted.count)

    def _all_rows(self) -> Iterator[tuple[int, list[str]]]:
        try:
            with open(self.file, encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(file, delimiter=self._delimiter)
                for row in reader:
                    if row:
                        yield reader.line_num, [cell.strip() for cell in row]
        except UnicodeDecodeError as error:
            raise DataError(f"{self.file}: not UTF-8 text ({error.reason}); convert it") from error
        except csv.Error as error:
            raise DataError(
                f"{self.file}, line {reader.line_num}: cannot be read ({error})"
            ) from error
        except OSError as error:
            raise DataError(f"{self.file}: cannot be read ({error.strerror})") from error

    def _named(self, flag: str, given: str) -> int:
        return named_column(self.names, given, flag, str(self.file))

    def _found(self, index: int | None, content: str, flag: str) -> int:
        if index is not None:
            return index
        if len(self.names) == 1:
            raise DataError(
                f"{self.file}: has one column, {self._first_row[0]!r}; separate a path and a label "
                "in each row by a comma, a semicolon or a tab"
            )
        columns = f"the columns {few(self.names, 20)}" if self.has_header else "no header"
        raise DataError(
            f"{self.file}: found no column of {content}; it has {columns}; give the column's name "
            f"or number, from 1 to {len(self.names)}, as {flag}"
        )


def _open(table: _Table, split: Split, is_split: bool = False) -> ImageSet:
    """is_split: whether the file has only images of this split."""
    wanted: str | None = "train" if split == "train" else _test_value(table)
    if table.split is None or is_split:
        wanted = None
    names: list[str] = []
    labels: list[str] = []
    shared: dict[str, str] = {}  # one object for each label
    image_column, label_column, first_line = table.image, table.label, 0
    for line, row in table.rows(image_column, label_column, table.split or 0):
        if wanted is not None and _split_of(table, line, row) != wanted:
            continue
        name, label = row[image_column], row[label_column]
        if not (name and label) or "\0" in name:
            column = table.names[image_column if label else label_column]
            raise DataError(
                f"{table.file}, line {line}: no {'path' if label else 'label'} in column {column}"
            )
        first_line = first_line or line
        names.append(name)
        labels.append(shared.setdefault(label, label))
    title = str(table.file) if wanted is None else f"{table.file} ({wanted})"
    if not names:
        raise DataError(f"{title}: no rows with images")
    classes = sort_classes(shared)
    place = {name: index for index, name in enumerate(classes)}
    numbers = np.fromiter((place[label] for label in labels), np.int64, len(labels))
    folder, suffix = _locate(table.file, names[:_FIRST_ROWS], split, first_line)
    return ImageSet(title, classes, numbers, Files.of((n + suffix for n in names), folder))


def _test_value(table: _Table) -> str | None:
    """The split of the test images: val, or test if there is no val; None if there is neither."""
    if table.split is None:
        return None
    found = set()
    for line, row in table.rows(table.split):
        found.add(_split_of(table, line, row))
        if "val" in found:
            return "val"
    return "test" if "test" in found else None


def _split_of(table: _Table, line: int, row: Sequence[str]) -> str:
    assert table.split is not None
    value = row[table.split]
    if (split := _SPLITS.get(value) or _SPLITS.get(value.lower())) is None:
        raise DataError(
            f"{table.file}, line {line}: unknown split {value!r} in column "
            f"{table.names[table.split]}; use train, val or test"
        )
    return split


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


# --- the images of a file ---


@dataclass(frozen=True)
class _Place:
    """Where names of a table lead to."""

    folder: Path
    suffix: str

    def has(self, name: str) -> bool:
        return os.path.isfile(os.path.join(self.folder, name + self.suffix))


def _locate(file: Path, names: Sequence[str], split: Split, line: int) -> tuple[Path, str]:
    """The folder of the images, and the suffix that their names lack.

    names: those of the first images; line: where the first one is.
    """
    here = _Place(file.parent, "")
    if any(map(here.has, names)):
        return here.folder, here.suffix
    found = [place for place in _places(file.parent) if any(map(place.has, names))]
    own = [place for place in found if split_word(place.folder.name) in SPLIT_WORDS[split]]
    if len(own or found) == 1:
        (place,) = own or found
        kind = f" + {place.suffix}" if place.suffix else ""
        log.info("%s: the images are %s/NAME%s", file, place.folder, kind)
        return place.folder, place.suffix
    if found:
        both = few([place.folder / (names[0] + place.suffix) for place in found])
        raise DataError(f"{file}, line {line}: several files are {names[0]!r}: {both}")
    raise DataError(
        f"{file}, line {line}: the first {len(names)} images are missing; looked for "
        f"{file.parent / names[0]} (paths start at the folder of the table)"
    )


def _places(folder: Path) -> Iterator[_Place]:
    """The folder and the image folders in it, each without and with suffixes."""
    folders = [folder, *(folder / name for name in visible_folders(folder))]
    suffixes = ("", *sorted(IMAGE_SUFFIXES), *(suffix.upper() for suffix in sorted(IMAGE_SUFFIXES)))
    for inside in folders:
        if inside == folder or _IMAGE_FOLDER.fullmatch(inside.name.lower()):
            yield from (_Place(inside, suffix) for suffix in suffixes)


# --- a folder with files ---


def _tables_in(root: Path) -> dict[Split, Path]:
    """The table of each split; both are the same file if it has a column for the split.

    None, if the folder has class folders, or if it is not clear which file has the images.
    """
    inside = root / "train" if (root / "train").is_dir() else root
    if any(not _IMAGE_FOLDER.fullmatch(name.lower()) for name in visible_folders(inside)):
        return {}
    names = (name for name in os.listdir(root) if not name.startswith("."))
    files = sorted(root / name for name in names if Path(name).suffix.lower() in _SUFFIXES)
    tables = {file: table for file in files if (table := _image_table(file)) is not None}
    by_split = {split_word(file.stem): file for file in reversed(tables)}
    if "train" in by_split:
        train = by_split["train"]
        test = next((by_split[word] for word in SPLIT_WORDS["test"] if word in by_split), None)
    elif len(tables) == 1:
        ((train, table),) = tables.items()
        test = None if _test_value(table) is None else train
    else:
        return {}
    return {"train": train} if test is None else {"train": train, "test": test}


def _image_table(file: Path) -> _Table | None:
    """The table in a file; None if its columns are not known, or its first images are missing."""
    try:
        table = _Table(file)
        rows = list(islice(table.rows(table.image, table.label), _FIRST_ROWS))
        _locate(file, [row[table.image] for _, row in rows], "train", 0)
    except (DataError, IndexError):
        return None
    return table if rows and all(row[table.label] for _, row in rows) else None
