"""Reading images during a run: retries, and quarantine of images that stay bad.

A file may be missing, truncated or changed for a moment (while it is rewritten), or permanently. A
read that is only slow does not count as failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from fastaug.data.image_set import ImageSet, Manifest, is_storage_error
from fastaug.data.scan import check_max_bad, forget, mark_bad, stamp_of
from fastaug.errors import DataError, DecodeError

log = logging.getLogger("fastaug")

RETRY_PAUSES = (0.1, 0.3, 1.0, 3.0)
"""Seconds to wait before each retry of a failed read, and of a decode if the image may have
changed."""
_OUTAGE = 4
"""If no image of a batch can be read, and the batch has at least this many, the storage failed."""

Read = TypeVar("Read")


class ReadFailure(NamedTuple):
    """A failed read. Not an exception, which would keep the local variables of its frames alive."""

    message: str
    permanent: bool
    """True: the stored image is bad, so the next run need not try it. False: the storage failed."""
    digest: bytes = b""
    """Hash of the bytes that cannot be decoded; empty if it failed for another reason."""


class BadImage(NamedTuple):
    """Why an image cannot be used."""

    reason: str
    permanent: bool
    stamp: int
    """Stamp of the file that was read: the file may be repaired before this is recorded."""


class BadImagesError(DataError):
    """Images of a batch cannot be read; the loader starts a new pass without them."""

    def __init__(self, bad: Mapping[int, BadImage], batch_size: int) -> None:
        super().__init__(f"{len(bad)} of {batch_size} images of a batch are bad")
        self.bad = bad
        self.batch_size = batch_size


class RetryError(DataError):
    """A worker or pipeline failed, though no image is bad; the loader starts a new pass."""

    def __init__(self, reason: str, *, max_retries: int) -> None:
        super().__init__(reason)
        self.max_retries = max_retries
        """How often in a row the same batch may be retried."""


class ChangedImageError(DataError):
    """An image is not the one that was scanned before the run."""


def try_read(read: Callable[[int], Read], index: int) -> Read | ReadFailure:
    """The result of read(index), or why it failed."""
    try:
        return read(index)
    except DataError as error:
        temporary = is_storage_error(error) or isinstance(error, ChangedImageError)
        digest = error.digest if isinstance(error, DecodeError) else b""
        return ReadFailure(str(error), not temporary, digest)


def read_with_retries(
    images: ImageSet,
    first: dict[int, Read | ReadFailure],
    read: Callable[[int], Read],
    warn: Callable[[str], object] = log.warning,
) -> dict[int, Read]:
    """Retry the failed reads among the first results of a batch; returns index -> result.

    All failed images are retried together, so a short outage costs the time of one image. An image
    that cannot be decoded and is still the one that was scanned is not retried.
    """
    found = {index: out for index, out in first.items() if not isinstance(out, ReadFailure)}
    failed = {index: out for index, out in first.items() if isinstance(out, ReadFailure)}
    retried = {i for i, failure in failed.items() if not _is_undecodable(images, i, failure, read)}
    for index in retried:
        warn(f"{failed[index].message}; retrying for {sum(RETRY_PAUSES):.2g} s")
    for pause in RETRY_PAUSES:
        if not retried:
            break
        time.sleep(pause)
        for index in list(retried):
            out = try_read(read, index)
            if isinstance(out, ReadFailure):
                failed[index] = out
                continue
            found[index] = out
            del failed[index]
            retried.remove(index)
            warn(f"{images.where(index)}: can be read again")
    if failed:
        bad = {index: _bad_image(images, index, failure) for index, failure in failed.items()}
        raise BadImagesError(bad, len(first))
    return found


def _is_undecodable(
    images: ImageSet, index: int, failure: ReadFailure, read: Callable[[int], object]
) -> bool:
    """Whether an image is unchanged since the scan, and a second read, which follows at once, has
    the same bytes: later reads will have them too."""
    manifest = images.manifest
    if not failure.digest or manifest is None:
        return False
    if manifest.stamps is not None and manifest.stamps[index] != stamp_of(images, index):
        return False
    again = try_read(read, index)
    return isinstance(again, ReadFailure) and again.digest == failure.digest


def check_size(images: ImageSet, index: int, size: tuple[int, ...]) -> None:
    """Raise unless a decoded image has the height and width of its manifest, for which the view
    plans are made."""
    if images.manifest is not None and tuple(images.manifest.sizes[index]) != size:
        raise ChangedImageError(
            f"{images.where(index)}: the file has changed, its size differs from the scan's"
        )


def _bad_image(images: ImageSet, index: int, failure: ReadFailure) -> BadImage:
    reason = failure.message.removeprefix(f"{images.where(index)}: ")
    return BadImage(" ".join(reason.split())[:200], failure.permanent, stamp_of(images, index))


def quarantine(images: ImageSet, found: BadImagesError, max_bad: float) -> ImageSet:
    """The set with these images marked as bad; raises if too many are bad now."""
    bad = found.bad
    if len(bad) == found.batch_size >= _OUTAGE and not any(b.permanent for b in bad.values()):
        index, image = next(iter(bad.items()))
        raise DataError(
            f"{images.name}: none of the {found.batch_size} images of a batch can be read "
            f"({images.where(index)}: {image.reason}, ...), so the storage has probably failed; "
            "continue with --resume once it works again"
        )
    for index, image in bad.items():
        if image.permanent:
            mark_bad(images, index, image.reason, image.stamp)
    # The next scan does not rely on what was known of the others.
    forget(images, [index for index, image in bad.items() if not image.permanent])
    known = images.manifest or Manifest(
        np.zeros((len(images), 2), np.int32), np.zeros(len(images), bool)
    )
    sizes, plain = known.sizes.copy(), known.plain.copy()
    sizes[list(bad)], plain[list(bad)] = 0, False  # as a scan would have set them
    reasons = {index: image.reason for index, image in bad.items()} | dict(known.bad)
    manifest = replace(known, sizes=sizes, plain=plain, bad=dict(sorted(reasons.items())))
    check_max_bad(images, replace(manifest, bad=reasons), max_bad)
    for index, image in bad.items():
        log.warning("%s: %s; the run continues without it", images.where(index), image.reason)
    return replace(images, manifest=manifest)
