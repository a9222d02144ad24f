"""Data sets in Hugging Face's formats, written by pyarrow as the `datasets` library writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from color_folders import CLASSES
from shard_writers import Sample

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": list(CLASSES), "_type": "ClassLabel"},
}


def table(samples: Sequence[Sample], features: dict[str, Any] | None = FEATURES) -> pa.Table:
    """Columns image and label; features: those of the metadata, None: without metadata."""
    images = [{"bytes": content, "path": None} for content, _ in samples]
    schema = pa.schema([("image", IMAGE), ("label", pa.int64())])
    labels = pa.array([label for _, label in samples], pa.int64())
    made = pa.table([pa.array(images, IMAGE), labels], schema)
    return made if features is None else with_features(made, features)


def with_features(made: pa.Table, features: dict[str, Any]) -> pa.Table:
    content = json.dumps({"info": {"features": features}})
    return made.replace_schema_metadata({"huggingface": content})


def write_parquet(file: Path, made: pa.Table, rows: int = 4) -> Path:
    """rows: number in each row group."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(made, file, row_group_size=rows, compression="snappy")
    return file


def save_to_disk(folder: Path, made: pa.Table, files: int = 1, rows: int = 4, **state: Any) -> Path:
    """A data set in this number of files; rows: number in each record batch."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
    size = -(-len(made) // files)
    for i, name in enumerate(names):
        with pa.ipc.new_stream(folder / name, made.schema) as out:
            out.write_table(made.slice(i * size, size), max_chunksize=rows)
    content = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "1490d415e884e85f",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(content | state, indent=2))
    info = {"citation": "", "description": "", "features": FEATURES, "homepage": "", "license": ""}
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2))
    return folder


def save_dict_to_disk(root: Path, **splits: pa.Table) -> Path:
    for name, made in splits.items():
        save_to_disk(root / name, made)
    (root / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return root
