"""Packed sets written here, byte by byte: tar shards and their index."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from pathlib import Path

import numpy as np
from color_folders import CLASSES
from PIL import Image
from shard_writers import write_tar

from fastaug.data.readers.packed_index import ROW, PackedIndex, PackedShard, write_packed_index


def pack_folders(folders: Path, out: Path, per_shard: int = 7) -> Path:
    """The color folders as a packed set: out/train.index, out/train/00000.tar, ..."""
    for split in ("train", "val"):
        samples = [
            (file.read_bytes(), label)
            for label, name in enumerate(CLASSES)
            for file in sorted((folders / split / name).iterdir())
        ]
        shards, rows = [], []
        for number, start in enumerate(range(0, len(samples), per_shard)):
            part = samples[start : start + per_shard]
            name = f"{split}/{number:05}.tar"
            content = write_tar(out / name, part).read_bytes()
            sha256 = hashlib.sha256(content).hexdigest()
            shards.append(PackedShard(name, len(content), len(part), sha256))
            with tarfile.open(out / name) as archive:
                members = [m for m in archive.getmembers() if m.name.endswith(".jpg")]
            for member, (image, label) in zip(members, part, strict=True):
                with Image.open((folders / split / CLASSES[label]).iterdir().__next__()) as one:
                    width, height = one.size
                place = member.offset_data, member.size, zlib.crc32(image)
                rows.append((*place, label, height, width, 1))
        index = PackedIndex(CLASSES, tuple(shards), np.array(rows, ROW))
        write_packed_index(out / f"{split}.index", index)
    (out / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return out
