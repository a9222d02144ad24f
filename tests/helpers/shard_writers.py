"""Shards written byte by byte, as the definitions of their formats have them."""

from __future__ import annotations

import io
import struct
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from color_folders import color_image
from image_sets import open_data
from PIL import Image

MAGIC = bytes.fromhex("0a23d7ce")
Sample = tuple[bytes, int]
Write = Callable[[Path, list[Sample]], Path]


def tar(path: Path, members: list[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_tar(path: Path, samples: list[Sample]) -> Path:
    members: list[tuple[str, bytes]] = []
    for i, (image, label) in enumerate(samples):
        members += [(f"{i:05}.jpg", image), (f"{i:05}.cls", b"%d" % label)]
    return tar(path, members)


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def bytes_feature(*values: bytes) -> bytes:
    return field(1, b"".join(field(1, value) for value in values))


def int64_feature(*values: int, packed: bool = True) -> bytes:
    numbers = [varint(value) for value in values]
    if packed:
        return field(3, field(1, b"".join(numbers)))
    return field(3, b"".join(b"\x08" + number for number in numbers))


def example(*features: tuple[str, bytes]) -> bytes:
    return field(1, b"".join(field(1, field(1, n.encode()) + field(2, f)) for n, f in features))


def _crc_of(byte: int) -> int:
    """Bit by bit, as the polynomial has it."""
    for _ in range(8):
        byte = byte >> 1 ^ 0x82F63B78 * (byte & 1)
    return byte


_CRCS = [_crc_of(byte) for byte in range(256)]


def crc32c(content: bytes) -> int:
    crc = 2**32 - 1
    for byte in content:
        crc = crc >> 8 ^ _CRCS[(crc ^ byte) & 255]
    return crc ^ 2**32 - 1


def masked(content: bytes) -> bytes:
    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17 & 2**32 - 1) + 0xA282EAD8) % 2**32)


def tfrecord(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + masked(length) + content + masked(content)


def write_tfrecord(path: Path, samples: list[Sample]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    examples = [
        example(
            ("image/filename", bytes_feature(b"n01440764_10026.JPEG")),
            ("image/encoded", bytes_feature(image)),
            ("image/object/bbox/xmin", field(2, field(1, struct.pack("<2f", 0.1, 0.2)))),
            ("image/class/label", int64_feature(label)),
        )
        for image, label in samples
    ]
    path.write_bytes(b"".join(map(tfrecord, examples)))
    return path


def recordio(content: bytes) -> bytes:
    """A record, broken at each magic number that lies at a multiple of 4."""
    parts, start = [], 0
    for i in range(0, len(content) - 3, 4):
        if content[i : i + 4] == MAGIC:
            parts.append(content[start:i])
            start = i + 4
    parts.append(content[start:])
    kinds = [0] if len(parts) == 1 else [1, *[2] * (len(parts) - 2), 3]
    return b"".join(
        MAGIC + struct.pack("<I", kind << 29 | len(part)) + part + bytes(-len(part) % 4)
        for kind, part in zip(kinds, parts, strict=True)
    )


def image_record(image: bytes, *labels: float, id: int = 0) -> bytes:
    if len(labels) == 1:
        return recordio(struct.pack("<IfQQ", 0, labels[0], id, 0) + image)
    several = struct.pack(f"<{len(labels)}f", *labels)
    return recordio(struct.pack("<IfQQ", len(labels), 0, id, 0) + several + image)


def write_recordio(path: Path, samples: list[Sample]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(image_record(*sample, id=i) for i, sample in enumerate(samples)))
    return path


WRITERS: dict[str, Write] = {
    ".tar": write_tar,
    ".tfrecord": write_tfrecord,
    ".rec": write_recordio,
}
every_format = pytest.mark.parametrize("suffix", WRITERS)


def photos(count: int, seed: int = 0, labels: tuple[int, ...] = (0, 1, 2)) -> list[Sample]:
    """JPEGs of several sizes."""
    rng, out = np.random.default_rng(seed), []
    for i in range(count):
        file = io.BytesIO()
        Image.fromarray(color_image(i % 3, rng, 16 + i)).save(file, "jpeg")
        out.append((file.getvalue(), labels[i % len(labels)]))
    return out


def read_back(root: Path, split: str = "train") -> list[Sample]:
    images = open_data(str(root), split)
    return [(images.encoded(i), int(images.classes[images.labels[i]])) for i in range(len(images))]


def header(name: str, size: bytes, kind: bytes = b"0") -> bytes:
    """A tar header with any size field, its check sum right."""
    block = bytearray(512)
    block[:100] = name.encode().ljust(100, b"\0")
    block[124:136] = size
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


HUGE, BACK = b"\x80" + (2**40).to_bytes(11, "big"), b"\xff" * 10 + b"\xfa\x00"  # 2**40, -1536


def small_samples() -> list[Sample]:
    """Small, so that damage hits what is not image; one holds the magic number."""
    return [(b"im" + bytes([i]), i % 3) for i in range(5)] + [(b"four" + MAGIC + b"more", 2)]


class small_memory:
    """Fails where more is allocated."""

    def __init__(self, limit: int = 8 * 2**20) -> None:
        self.limit = limit

    def __enter__(self) -> None:
        tracemalloc.start()

    def __exit__(self, *_: object) -> None:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < self.limit


BROKEN = [
    MAGIC,
    MAGIC * 3,
    MAGIC + b"tail",
    b"head" + MAGIC,
    b"head" + MAGIC + MAGIC + b"tai",
    b"not at a multiple of four" + MAGIC,
]
