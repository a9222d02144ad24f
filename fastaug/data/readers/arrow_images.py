"""Images in the columns of Arrow and Parquet files, as slices of Arrow's buffers without a copy.

`read` uses numpy only: the loader's processes are forks, in which pyarrow's threads do not exist.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastaug.data.storage import Digest, Files
from fastaug.errors import DataError, parser_errors
from fastaug.runtime.device import memory_bound

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_PART = 2**25
"""Bytes that are read at a time: row groups of 100 images, one by one, take several times as long
and 1.5 times the memory."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_DAMAGED = "; it is truncated or damaged, download it again"


@dataclass(frozen=True)
class RowFiles:
    """The files of a split, and the number of rows in each."""

    source: Path
    """What --data names."""
    files: tuple[Path, ...]
    counts: tuple[int, ...]
    first_row: int = 0
    """Number of the first row in its file."""

    def __len__(self) -> int:
        return sum(self.counts)

    def where(self, index: int) -> str:
        file, row = self.place(np.array([index]))
        return f"{self.files[file[0]]}, row {row[0]}"

    def stamps(self, indices: np.ndarray) -> np.ndarray:
        file, row = self.place(indices)
        used, inverse = np.unique(file, return_inverse=True)
        stamps = Files.of([self.files[number] for number in used]).stamps(np.arange(len(used)))
        return stamps[inverse] + row.astype(np.uint64)

    def update_fingerprint(self, digest: Digest) -> None:
        for file, count in zip(self.files, self.counts, strict=True):
            digest.update(os.fsencode(f"{file.name}\0{count}\n"))

    def place(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The file of each index, and the row in it."""
        ends = np.cumsum(self.counts)
        file = np.searchsorted(ends, indices, side="right")
        return file, indices - (ends - self.counts)[file] + self.first_row


class Chunk(NamedTuple):
    """The images of consecutive rows."""

    offsets: np.ndarray
    """[n + 1] int32 or int64: image i is bytes [offsets[i], offsets[i + 1]) of the content."""
    content: memoryview
    nulls: dict[int, str]
    """Row without bytes -> path of the image, or nothing."""


class ArrowImages:
    """Images in memory, or in files that are mapped into it."""

    def __init__(self, rows: RowFiles, chunks: Sequence[Chunk]) -> None:
        self.rows, self._chunks = rows, chunks
        counts = [len(chunk.offsets) - 1 for chunk in chunks]
        if sum(counts) != len(rows):
            raise DataError(
                f"{rows.files[0]}: has {sum(counts):,} images in {len(rows):,} rows{_DAMAGED}"
            )
        self._starts = np.cumsum([0, *counts])[:-1]
        nulls = {
            int(start) + row: path
            for start, chunk in zip(self._starts, chunks, strict=True)
            for row, path in chunk.nulls.items()
        }
        self._nulls = {index: number for number, index in enumerate(nulls)}
        """Index of an image without bytes -> its place in files, whose name is empty if unknown."""
        self._files = Files.of(nulls.values(), rows.files[0].parent if rows.files else "")

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> bytes | memoryview:
        if index in self._nulls:
            return self._files.read(self._file(index))
        return self._slice(index)

    def ends(self, index: int, count: int) -> tuple[bytes, bytes, int]:
        if index in self._nulls:
            return self._files.ends(self._file(index), count)
        content = self._slice(index)
        return bytes(content[:count]), bytes(content[-count:]), len(content)

    def where(self, index: int) -> str:
        return self.rows.where(index)

    def stamps(self, indices: np.ndarray) -> np.ndarray:
        stamps = self.rows.stamps(indices)
        for place, index in enumerate(indices.tolist() if self._nulls else ()):
            if index in self._nulls:
                stamps[place] += self._files.stamps(np.array([self._nulls[index]]))[0]
        return stamps

    def update_fingerprint(self, digest: Digest) -> None:
        self.rows.update_fingerprint(digest)

    def for_random_access(self) -> ArrowImages:
        return self

    def _slice(self, index: int) -> memoryview:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        offsets, content, _ = self._chunks[number]
        row = index - int(self._starts[number])
        return content[int(offsets[row]) : int(offsets[row + 1])]

    def _file(self, index: int) -> int:
        number = self._nulls[index]
        if not self._files.name(number):
            raise DataError(f"{self.where(index)}: has no image (null)")
        return number


class Part(NamedTuple):
    """Consecutive row groups of a Parquet file."""

    file: Path
    groups: range
    first_row: int
    rows: int
    size: int
    """Bytes of all columns, as the file's metadata has it. Not of the images: pyarrow ends the
    process where the metadata of a column are damaged."""


class ParquetImages:
    """Images in Parquet files, which are read in order: some row groups at a time."""

    def __init__(self, rows: RowFiles, column: str) -> None:
        self._rows, self._column = rows, column
        self._parts = [part for file in rows.files for part in _parts_of(file)]
        self._starts = np.cumsum([0, *(part.rows for part in self._parts)])
        self._lock = threading.Lock()
        self._current: dict[int, ArrowImages] = {}
        """Part -> its images: the last two, since threads do not read in strict order."""
        self._opened: tuple[Path, pq.ParquetFile] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> bytes | memoryview:
        images, row = self._part_of(index)
        return images.read(row)

    def ends(self, index: int, count: int) -> tuple[bytes, bytes, int]:
        images, row = self._part_of(index)
        return images.ends(row, count)

    def where(self, index: int) -> str:
        return self._rows.where(index)

    def stamps(self, indices: np.ndarray) -> np.ndarray:
        return self._rows.stamps(indices)

    def update_fingerprint(self, digest: Digest) -> None:
        self._rows.update_fingerprint(digest)

    def for_random_access(self) -> ArrowImages:
        """The images in memory, if they fit into a third of it for all ranks of this machine."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # set by torchrun
        allowed = memory_bound() // ranks
        chunks: list[Chunk] = []
        size = 0
        for part in self._parts:
            found = self._read_part(part)
            # A column of many equal images may be much smaller in the file than in memory.
            size += sum(len(chunk.content) for chunk in found)
            if not chunks and (expected := self._expected_size(size)) > 2 * allowed:
                size = expected  # far too large: do not read up to the limit first
            self._check_size(size, allowed, ranks)
            chunks += found
        return ArrowImages(self._rows, chunks)

    def _expected_size(self, first: int) -> int:
        """Bytes of all images, if their share of all columns is that of the first part."""
        return first * sum(part.size for part in self._parts) // max(self._parts[0].size, 1)

    def _check_size(self, size: int, allowed: int, ranks: int) -> None:
        if size > allowed:
            source, each = self._rows.source, f" for each of {ranks} ranks" if ranks > 1 else ""
            raise DataError(
                f"{source}: the images take {size / 2**30:.3g} GiB, and {allowed / 2**30:.3g} GiB "
                f"of memory may be used{each}; convert them once to shards that are read from "
                f"disk: python -m fastaug.pack {source} OUT, then --data OUT"
            )

    def _part_of(self, index: int) -> tuple[ArrowImages, int]:
        """The part that an image is in, and its row in it."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        with self._lock:
            if number not in self._current:
                part = self._parts[number]
                rows = RowFiles(self._rows.source, (part.file,), (part.rows,), part.first_row)
                if len(self._current) == 2:
                    del self._current[next(iter(self._current))]
                self._current[number] = ArrowImages(rows, self._read_part(part))
            return self._current[number], index - int(self._starts[number])

    def _read_part(self, part: Part) -> list[Chunk]:
        with parser_errors(f"{part.file}: cannot be read", _DAMAGED):
            if self._opened is None or self._opened[0] != part.file:
                self._opened = part.file, open_parquet(part.file)
            _, opened = self._opened
            table = opened.read_row_groups(part.groups, [self._column], use_threads=False)
            return list(image_chunks(table.column(self._column)))


def _parts_of(file: Path) -> Iterator[Part]:
    with parser_errors(f"{file}: not a readable Parquet file", _DAMAGED):
        metadata = open_parquet(file).metadata
        first_group = first_row = rows = size = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            rows += group.num_rows
            size += group.total_byte_size
            if size >= _PART or number == metadata.num_row_groups - 1:
                yield Part(file, range(first_group, number + 1), first_row, rows, size)
                first_group, first_row, rows, size = number + 1, first_row + rows, 0, 0


def open_parquet(file: Path) -> pq.ParquetFile:
    import pyarrow.parquet as pq

    return pq.ParquetFile(file)


def map_arrow(file: Path) -> pa.Table:
    """The table in an Arrow file (stream format) that is mapped into memory."""
    import pyarrow as pa

    with parser_errors(f"{file}: not a readable Arrow file", _DAMAGED):
        with open(file, "rb") as opened:
            mapped = pa.py_buffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        if mapped.slice(max(0, mapped.size - 8)).to_pybytes() != _END_OF_STREAM:
            raise ValueError("the end mark is missing")
        reader = pa.ipc.open_stream(mapped)
        batches = []
        for batch in reader:
            buffers = (buffer for column in batch.columns for buffer in column.buffers() if buffer)
            start, end = mapped.address, mapped.address + mapped.size
            if not all(start <= buffer.address <= end for buffer in buffers if buffer.size):
                raise ValueError("it is compressed, which does not allow random access")
            batches.append(batch)
        return pa.Table.from_batches(batches, reader.schema)


def image_chunks(column: pa.ChunkedArray) -> Iterator[Chunk]:
    """The images of a column of bytes, or of structs of bytes and a path."""
    import pyarrow as pa

    column.validate(full=True)  # a damaged file may have offsets that lead anywhere
    for array in column.chunks:
        if not len(array):
            continue
        paths = None
        if pa.types.is_struct(array.type):
            names = [field.name for field in array.type]
            parts = dict(zip(names, array.flatten(), strict=True))
            array, paths = parts["bytes"], parts.get("path")
        _, offsets, content = array.buffers()
        kind = np.int64 if pa.types.is_large_binary(array.type) else np.int32
        nulls = {}
        if array.null_count:
            rows = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
            found = [None] * len(rows) if paths is None else paths.take(pa.array(rows)).to_pylist()
            nulls = {row: path or "" for row, path in zip(rows.tolist(), found, strict=True)}
        places = np.frombuffer(offsets, kind)[array.offset : array.offset + len(array) + 1]
        yield Chunk(places, memoryview(b"" if content is None else content), nulls)
