"""The images of a torch Dataset as a storage.

Items are (image, label). Encoded images are passed to the decoder as they are, pixels as PPM, which
costs a copy and loses nothing.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Subset as DatasetSubset

from fastaug.data.pixels import rgb_pixels, to_ppm
from fastaug.data.storage import Digest
from fastaug.errors import DataError, DecodeError, describe_error

log = logging.getLogger("fastaug")

ALLOWED = (
    "an image must be bytes (an encoded file), a PIL image, or uint8 pixels [3, H, W] or [H, W, 3] "
    "(tensor or array)"
)
_REPORT_EVERY = 10.0
"""Seconds between lines of progress."""


class MapDataset(Protocol):
    """A torch map-style Dataset; also a list of (image, label)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class DatasetImages:
    """The images of a Dataset. An exception of its __getitem__ makes the image a bad one."""

    def __init__(self, dataset: MapDataset, *, thread_safe: bool = False) -> None:
        """thread_safe: whether several threads may read it at once; if not, they take turns."""
        self._dataset, self._thread_safe = dataset, thread_safe
        self._lock, self._process = threading.Lock(), os.getpid()
        self.unlabeled: dict[int, str] = {}
        """Images whose label could not be read. They stay bad, even if a later read succeeds."""
        # Nothing tells when an image has changed, so a scan is not remembered after the process.
        self._stamp = secrets.randbits(63)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None, "_process": 0}  # another process makes its own lock

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def name(self) -> str:
        return f"{type(self._dataset).__name__} of {len(self):,} images"

    def item(self, index: int) -> tuple[Any, Any]:
        """Image and label, as the Dataset returns them."""
        try:
            with self._turn():
                item = self._dataset[index]
        except OSError as error:
            if error.errno is not None:  # of the storage: it may work the next time
                raise
            raise self._failed(index, error) from error
        except Exception as error:  # code of the user, which raises anything
            raise self._failed(index, error) from error
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise self._wrong(index, f"an item must be (image, label), got {_kind(item)}")
        return item[0], item[1]

    def read(self, index: int) -> bytes:
        if index in self.unlabeled:
            raise DataError(self.unlabeled[index])
        image, _ = self.item(index)
        if isinstance(image, (bytes, bytearray, memoryview)):
            return bytes(image)
        if isinstance(image, Image.Image):
            try:
                return to_ppm(rgb_pixels(image))
            except Exception as error:  # Pillow may decode only now
                raise self._failed(index, error) from error
        if isinstance(image, (torch.Tensor, np.ndarray)):
            pixels = _channels_last(image)
            if pixels is not None:
                return to_ppm(pixels)
        raise self._wrong(index, f"{ALLOWED}, got {_kind(image)}")

    def ends(self, index: int, count: int) -> tuple[bytes, bytes, int]:
        content = self.read(index)
        return content[:count], content[-count:], len(content)

    def where(self, index: int) -> str:
        return f"{type(self._dataset).__name__}[{index}]"

    def stamps(self, indices: np.ndarray) -> np.ndarray:
        return indices.astype(np.uint64) + np.uint64(self._stamp)

    def update_fingerprint(self, digest: Digest) -> None:
        """Only kind and number: the images have no names, and reading all takes too long."""
        digest.update(self.name.encode())

    def for_random_access(self) -> DatasetImages:
        return self

    def _turn(self) -> AbstractContextManager[Any]:
        if self._thread_safe:
            return nullcontext()
        if self._process != os.getpid():  # a fork: a thread that is not here may hold the lock
            self._lock, self._process = threading.Lock(), os.getpid()
        return self._lock

    def _failed(self, index: int, error: Exception) -> DataError:
        message = f"{self.where(index)}: its __getitem__ failed ({describe_error(error)})"
        # Pillow's errors, which have no errno: there is no need to try again.
        if type(error) in (OSError, Image.UnidentifiedImageError):
            return DecodeError(message, str(error).encode())
        return DataError(message)

    def _wrong(self, index: int, what: str) -> DataError:
        return DataError(f"{self.where(index)}: {what}")


def dataset_labels(images: DatasetImages, dataset: MapDataset) -> Sequence[Any]:
    """The label of each item: the Dataset's own list, or by reading every item."""
    listed = _listed_labels(dataset)
    if listed is not None and len(listed) != len(images):
        listed = None
    try:
        _, label = images.item(0)
        images.read(0)  # wrong kinds of items are found now, not after a long scan
        if listed is not None and _plain(listed[0]) != _plain(label):
            listed = None  # the Dataset has other labels than its list
    except OSError:
        pass
    except DataError as error:
        if error.__cause__ is None:  # a wrong kind of item, not one bad image
            raise
    if listed is not None:
        return listed
    log.info(
        "%s: reads every item once for its label; with a list `targets` in the Dataset this is not "
        "necessary",
        images.name,
    )
    return _read_labels(images)


def dataset_classes(dataset: MapDataset) -> Sequence[str] | None:
    """The class names of a Dataset that has them, also of a part of it (random_split)."""
    if isinstance(dataset, DatasetSubset):
        return dataset_classes(dataset.dataset)  # type: ignore[arg-type]
    classes = getattr(dataset, "classes", None)
    is_list = isinstance(classes, (list, tuple)) and all(isinstance(c, str) for c in classes)
    return classes if is_list else None


def _listed_labels(dataset: MapDataset) -> Sequence[Any] | None:
    if isinstance(dataset, DatasetSubset):
        base = _listed_labels(dataset.dataset)  # type: ignore[arg-type]
        return None if base is None else [base[index] for index in dataset.indices]
    if getattr(dataset, "target_transform", None) is not None:
        return None
    for name in ("targets", "labels"):
        labels = getattr(dataset, name, None)
        if isinstance(labels, (torch.Tensor, np.ndarray)):
            labels = labels.tolist()
        if isinstance(labels, (list, tuple)) and labels:
            return labels
    return None


def _read_labels(images: DatasetImages) -> list[Any]:
    labels: list[Any] = []
    reported = time.monotonic()
    for index in range(len(images)):
        try:
            labels.append(_plain(images.item(index)[1]))
        except (OSError, DataError) as error:
            if isinstance(error, DataError) and error.__cause__ is None:
                raise
            images.unlabeled[index] = str(error)
            labels.append(None)
        if time.monotonic() - reported > _REPORT_EVERY:
            reported = time.monotonic()
            log.info("%s: read the labels of %s", images.name, f"{index + 1:,}")
    if len(images.unlabeled) == len(images):
        raise DataError(f"{images.name}: no item can be read: {images.unlabeled[0]}")
    some = next(label for i, label in enumerate(labels) if i not in images.unlabeled)
    return [some if i in images.unlabeled else label for i, label in enumerate(labels)]


def _plain(label: Any) -> Any:
    """A label as Python's own number, if it is one of torch or numpy."""
    is_number = isinstance(label, (torch.Tensor, np.ndarray, np.generic)) and label.ndim == 0
    return label.item() if is_number else label


def _channels_last(image: torch.Tensor | np.ndarray) -> np.ndarray | None:
    """[H, W, 3]; None if these are not uint8 pixels of three channels. A tensor [3, W, 3] has its
    channels first, as in torch, an array has them last."""
    is_tensor = isinstance(image, torch.Tensor)
    pixels = image.detach().cpu().numpy() if isinstance(image, torch.Tensor) else image
    if pixels.dtype != np.uint8 or pixels.ndim != 3:
        return None
    first, last = pixels.shape[0] == 3, pixels.shape[2] == 3
    if first and (is_tensor or not last):
        return pixels.transpose(1, 2, 0)
    return pixels if last else None


def _kind(value: Any) -> str:
    """Type of a value, with dtype and shape of pixels."""
    kind = type(value).__name__
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{kind} of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"{kind} of {len(value)}" if isinstance(value, (tuple, list)) else kind
