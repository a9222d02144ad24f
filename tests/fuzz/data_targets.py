"""Targets that read data sets and images."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest import mock

import hostile_files
import hugging_face_sets as hub
import imagenet_sets
import numpy as np
from checksums import sign_png, sign_tar, sign_tfrecord, sign_zip
from color_folders import write_folder
from image_sets import open_data
from mutants import whole_images
from packed_sets import pack_folders
from shard_writers import WRITERS, small_samples, tar
from target import Target, join, scratch_folder, split, write

from fastaug.data import image_set, scan_image
from fastaug.data.array_cache import load_arrays
from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.readers import cifar, packed
from fastaug.data.readers.imagenet_labels import read_class_names, read_labels

MAX_IMAGES = 8
"""Images of a set that are read: all are read in the same way."""
MAX_PIXELS = 2**20
"""Limit for an image. The real bound would take a second and gigabytes for each input."""


def read_all(path: Path) -> None:
    """Open a set, check what a training relies on, and read some of its images."""
    read_images(open_data(path, "train"))


def read_images(images: ImageSet) -> None:
    assert len(images) == len(images.labels)
    assert not len(images) or 0 <= images.labels.min() <= images.labels.max() < len(images.classes)
    for index in range(min(len(images), MAX_IMAGES)):
        if images.storage is None:
            assert images.image(index).dtype == np.uint8
        else:
            images.encoded(index)
    assert images.fingerprint


# --- shards ---


def shard_target(suffix: str, sign: Callable[[bytes], bytes], max_len: int) -> Target:
    def read(content: bytes, folder: Path) -> None:
        write(folder / f"train{suffix}", sign(content))
        read_all(folder)

    def seeds(folder: Path) -> list[bytes]:
        return [WRITERS[suffix](folder / f"x{suffix}", small_samples()).read_bytes()]

    return Target(read, seeds, max_len)


def short_tar(folder: Path, *members: tuple[str, bytes]) -> bytes:
    """A tar that is not filled up to 10 KB; two blocks of zeros are its end mark."""
    path = tar(folder / "x.tar", list(members), tarfile.GNU_FORMAT)
    with tarfile.open(path) as archive:
        last = archive.getmembers()[-1]
    end = last.offset_data + last.size
    return path.read_bytes()[: end + -end % 512 + 1024]


def tar_seeds(folder: Path) -> list[bytes]:
    first, long_name = [("a.jpg", b"im"), ("a.cls", b"0")], "d/" * 60 + "b"
    return [
        short_tar(folder, *first, ("b.png", b"im"), ("b.cls", b"1")),
        short_tar(folder, *first, ("b.jpg", b"im"), ("b.json", b'{"label": 1}')),
        short_tar(folder, *first, (f"{long_name}.jpg", b"im"), (f"{long_name}.cls", b"3")),
        tar(folder / "pax.tar", [*first, ("é.jpg", b"im"), ("é.cls", b"3")]).read_bytes(),
    ]


# --- packed sets ---


@cache
def packed_files() -> dict[str, bytes]:
    with scratch_folder() as folder:
        made = pack_folders(write_folder(folder / "in", {"train": 2, "val": 1}), folder / "out", 4)
        files = {str(f.relative_to(made)): f for f in made.rglob("*") if f.is_file()}
        return {name: file.read_bytes() for name, file in files.items()}


def read_packed(content: bytes, folder: Path) -> None:
    """An index without its checksum, beside sound shards."""
    for name, own in packed_files().items():
        write(folder / name, own)
    write(folder / "train.index", content + hashlib.sha256(content).digest())
    read_images(packed.open_split(folder, "train", DataConfig()))


# --- tables, Hugging Face ---


def read_csv(content: bytes, folder: Path) -> None:
    for name in ("a.jpg", "b.png", "images/c.jpg"):
        write(folder / name, b"im")
    file = write(folder / "labels.csv", content)
    for path in (file, folder):
        images = open_data(path, "train")
        assert 0 <= images.labels.min() <= images.labels.max() < len(images.classes)
        assert images.fingerprint
        open_data(path, "test")


CSV = (
    b"path,label,split\na.jpg,x,train\nb.png,y,train\nimages/c.jpg,x,val\n",
    b"a.jpg;0\nb.png;1\na.jpg;0\nb.png;1\n",
    b'"a.jpg"\tcat\n"b.png"\t"dog ""x"""\na.jpg\tcat\n',
    "\ufeffimage_id,Breed\na,é\na,é\na,x\n".encode(),
)


def read_parquet(content: bytes, folder: Path) -> None:
    read_all(write(folder / "train.parquet", content))


def parquet_seeds(folder: Path) -> list[bytes]:
    samples = small_samples()[:3]
    plain = hub.write_parquet(folder / "a.parquet", hub.table(samples))
    bare = hub.write_parquet(folder / "b.parquet", hub.table(samples, None), rows=2)
    return [plain.read_bytes(), bare.read_bytes()]


@cache
def saved_set() -> dict[str, bytes]:
    with scratch_folder() as folder:
        made = hub.save_to_disk(folder / "set", hub.table(small_samples()[:3]))
        return {file.name: file.read_bytes() for file in made.iterdir()}


def read_saved(content: bytes, folder: Path, names: tuple[str, ...]) -> None:
    """A data set of save_to_disk with other contents for some of its files."""
    changed = dict(zip(names, split(content, len(names)), strict=True))
    for name, own in (saved_set() | changed).items():
        write(folder / name, own)
    read_all(folder)


def saved_target(*names: str) -> Target:
    return Target(
        lambda content, folder: read_saved(content, folder, names),
        lambda _: [join(*(saved_set()[name] for name in names))],
    )


ARROW, STATE, INFO = "data-00000-of-00001.arrow", "state.json", "dataset_info.json"


# --- npz ---


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


ARRAYS = ("images", "labels", "classes")


def zipped(arrays: list[bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in zip(ARRAYS, arrays, strict=False):
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content)
    return out.getvalue()


def npz_parts() -> list[list[bytes]]:
    images, labels = np.zeros((2, 4, 4, 3), np.uint8), np.arange(2)
    return [
        [npy(images), npy(labels), npy(np.array(["a", "b"]))],
        [npy(images[..., 0]), npy(labels[:, None].astype(np.uint8)), npy(np.arange(3))],
    ]


def read_npz_arrays(content: bytes, folder: Path) -> None:
    """Arrays with right checksums; an empty one is left out."""
    read_all(write(folder / "set.npz", zipped([part for part in split(content, 3) if part])))


def read_npz(content: bytes, folder: Path) -> None:
    read_all(write(folder / "set.npz", sign_zip(content)))


# --- CIFAR, ImageNet ---

CIFAR = "cifar-10-batches-py"


def read_cifar(content: bytes, folder: Path) -> None:
    meta, batch = split(content, 2)
    write(folder / CIFAR / "batches.meta", meta)
    write(folder / CIFAR / "test_batch", batch)
    read_images(cifar.open_split(folder, "test", DataConfig()))


def cifar_seeds(_: Path) -> list[bytes]:
    one = {b"data": np.zeros((1, 3072), np.uint8), b"labels": [1]}
    none = {"data": np.zeros((0, 3072), np.uint8), "labels": [], "filenames": ["a.png"]}
    batches = [pickle.dumps(one, 2), pickle.dumps(one, 4), pickle.dumps(none, 4)]
    return [join(hostile_files.META, batch) for batch in batches]


def read_cifar_archive(content: bytes, folder: Path) -> None:
    file = write(folder / "cifar-10-python.tar", sign_tar(content))
    read_images(cifar.open_split(file, "test", DataConfig()))


def cifar_archive_seeds(folder: Path) -> list[bytes]:
    batch = split(cifar_seeds(folder)[-1], 2)[1]
    meta = (f"{CIFAR}/batches.meta", hostile_files.META)
    return [short_tar(folder, meta, (f"{CIFAR}/test_batch", batch))]


def read_devkit(content: bytes, folder: Path) -> None:
    meta, truth = split(content, 2)
    data = folder / imagenet_sets.DEVKIT / "data"
    write(data / "meta.mat", meta)
    write(data / "ILSVRC2012_validation_ground_truth.txt", truth)
    read_class_names([folder])
    read_labels([folder], folder)


def devkit_seeds(folder: Path) -> list[bytes]:
    inputs = []
    for compress in (False, True):
        data = imagenet_sets.write_devkit(folder / str(compress), compress=compress) / "data"
        names = ("meta.mat", "ILSVRC2012_validation_ground_truth.txt")
        inputs.append(join(*((data / name).read_bytes() for name in names)))
    return inputs


def read_kaggle(content: bytes, folder: Path) -> None:
    solution, mapping = split(content, 2)
    write(folder / "LOC_val_solution.csv", solution)
    write(folder / "LOC_synset_mapping.txt", mapping)
    read_class_names([folder])
    read_labels([folder], folder)


KAGGLE = join(
    b"ImageId,PredictionString\nILSVRC2012_val_00000001,n01440764 1 2 3 4 \n",
    b"n01440764 tench, Tinca tinca\nn02012849 crane\n",
)


@cache
def imagenet_tars() -> dict[str, bytes]:
    with scratch_folder() as folder:
        made = imagenet_sets.write_tars(folder / "tars")
        return {file.name: file.read_bytes() for file in made.iterdir()}


TRAINING_TAR = "ILSVRC2012_img_train.tar"


def read_imagenet(content: bytes, folder: Path) -> None:
    for name, own in (imagenet_tars() | {TRAINING_TAR: sign_tar(content)}).items():
        write(folder / name, own)
    read_all(folder)


def imagenet_seeds(folder: Path) -> list[bytes]:
    inner = [
        (f"{wnid}.tar", short_tar(folder, (f"{wnid}_1.JPEG", b"im")))
        for wnid in imagenet_sets.WORDS
    ]
    return [short_tar(folder, *inner)]


# --- images, cached arrays ---


def read_image(content: bytes, folder: Path) -> None:
    """Both scans, and pixels of what the full scan lets through."""
    content = sign_png(content)
    with mock.patch.object(image_set, "MAX_PIXELS", MAX_PIXELS):
        scan(content, folder)


def scan(content: bytes, folder: Path) -> None:
    quick = scan_image.scan_content(content, full=False)
    full = scan_image.scan_content(content, full=True)
    assert not quick.reason or full.reason, "the full scan accepts what the quick one refuses"
    if not full.reason:
        assert image_set.decode(content, "").shape == (full.height, full.width, 3)
    file = write(folder / "a.jpg", content)
    images = ImageSet.from_files([file], ["a"])
    budget = scan_image.MemoryBudget(2**30)
    # Of a file, only the ends are read: it may be less than the scan of the whole content.
    found = scan_image.scan_image(images, 0, full=False, budget=budget)
    assert not found.reason or quick.reason, "the scan of a file refuses a sound image"


def image_seeds(_: Path) -> list[bytes]:
    return list(whole_images(np.random.default_rng(0), 24, 17).values())


def read_cached(content: bytes, folder: Path) -> None:
    load_arrays(write(folder / "x.npz", sign_zip(content)))


DATA_TARGETS = {
    "tar": Target(shard_target(".tar", sign_tar, 0).read, tar_seeds, 10240),
    "tfrecord": shard_target(".tfrecord", sign_tfrecord, 2048),
    "recordio": shard_target(".rec", lambda content: content, 2048),
    "packed-index": Target(
        read_packed, lambda _: [packed_files()["train.index"][: -hashlib.sha256().digest_size]]
    ),
    "csv": Target(read_csv, lambda _: CSV, 1024),
    "parquet": Target(read_parquet, parquet_seeds),
    "arrow": saved_target(ARROW),
    "saved-json": saved_target(STATE, INFO),
    "npz-arrays": Target(read_npz_arrays, lambda _: [join(*parts) for parts in npz_parts()], 2048),
    "npz": Target(read_npz, lambda _: [zipped(parts) for parts in npz_parts()], 2048),
    "cifar": Target(read_cifar, cifar_seeds),
    "cifar-archive": Target(read_cifar_archive, cifar_archive_seeds, 8192),
    "imagenet-devkit": Target(read_devkit, devkit_seeds, 8192),
    "imagenet-lists": Target(read_kaggle, lambda _: [KAGGLE], 1024),
    "imagenet-tar": Target(read_imagenet, imagenet_seeds, 10240),
    "image": Target(read_image, image_seeds, 8192),
    "cached-arrays": Target(read_cached, lambda _: [zipped(parts) for parts in npz_parts()], 2048),
}
