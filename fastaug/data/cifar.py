"""CIFAR-10 and CIFAR-100 in their python format, read without executing what a pickle asks for."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fastaug.data.images import ImageSet
from fastaug.errors import DataError

ARCHIVES = ("cifar-10-python.tar.gz", "cifar-100-python.tar.gz")
# folder -> files of each split, label key, file and key of the class names
_LAYOUTS = {
    "cifar-10-batches-py": (
        {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]},
        "labels",
        ("batches.meta", "label_names"),
    ),
    "cifar-100-python": (
        {"train": ["train"], "test": ["test"]},
        "fine_labels",
        ("meta", "fine_label_names"),
    ),
}
_FILE_LIMIT = 400 * 2**20  # CIFAR-100's train file has 155 MB


def cifar_folder(path: Path) -> Path | None:
    """The folder of CIFAR's files, if path is it or holds it."""
    for name, (_, _, (meta, _)) in _LAYOUTS.items():
        for folder in (path / name, path):
            if (folder / meta).is_file():
                return folder
    return None


def read_cifar(folder: Path, split: str) -> ImageSet:
    def read(name: str) -> bytes:
        file = folder / name
        if not file.is_file():
            raise DataError(f"{folder}: CIFAR's file {name} is missing")
        return file.read_bytes()

    layout = next(name for name, (_, _, (meta, _)) in _LAYOUTS.items() if (folder / meta).is_file())
    return _assemble(f"{folder} ({split})", layout, split, read)


def read_cifar_tar(path: Path, split: str) -> ImageSet:
    """From the archive, without unpacking it to disk."""
    with tarfile.open(path) as archive:
        members = {member.name.lstrip("./"): member for member in archive if member.isfile()}
        layout = next((name for name in _LAYOUTS if any(m.startswith(name) for m in members)), None)
        if layout is None:
            raise DataError(
                f"{path}: not CIFAR's layout; expected {' or '.join(_LAYOUTS)} inside, "
                f"found {', '.join(sorted(members)[:3]) or 'nothing'}"
            )

        def read(name: str) -> bytes:
            member = members.get(f"{layout}/{name}")
            if member is None:
                raise DataError(f"{path}: {layout}/{name} is missing from the archive")
            if member.size > _FILE_LIMIT:
                raise DataError(f"{path}: {member.name} is too large ({member.size} bytes)")
            file = archive.extractfile(member)
            assert file is not None
            return file.read()

        return _assemble(f"{path} ({split})", layout, split, read)


def _assemble(name: str, layout: str, split: str, read: Callable[[str], bytes]) -> ImageSet:
    splits, label_key, (meta, names_key) = _LAYOUTS[layout]
    classes = tuple(_text(c) for c in _field(name, _unpickle(name, read(meta)), names_key))
    images, labels = [], []
    for file in splits[split]:
        content = _unpickle(f"{name}: {file}", read(file))
        pixels = np.asarray(_field(name, content, "data"))
        if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072:
            raise DataError(
                f"{name}: {file} must hold uint8 [N, 3072], got {pixels.dtype} {list(pixels.shape)}"
            )
        images.append(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels.append(np.asarray(_field(name, content, label_key), np.int64))
    array, label_array = np.ascontiguousarray(np.concatenate(images)), np.concatenate(labels)
    in_range = (label_array >= 0) & (label_array < len(classes))
    if len(array) != len(label_array) or not in_range.all():
        raise DataError(f"{name}: {len(array)} images and {len(label_array)} labels do not fit")
    return ImageSet(name, classes, label_array, array=array)


def _field(name: str, content: Any, key: str) -> Any:
    """A value of a pickled dict, whose keys are bytes as Python 2 wrote them."""
    values = {_text(k): v for k, v in content.items()} if isinstance(content, dict) else {}
    if key not in values:
        raise DataError(f"{name}: no {key!r} in the pickle; is this CIFAR's python format?")
    return values[key]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class _ArraysOnly(pickle.Unpickler):
    """Admits what a numpy array of plain numbers needs, and nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how protocol 2 of Python 3 stores bytes
            return _latin1_bytes
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which CIFAR does not need")


def _latin1_bytes(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding}")
    return text.encode("latin1")


def _unpickle(name: str, content: bytes) -> Any:
    try:
        return _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a hostile or torn pickle can raise anything
        raise DataError(f"{name}: not CIFAR's pickle ({error})") from error
