"""Fingerprints of the content of an image set, to compare it with the set of another machine.

`ImageSet.fingerprint` is made from names and labels only, and is part of a checkpoint. These are
not stored anywhere.
"""

from __future__ import annotations

import hashlib

import numpy as np

from fastaug.data.image_set import ImageSet
from fastaug.data.progress import thread_pool
from fastaug.data.remote.spans import is_remote
from fastaug.errors import DataError

_SAMPLE, _REMOTE_SAMPLE = 2048, 32
"""Images whose content is compared: 2,048 files take 0.1 s on a local disk. A remote image takes a
request, and its checksum is compared with the index whenever it is read."""
_ENDS = 4096
"""Bytes at the start and at the end of an image that are compared, besides its size in bytes."""


def sizes_fingerprint(images: ImageSet) -> str:
    """Digest of height and width of all good images."""
    assert images.manifest is not None
    sizes = images.manifest.sizes.copy()
    sizes[list(images.bad)] = 0
    return hashlib.blake2b(sizes.tobytes(), digest_size=8).hexdigest()


def sample_indices(images: ImageSet) -> np.ndarray:
    """[n] int64: good images at equal distances; all of them in a small set."""
    most = _REMOTE_SAMPLE if is_remote(images.storage) else _SAMPLE
    chosen = np.linspace(0, len(images) - 1, min(most, len(images))).astype(np.int64)
    return chosen[~np.isin(chosen, list(images.bad))]


def content_fingerprints(images: ImageSet, indices: np.ndarray, *, workers: int) -> list[str]:
    """Digest of the content of each of these images; "" for one that cannot be read now."""

    def fingerprint(index: int) -> str:
        if images.array is not None:
            return _digest(images.array[index].tobytes())
        assert images.storage is not None
        try:
            head, tail, size = images.storage.ends(index, _ENDS)
        except (OSError, DataError):
            return ""
        return _digest(head, tail, str(size).encode())

    with thread_pool(workers) as pool:
        return list(pool.map(fingerprint, indices.tolist()))


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()
