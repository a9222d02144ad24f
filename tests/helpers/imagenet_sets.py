"""Small sets in the layouts of ImageNet: Kaggle's download, the original tars and the devkit."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from color_folders import color_image
from PIL import Image
from scipy.io import savemat
from shard_writers import tar

WORDS = {
    "n01440764": "tench, Tinca tinca",
    "n02012849": "crane",
    "n03126707": "crane",
}
"""As in ImageNet, two classes have the same name."""
NAMES = ("n01440764 tench", "n02012849 crane", "n03126707 crane")
NUMBERS = {"n01440764": 2, "n02012849": 1, "n03126707": 1000}
"""The devkit's numbers follow neither the ids nor the names."""
DEVKIT = "ILSVRC2012_devkit_t12"


class Sample(NamedTuple):
    name: str
    wnid: str
    content: bytes


def jpeg(color: int, number: int) -> bytes:
    file = io.BytesIO()
    pixels = color_image(color, np.random.default_rng(number), 20 + number % 3)
    Image.fromarray(pixels).save(file, "jpeg")
    return file.getvalue()


def training(per_class: int = 6) -> list[Sample]:
    return [
        Sample(f"{wnid}_{100 * i}.JPEG", wnid, jpeg(color, 10 * color + i))
        for color, wnid in enumerate(WORDS)
        for i in range(per_class)
    ]


def validation(count: int = 6) -> list[Sample]:
    """Images of all classes in turn, beginning with the last."""
    wnids = list(WORDS)
    return [
        Sample(f"ILSVRC2012_val_{i:08}.JPEG", wnids[-i % 3], jpeg(-i % 3, 100 + i))
        for i in range(1, count + 1)
    ]


def write_folders(folder: Path) -> Path:
    """train/WNID/*.JPEG and flat val/*.JPEG."""
    for sample in training():
        (folder / "train" / sample.wnid).mkdir(parents=True, exist_ok=True)
        (folder / "train" / sample.wnid / sample.name).write_bytes(sample.content)
    (folder / "val").mkdir()
    for sample in validation():
        (folder / "val" / sample.name).write_bytes(sample.content)
    return folder


def write_kaggle(root: Path) -> Path:
    """What unzip makes of Kaggle's download; test/ has no labels."""
    data = write_folders(root / "ILSVRC/Data/CLS-LOC")
    (data / "test").mkdir()
    (data / "test/ILSVRC2012_test_00000001.JPEG").write_bytes(jpeg(0, 0))
    (root / "ILSVRC/Annotations").mkdir()
    rows = [f"{s.name.removesuffix('.JPEG')},{s.wnid} 1 2 18 19 " for s in validation()]
    rows[0] += f"{validation()[0].wnid} 3 4 7 8 "  # several boxes
    lines = ["ImageId,PredictionString", *reversed(rows)]
    (root / "LOC_val_solution.csv").write_text("\n".join(lines) + "\n")
    mapping = "".join(f"{wnid} {words}\n" for wnid, words in WORDS.items())
    (root / "LOC_synset_mapping.txt").write_text(mapping)
    return root


def synsets() -> np.ndarray:
    """The devkit's struct array: fields as in the original, a group of classes at the end."""
    fields = ["ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children"]
    fields += ["wordnet_height", "num_train_images"]
    rows: list[tuple] = [
        (float(NUMBERS[wnid]), wnid, words, "a gloss", 0.0, np.zeros((1, 0)), 0.0, 1300.0)
        for wnid, words in WORDS.items()
    ]
    children = np.array([[1.0, 2.0, 1000.0]])
    rows.append((1001.0, "n00001740", "entity", "all of it", 3.0, children, 19.0, 0.0))
    return np.array(rows, [(name, object) for name in fields])[:, None]


def write_devkit(folder: Path, *, compress: bool = True) -> Path:
    """The devkit, unpacked."""
    data = folder / DEVKIT / "data"
    data.mkdir(parents=True)
    savemat(data / "meta.mat", {"synsets": synsets()}, do_compression=compress)
    numbers = [f"{NUMBERS[sample.wnid]}\n" for sample in validation()]
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(numbers))
    (folder / DEVKIT / "readme.txt").write_text("ILSVRC 2012")
    return folder / DEVKIT


def write_packed_devkit(folder: Path) -> Path:
    """The devkit as it is downloaded."""
    unpacked = write_devkit(folder / "unpacked")
    with tarfile.open(folder / f"{DEVKIT}.tar.gz", "w:gz") as archive:
        archive.add(unpacked, DEVKIT)
    shutil.rmtree(folder / "unpacked")
    return folder / f"{DEVKIT}.tar.gz"


def write_flat(folder: Path) -> Path:
    """Class folders, flat val/ and the devkit."""
    write_folders(folder)
    write_devkit(folder)
    return folder


def write_training_tar(folder: Path, samples: list[Sample]) -> Path:
    """A tar of one tar for each class, in GNU tar's format."""
    members = []
    for wnid in WORDS:
        inner = tar(
            folder / f"{wnid}.tar",
            [(s.name, s.content) for s in samples if s.wnid == wnid],
            tarfile.GNU_FORMAT,
        )
        members.append((inner.name, inner.read_bytes()))
        inner.unlink()
    return tar(folder / "ILSVRC2012_img_train.tar", members, tarfile.GNU_FORMAT)


def write_tars(folder: Path) -> Path:
    """The three files of the original distribution."""
    folder.mkdir(parents=True, exist_ok=True)
    write_training_tar(folder, training())
    members = [(sample.name, sample.content) for sample in validation()]
    tar(folder / "ILSVRC2012_img_val.tar", members, tarfile.GNU_FORMAT)
    write_packed_devkit(folder)
    return folder


LAYOUTS = {"kaggle": write_kaggle, "flat": write_flat, "tars": write_tars}
