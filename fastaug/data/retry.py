"""Reading images while a run is going: patience with the storage, and what is done about the rest.

A file may be missing, cut short or changed for a moment (while it is written again), or for good.
A read that merely takes long is waited for, as any other.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from fastaug.data.image_set import ImageSet, Manifest
from fastaug.data.scan import ScanResult, check_share, mark_bad, stamp_of
from fastaug.errors import DataError

log = logging.getLogger("fastaug")

RETRY_PAUSES = (0.1, 0.3, 1.0, 3.0)
"""Seconds before a read or decode that failed is tried again, and again."""
_OUTAGE = 4
"""Images that, if they are all of a batch and none can be read, are not each to blame."""

Read = TypeVar("Read")


class Failure(NamedTuple):
    """An attempt that failed. No exception, whose frames would keep all that they have seen."""

    line: str
    lasting: bool
    """Of what is stored, so that the next run need not find it again; a storage may come back."""


class Fault(NamedTuple):
    """What is wrong with an image that stays bad."""

    reason: str
    lasting: bool
    stamp: int
    """Of the file that was read: it may have been mended by the time that this is noted."""


class BadImagesError(DataError):
    """Images of a batch that stay bad: a loader's pass ends with it, and goes on without them."""

    def __init__(self, faults: Mapping[int, Fault], images: int) -> None:
        super().__init__(f"{len(faults)} of {images} images of a batch are bad")
        self.faults = faults
        self.images = images
        """All that were read with them."""


class RetryError(DataError):
    """What makes the batches has broken down, by no image's fault; it can be made anew."""

    def __init__(self, reason: str, *, times: int) -> None:
        super().__init__(reason)
        self.times = times
        """How often in a row a pass may start again for it."""


class ChangedImageError(DataError):
    """Another image than the one that was looked at before the run."""


def attempt(read: Callable[[int], Read], index: int) -> Read | Failure:
    """What was read, or why it could not be."""
    try:
        return read(index)
    except DataError as error:
        # As in a look: Pillow raises OSError too, but without a number: that is the image's fault.
        storage = isinstance(error.__cause__, OSError) and error.__cause__.errno is not None
        return Failure(str(error), not storage and not isinstance(error, ChangedImageError))


def read_with_retries(
    images: ImageSet,
    first: dict[int, Read | Failure],
    read: Callable[[int], Read],
    say: Callable[[str], object] = log.warning,
) -> dict[int, Read]:
    """Images by their numbers, of a first attempt at each; those that failed are tried again.

    All that failed wait together: a storage that is away for seconds costs the time of one image.
    """
    found = {index: out for index, out in first.items() if not isinstance(out, Failure)}
    failed = {index: out for index, out in first.items() if isinstance(out, Failure)}
    for failure in failed.values():
        say(f"{failure.line}; it is tried again for {sum(RETRY_PAUSES):.2g} s")
    for pause in RETRY_PAUSES:
        if not failed:
            break
        time.sleep(pause)
        for index in list(failed):
            out = attempt(read, index)
            if isinstance(out, Failure):
                failed[index] = out
                continue
            found[index] = out
            del failed[index]
            say(f"{images.where(index)}: can be read again")
    if failed:
        faults = {index: _fault(images, index, failure) for index, failure in failed.items()}
        raise BadImagesError(faults, len(first))
    return found


def check_size(images: ImageSet, index: int, size: tuple[int, ...]) -> None:
    """size: height and width of the decoded image. Plans are made for those of the manifest."""
    if images.manifest is not None and tuple(images.manifest.sizes[index]) != size:
        raise ChangedImageError(
            f"{images.where(index)}: the file has changed, another size than when the run began"
        )


def _fault(images: ImageSet, index: int, failure: Failure) -> Fault:
    reason = failure.line.removeprefix(f"{images.where(index)}: ")
    return Fault(" ".join(reason.split())[:200], failure.lasting, stamp_of(images, index))


def quarantine(images: ImageSet, found: BadImagesError, max_bad: float) -> ImageSet:
    """The set without them, each of them said; an error if too many are bad by now."""
    faults = found.faults
    if len(faults) == found.images >= _OUTAGE and not any(f.lasting for f in faults.values()):
        index, fault = next(iter(faults.items()))
        raise DataError(
            f"{images.name}: none of the {found.images} images of a batch can be used "
            f"({images.where(index)}: {fault.reason}, and so on), so it is the storage that has "
            "failed; --resume goes on once it is back"
        )
    for index, fault in faults.items():
        if fault.lasting:
            mark_bad(images, index, fault.reason, fault.stamp)
    known = images.manifest or Manifest(
        np.zeros((len(images), 2), np.int32), np.zeros(len(images), bool)
    )
    sizes, plain = known.sizes.copy(), known.plain.copy()
    sizes[list(faults)], plain[list(faults)] = 0, False  # as a look would have left them
    bad = {index: fault.reason for index, fault in faults.items()} | dict(known.bad)
    check_share(images, ScanResult(Manifest(sizes, plain, bad), Counter()), max_bad)
    for index, fault in faults.items():
        log.warning("%s: %s; the run goes on without it", images.where(index), fault.reason)
    return replace(images, manifest=Manifest(sizes, plain, dict(sorted(bad.items()))))
