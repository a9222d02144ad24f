"""Files of a few KB that claim gigabytes, for test_security.py: made here, opened in a child."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from mutants import png
from shard_writers import (
    example,
    field,
    header,
    int64_feature,
    masked,
    photos,
    varint,
    write_tar,
)

META = pickle.dumps({b"label_names": [b"a", b"b"]}, 2)
PIXELS = {b"data": np.zeros((4, 3072), np.uint8)}
BATCH = pickle.dumps(PIXELS | {b"labels": [0, 1, 0, 1]}, 2)

Maker = Callable[[Path], Path]


def cifar(folder: Path, **files: bytes) -> Path:
    """CIFAR-10's folder, with other contents for some files."""
    root = folder / "cifar-10-batches-py"
    root.mkdir()
    for name in ("batches_meta", *(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        content = files.get(name, META if name == "batches_meta" else BATCH)
        (root / name.replace("s_m", "s.m")).write_bytes(content)
    return folder


def calling(module: str, name: str, *args: bytes) -> bytes:
    """Instructions of a pickle that call something."""
    packed = b"(" + b"".join(args) + b"t"
    return b"c" + f"{module}\n{name}\n".encode() + packed + b"R"


def forged_dtype(folder: Path) -> Path:
    """Numpy's own classes alone: a type that hides that its bytes are pointers, then a write."""
    kind = b"X\x02\0\0\0%s\x89\x88"
    pointer = calling("numpy", "dtype", kind % b"O8")
    fields = b"X\x01\0\0\0a\x85}X\x01\0\0\0a" + pointer + b"K\0\x86s"
    state = b"(K\x03X\x01\0\0\0|N" + fields + b"K\x08K\x01K\0t"
    forged = calling("numpy", "dtype", kind % b"V8") + state + b"b"
    empty = b"cnumpy\nndarray\nK\0\x85C\x01b"
    array = calling("numpy.core.multiarray", "_reconstruct", empty)
    array += b"(K\x01K\x01\x85" + forged + b"\x89C\x08AAAAAAAAtb"
    return cifar(folder, data_batch_1=b"\x80\x03" + array + b"K\0N\x85s.")


def nested(leaf: object, depth: int = 9) -> list:
    """10 ** depth leaves in a few hundred bytes of a pickle."""
    value = [leaf]
    for _ in range(depth):
        value = [value] * 10
    return value


def endless_hash(folder: Path) -> Path:
    pairs = b"".join(b"0h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60))
    return cifar(folder, data_batch_1=b"\x80\x02}K\x01\x85q\0" + pairs + b"0h\x3cK\x01s.")


def packed_tar(folder: Path, start: bytes, zeros: int) -> Path:
    """A .tar.gz of a beginning and MiB of zeros. Gzips may be joined, so one packs all zeros."""
    block = gzip.compress(bytes(2**24), 9)
    path = folder / "cifar-10-python.tar.gz"
    path.write_bytes(gzip.compress(start) + block * (zeros >> 4))
    assert path.stat().st_size < 2**20
    return path


def octal(size: int) -> bytes:
    return b"%011o\0" % size


EIB8 = b"\x80" + (2**63 - 1).to_bytes(11, "big")


def npy(descr: str, shape: tuple[int, ...]) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return out.getvalue()


TWO = npy("<i8", (2,)) + struct.pack("<qq", 0, 1)


def zipped(folder: Path, claims: dict[str, int] | None = None, **arrays: bytes) -> Path:
    """An .npz whose directory claims other sizes for some members."""
    path = folder / "set.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in arrays.items():
            archive.writestr(f"{name}.npy", content)
        for name, size in (claims or {}).items():
            archive.getinfo(f"{name}.npy").file_size = size
    return path


def long_header(folder: Path) -> Path:
    path = folder / "set.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("images.npy", "w") as file:
            file.write(b"\x93NUMPY\2\0" + struct.pack("<I", 2**32 - 1))
            for _ in range(64):
                file.write(b" " * 2**20)
        archive.writestr("labels.npy", TWO)
    return path


def huge_labels(folder: Path) -> Path:
    labels = npy("<i8", (2,)) + struct.pack("<qq", 0, 2**62)
    return zipped(folder, images=npy("|u1", (2, 2, 2, 3)) + bytes(24), labels=labels)


def claimed(folder: Path, count: int) -> Path:
    """An array whose header and zip agree on a size, and whose bytes are not there."""
    head = npy("|u1", (count, 2**10, 2**10, 1))
    claims = {"images": len(head) + count * 2**20}
    return zipped(folder, claims, images=head, labels=npy("<i8", (count,)) + bytes(8 * count))


def shard(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder


def sparse_record(folder: Path) -> Path:
    """A terabyte of zeros that is not on the disk: 2 ** 39 fields of an Example."""
    size = 2**40
    length = struct.pack("<Q", size)
    with (folder / "train.tfrecord").open("wb") as file:
        file.write(length + masked(length))
        file.truncate(16 + size)
    return folder


def claiming_record(size: int) -> bytes:
    length = struct.pack("<Q", size)
    return length + masked(length) + example(("label", int64_feature(1)))


def common_headers(folder: Path) -> Path:
    """Values for all members, of which tarfile keeps a copy for each that follows."""
    blocks = []
    for number in range(40):
        words = b"".join(b"16 k%06d=vvvv\n" % (number * 8000 + i) for i in range(8000))
        blocks += [header("g", octal(len(words)), b"g"), words + bytes(-len(words) % 512)]
        blocks += [header("a.txt", octal(0))]
    return shard(folder, "train.tar", b"".join(blocks) + bytes(1024))


def class_names(folder: Path) -> Path:
    write_tar(folder / "train.tar", photos(3))
    with (folder / "classes.txt").open("wb") as file:
        file.truncate(2**40)
    return folder


def imagenet(folder: Path) -> Path:
    """ImageNet with one image in each split, without a list of classes."""
    for name in ("train/n01440764/n01440764_1.JPEG", "val/ILSVRC2012_val_00000001.JPEG"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(photos(1)[0][0])
    return folder


def imagenet_names(folder: Path) -> Path:
    with (imagenet(folder) / "LOC_synset_mapping.txt").open("wb") as file:
        file.truncate(2**40)
    return folder


def imagenet_devkit(folder: Path) -> Path:
    head = header("other", octal(2**33 - 1))
    packed_tar(imagenet(folder), head, 2**10).rename(folder / "ILSVRC2012_devkit_t12.tar.gz")
    return folder


def imagenet_meta(folder: Path) -> Path:
    """A matrix that inflates to a gigabyte."""
    deflate = zlib.compressobj()
    content = b"".join(deflate.compress(bytes(2**20)) for _ in range(2**10)) + deflate.flush()
    data = imagenet(folder) / "ILSVRC2012_devkit_t12/data"
    data.mkdir(parents=True)
    head = b"MATLAB 5.0".ljust(124) + b"\0\1IM" + struct.pack("<II", 15, len(content))
    (data / "meta.mat").write_bytes(head + content)
    return folder


def huge_table(folder: Path) -> Path:
    """A terabyte that is not on the disk, without a line break."""
    with open(folder / "labels.csv", "wb") as file:
        file.write(b"path,label\n")
        file.truncate(2**40)
    return folder / "labels.csv"


def parquet_rows(folder: Path) -> Path:
    """Millions of equal rows, which take a few KB in the file."""
    rows = pa.table({"image": pa.nulls(2**22, pa.binary()), "label": np.zeros(2**22, np.int64)})
    pq.write_table(rows, folder / "train.parquet")
    return folder / "train.parquet"


def bitmap() -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, 2**30, 2**30, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 154, 0, 0, 54) + info + bytes(100)


def tiff() -> bytes:
    tags = {256: 2**30, 257: 2**30, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 2**30, 279: 99}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4 + 99)


def webp() -> bytes:
    canvas = b"VP8X" + struct.pack("<II", 10, 0) + b"\xff\xff\0" * 2
    lossless = b"VP8L" + struct.pack("<IBI", 5, 0x2F, 2**28 - 1) + b"\0"
    return b"RIFF" + struct.pack("<I", 4 + len(canvas + lossless)) + b"WEBP" + canvas + lossless


BOMBS = {
    "png": png((2**30, 2**30), bytes(99)),
    "jpeg": b"\xff\xd8\xff\xc0\0\x11\x08\xff\xff\xff\xff\x03"
    + b"\x01\x22\0\x02\x11\x01\x03\x11\x01\xff\xda\0\x0c\x03\x01\0\x02\x11\x03\x11\0\x3f\0\xff\xd9",
    "bmp": bitmap(),
    "tiff": tiff(),
    "webp": webp(),
    "gif": b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x02\x02\x4c\x01\0;",
}


def images(folder: Path) -> Path:
    for name in ("train/a", "train/b"):
        (folder / name).mkdir(parents=True)
    for kind, content in BOMBS.items():
        assert len(content) < 400
        (folder / f"train/a/{kind}.jpg").write_bytes(content)
        (folder / f"train/b/{kind}.jpg").write_bytes(content)
    return folder


CASES: dict[str, tuple[Maker, str]] = {
    "memo": (lambda f: cifar(f, data_batch_1=b"\x80\x02}r\xff\xff\xff\x7f."), "no 'data'"),
    "dtype": (forged_dtype, "not CIFAR's pickle"),
    "hash": (endless_hash, "not CIFAR's pickle"),
    "names": (
        lambda f: cifar(f, batches_meta=pickle.dumps({b"label_names": [nested(b"x")]}, 2)),
        "class names must be a list of",
    ),
    "labels": (
        lambda f: cifar(f, data_batch_1=pickle.dumps(PIXELS | {b"labels": nested(1)}, 2)),
        "labels must be a list of whole numbers",
    ),
    "no pixels": (
        lambda f: cifar(f, data_batch_1=pickle.dumps({b"data": nested(1)}, 2)),
        r"must hold uint8 \[N, 3072\], got list",
    ),
    "values": (
        lambda f: cifar(f, data_batch_1=b"\x80\x02" + b"}" * 2**22 + b"."),
        "2,097,152 values",
    ),
    "array": (
        lambda f: cifar(f, data_batch_1=BATCH.replace(b"M\x00\x0c", b"J\0\0\0\x7f")),
        "not CIFAR's pickle",
    ),
    "tar 8 EiB": (
        lambda f: packed_tar(f, header("cifar-10-batches-py/batches.meta", EIB8), 0),
        r"batches\.meta is too large \(9223372036854775807 bytes\)",
    ),
    "tar 8 EiB aside": (
        lambda f: packed_tar(f, header("other", EIB8), 2**10),
        "more than 536,870,912 bytes unpacked",
    ),
    "tar torn claim": (
        lambda f: packed_tar(f, header("cifar-10-batches-py/batches.meta", octal(2**28)), 0),
        "not a readable tar archive",
    ),
    "tar aside": (
        lambda f: packed_tar(f, header("other", octal(2**33 - 1)), 2**10),
        "more than 536,870,912 bytes unpacked",
    ),
    "tar pax": (
        lambda f: packed_tar(f, header("x", octal(2**33 - 512), b"x"), 2**10),
        "headers of 85899",
    ),
    "tar long name": (
        lambda f: packed_tar(f, header("x", octal(2**33 - 512), b"L"), 2**10),
        "headers of 85899",
    ),
    "tar members": (
        lambda f: packed_tar(f, header("x", octal(0)) * 2000, 0),
        "more than 1000 members",
    ),
    "npz header": (
        lambda f: zipped(f, images=npy("|u1", (2**20, 2**12, 2**8, 3)), labels=TWO),
        "images claims 3298534883328 bytes",
    ),
    "npz directory": (lambda f: claimed(f, 2**20), "over a third of the memory"),
    "npz not there": (lambda f: claimed(f, 2**7), r"not a readable \.npz"),
    "npz long header": (long_header, "header of an array has 4294967295 characters"),
    "npz labels": (huge_labels, "4611686018427387905 classes.*1048576"),
    "shard 8 EiB": (
        lambda f: shard(f, "train.tar", header("a.jpg", EIB8) + bytes(1024)),
        "truncated",
    ),
    "shard common": (common_headers, "more than 1000 values for all members"),
    "tfrecord 2**63": (
        lambda f: shard(f, "train.tfrecord", claiming_record(2**63)),
        "9223372036854775812 bytes should follow",
    ),
    "tfrecord field": (
        lambda f: shard(
            f, "train.tfrecord", tfrecord_of(field(1, b"")[:1] + varint(2**63) + b"more")
        ),
        "a field is longer than its message",
    ),
    "tfrecord hole": (sparse_record, "a field has number 0"),
    "recordio": (
        lambda f: shard(f, "train.rec", struct.pack("<II", 0xCED7230A, 2**29 - 1)),
        "536870911 bytes should follow",
    ),
    "names of classes": (class_names, "1099511627776 bytes are too many"),
    "imagenet names": (imagenet_names, "1099511627776 bytes are too many"),
    "imagenet devkit": (imagenet_devkit, "more than 134,217,728 bytes unpacked"),
    "imagenet meta": (imagenet_meta, "more than 16777216 bytes"),
    "table": (huge_table, "1,099,511,627,776 bytes"),
    "parquet rows": (parquet_rows, "claims 4,194,304 images in"),
    "images": (images, "12 of 12 images are bad"),
}


def tfrecord_of(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + masked(length) + content + masked(content)
