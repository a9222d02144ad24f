"""Hugging Face data sets: Parquet files as the Hub has them, and folders of `save_to_disk`.

The features of a data set (which columns are images and labels, names of the classes) are JSON in
the metadata of each file's schema.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet, Split
from fastaug.data.readers.arrow_images import (
    ArrowImages,
    Chunk,
    ParquetImages,
    RowFiles,
    image_chunks,
    map_arrow,
    open_parquet,
)
from fastaug.data.readers.columns import LABEL_COLUMNS, named_column, sort_classes, usual_column
from fastaug.data.readers.splits import SPLIT_WORDS, split_word
from fastaug.errors import DataError, few, parser_errors

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("fastaug")

DESCRIPTION = "a Hugging Face data set (.parquet, or a folder of save_to_disk)"
LAYOUT: tuple[tuple[str, str], ...] = (
    (
        "Hugging Face, Parquet",
        "`train-00000-of-00014.parquet` and `validation-*` or `test-*`, in the folder or in its "
        "`data/`; `default/train/0000.parquet`; or one file",
    ),
    ("Hugging Face, `save_to_disk`", "a folder with `dataset_dict.json`, or of one data set"),
)
_STATE, _INFO = "state.json", "dataset_info.json"
_WORDS = tuple(word for words in SPLIT_WORDS.values() for word in words)
_MAX_JSON = 2**26  # bytes


def matches(path: Path) -> bool:
    return bool(_splits(path))


def has_test(path: Path) -> bool:
    return _test_files(_splits(path)) is not None


def open_split(path: Path, split: Split, config: DataConfig) -> ImageSet:
    splits = _splits(path)
    files = splits.get("train") if split == "train" else _test_files(splits)
    if files is None:
        raise DataError(f"{path}: found no train split, only {few(splits)}")
    rows = _Rows.of(files)
    title = f"{path} ({split})"
    image = rows.image_column(config.image_column)
    label = rows.label_column(config.label_column)
    classes, labels = _labels(rows, label, title)
    place = RowFiles(path, rows.files, rows.counts)
    if rows.tables is None:
        return ImageSet(title, classes, labels, ParquetImages(place, image))
    chunks: list[Chunk] = []
    for file, table in zip(rows.files, rows.tables, strict=True):
        with _readable(file):
            chunks += image_chunks(table.column(image))
    return ImageSet(title, classes, labels, ArrowImages(place, chunks))


# --- files of a split ---


def _splits(path: Path) -> dict[str, tuple[Path, ...]]:
    """Split -> its Parquet files, or the state.json of its saved data set."""
    if not path.is_dir():
        return {"train": (path,)} if path.suffix.lower() == ".parquet" else {}
    if (path / _STATE).is_file() and (path / _INFO).is_file():
        return {"train": (path / _STATE,)}
    states = [path / word / _STATE for word in _WORDS]
    if saved := {state.parent.name: (state,) for state in states if state.is_file()}:
        return dict(saved)
    # The Hub converts other formats to default/SPLIT/*.parquet.
    folders = [folder for folder in (path, path / "data", path / "default") if folder.is_dir()]
    return next(filter(None, map(_parquet_files, folders)), {})


def _parquet_files(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Parquet files by the split in their names or of their folders; without any: train."""
    inside = sorted(f for f in folder.glob("*.parquet") if not f.name.startswith("."))
    found: dict[str, tuple[Path, ...]] = {}
    for word in _WORDS:
        below = [f for name in (word, f"partial-{word}") for f in folder.glob(f"{name}/*.parquet")]
        named = [file for file in inside if split_word(file.name) == word]
        if named or below:
            found[word] = tuple(named or sorted(below))
    return found or ({"train": tuple(inside)} if inside else {})


def _test_files(splits: dict[str, tuple[Path, ...]]) -> tuple[Path, ...] | None:
    """The files of the first test split that has labels: the Hub has test splits without."""
    for word in SPLIT_WORDS["test"]:
        if word in splits:
            if _has_labels(_Rows.of(splits[word])):
                return splits[word]
            log.warning("%s: the %s split has no labels and is not used", splits[word][0], word)
    return None


def _saved_files(state: Path) -> tuple[Path, ...]:
    """The Arrow files that a state.json names."""
    content = _read_json(state)
    with parser_errors(f"{state}: names no files"):
        names = [str(entry["filename"]) for entry in content["_data_files"]]
    if any(content.get(key) for key in content if "indices" in key):
        raise DataError(
            f"{state}: the rows are in another order (an older `datasets` saved it); load and save "
            "it again with a current one"
        )
    if bad := [name for name in names if Path(name).name != name]:
        raise DataError(f"{state}: {bad[0]!r} is not a file in its folder")
    files = tuple(state.parent / name for name in names)
    if not files:
        raise DataError(f"{state}: names no files")
    if missing := [file for file in files if not file.is_file()]:
        raise DataError(f"{state}: files that it names are missing: {few(missing)}; copy them too")
    return files


def _read_json(file: Path) -> dict[str, Any]:
    with parser_errors(f"{file}: not readable as JSON"):
        if (size := file.stat().st_size) > _MAX_JSON:
            raise ValueError(f"{size:,} bytes")
        content = json.loads(file.read_text("utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
    return content


def _readable(file: Path) -> Any:
    return parser_errors(f"{file}: cannot be read", "; it is damaged, download it again")


# --- columns ---


@dataclass(frozen=True)
class _Rows:
    """The rows of a split."""

    files: tuple[Path, ...]
    counts: tuple[int, ...]
    schema: pa.Schema
    """Columns and types of the first file."""
    features: dict[str, dict[str, Any]]
    """Column -> its type, as the data set has it."""
    tables: list[pa.Table] | None
    """Tables that are mapped into memory; None for Parquet files."""

    @classmethod
    def of(cls, files: tuple[Path, ...]) -> _Rows:
        tables: list[pa.Table] | None = None
        if files[0].name == _STATE:
            info = _read_json(files[0].parent / _INFO)
            files = _saved_files(files[0])
            tables = [map_arrow(file) for file in files]
            schema, counts = tables[0].schema, tuple(len(table) for table in tables)
        else:
            info, found = {}, []
            for file in files:
                with _readable(file):
                    opened = open_parquet(file)
                    found.append((opened.schema_arrow, opened.metadata.num_rows))
            schema, counts = found[0][0], tuple(count for _, count in found)
        with _readable(files[0]):  # names that are not UTF-8, or that pyarrow does not find
            for name in schema.names:
                schema.field(name)
        for file, count in zip(files, counts, strict=True):
            if count > (size := file.stat().st_size):  # equal values take next to no place
                raise DataError(f"{file}: claims {count:,} images in {size:,} bytes")
        return cls(files, counts, schema, _features(schema, info), tables)

    def image_column(self, given: str) -> str:
        if not given:
            return self._only(self.images(), "image", "images", "--image-column")
        name = self._named(given, "--image-column")
        if not _holds_images(self.schema.field(name).type):
            raise DataError(
                f"--image-column {given}: has {self.schema.field(name).type} in {self.files[0]}, "
                "not encoded images (bytes)"
            )
        return name

    def label_column(self, given: str) -> str:
        if given:
            return self._named(given, "--label-column")
        return self._only(self.labels(), "label", "labels", "--label-column")

    def images(self) -> list[str]:
        """The columns that may be the images."""
        usable = [name for name in self.schema.names if _holds_images(self.schema.field(name).type)]
        return [n for n in usable if self.features.get(n, {}).get("_type") == "Image"] or usable

    def labels(self) -> list[str]:
        """The columns that may be the labels."""
        names = self.schema.names
        labels = [n for n in names if self.features.get(n, {}).get("_type") == "ClassLabel"]
        usual = usual_column(names, LABEL_COLUMNS)
        return labels or ([] if usual is None else [names[usual]])

    def column(self, name: str) -> pa.ChunkedArray:
        """A column of all files."""
        import pyarrow as pa

        chunks: list[pa.Array] = []
        for number, file in enumerate(self.files):
            with _readable(file):
                if self.tables is None:
                    column = open_parquet(file).read([name], use_threads=False).column(name)
                else:
                    column = self.tables[number].column(name)
                column.validate(full=True)
                if len(column) != self.counts[number]:
                    raise ValueError(f"{len(column):,} of {self.counts[number]:,} rows")
                chunks += column.chunks
        with _readable(self.files[0]):
            return pa.chunked_array(chunks, self.schema.field(name).type)

    def _named(self, given: str, flag: str) -> str:
        names: Sequence[str] = self.schema.names
        return names[named_column(names, given, flag, str(self.files[0]))]

    def _only(self, found: list[str], usual: str, content: str, flag: str) -> str:
        if len(found) == 1:
            return found[0]
        if usual in found:
            return usual
        which = f"the {content} may be {few(found, 20)}" if found else f"no column has {content}"
        columns = "" if found else f"; it has {few(self.schema.names, 20) or 'no columns'}"
        raise DataError(f"{self.files[0]}: {which}{columns}; name the column as {flag}")


def _features(schema: pa.Schema, info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The features in a schema's metadata, else those in dataset_info.json."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        features = info.get("features")
    if not isinstance(features, dict):
        return {}
    return {name: feature for name, feature in features.items() if isinstance(feature, dict)}


def _holds_images(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_images(kind.field("bytes").type)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


# --- labels ---


def _has_labels(rows: _Rows) -> bool:
    """False if there is no column of labels, or if all labels are -1 or null."""
    if len(rows.labels()) != 1:
        return bool(rows.labels())
    column = rows.column(rows.labels()[0])
    if column.null_count == len(column):
        return False
    values = column.drop_null().to_numpy()
    return not (np.issubdtype(values.dtype, np.integer) and bool((values == -1).all()))


def _labels(rows: _Rows, name: str, title: str) -> tuple[tuple[str, ...], np.ndarray]:
    """The classes, and the label of each row: [N] int64."""
    column = rows.column(name)
    where: Callable[[int], str] = RowFiles(Path(title), rows.files, rows.counts).where
    if column.null_count:
        null = np.flatnonzero(column.is_null().to_numpy())[0]
        raise DataError(f"{where(int(null))}: has no label (null in column {name})")
    values, texts = _as_integers(column, f"{rows.files[0]}: column {name}")
    names = rows.features.get(name, {}).get("names")
    if texts is None and isinstance(names, list) and names:
        wrong = np.flatnonzero((values < 0) | (values >= len(names)))
        if len(wrong):
            raise DataError(
                f"{where(int(wrong[0]))}: label {values[wrong[0]]} in column {name}, must be 0 to "
                f"{len(names) - 1} (-1: the split has no labels)"
            )
        return tuple(map(str, names)), values
    if texts is None:
        known, values = np.unique(values, return_inverse=True)
        texts = [str(number) for number in known.tolist()]
    classes = sort_classes(texts)
    places = {name: place for place, name in enumerate(classes)}
    return classes, np.array([places[text] for text in texts], np.int64)[values]


def _as_integers(column: pa.ChunkedArray, what: str) -> tuple[np.ndarray, list[str] | None]:
    """Values as int64; for text, indices into the list of different texts."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return column.to_numpy().astype(np.int64), None
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"{what} has {kind}; labels must be whole numbers or text")
    encoded = column.cast(pa.large_string()).combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()
