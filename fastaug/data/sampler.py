"""Which images make up which batch. This depends only on (seed, epoch, rank)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fastaug.data.image_set import ImageSet
from fastaug.data.permutation import permuted
from fastaug.errors import DataError
from fastaug.views.philox import SUBSTITUTES, TEST_VIEWS, TRAIN_VIEWS, uniforms

DRAWS = 16
"""Substitutes drawn for a bad image; the first good one is used. At --max-bad's default of 1% the
second one is needed once in a hundred times."""
_BLOCK = 1 << 14
"""Images whose order is computed at once: 2 ms. For fewer, the calls to numpy take longer."""


class BatchKey(NamedTuple):
    """Determines a batch of views, together with the images and the config."""

    epoch: int
    purpose: int
    indices: np.ndarray
    """[B] int64, positions in the data set."""
    position: int = 0
    """Number of batches before it in the epoch, on this rank."""


class BatchSampler:
    """The batches of one rank.

    The order of the images depends on (seed, epoch). A batch over all ranks is a contiguous part of
    that order, so all ranks together see what a single rank would see. A training epoch has only
    whole optimizer steps, the same number on every rank and in every epoch. A bad image is replaced
    by a random other one each epoch. No other image changes its place, so a run can be resumed even
    if an image has become unreadable. An evaluation has every good image once, in order; an image
    that becomes unreadable later is missing from its batch, and no other image changes place or
    rank.
    """

    def __init__(
        self,
        images: ImageSet,
        *,
        seed: int,
        train: bool,
        images_per_batch: int,
        batches_per_step: int = 1,
        fill_last: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """fill_last: complete the last step of an epoch with images from the epoch's start;
        otherwise skip images that do not fill a step."""
        self.images_per_batch, self.ranks = images_per_batch, ranks
        self._seed, self._train, self._rank = seed, train, rank
        self._evaluated = np.zeros(0, np.int64) if train else good_indices(images)
        if train:
            per_step = images_per_batch * ranks * batches_per_step
            steps = _training_steps(images, per_step, fill_last)
            self._length = steps * batches_per_step
        else:  # a rank may have one batch less than another
            batches = -(-len(self._evaluated) // images_per_batch)
            self._length = len(range(rank, batches, ranks))

    def __len__(self) -> int:
        """Number of batches in an epoch; the same in every epoch."""
        return self._length

    def batches(self, images: ImageSet, epoch: int, start: int = 0) -> Iterator[BatchKey]:
        """The batches of an epoch from position `start` on; none is empty.

        images: the set that the sampler was made for, perhaps with more bad images by now.
        """
        if self._train:
            yield from self._training_batches(images, epoch, start)
            return
        left_out = list(images.bad)
        for position in range(start, len(self)):
            first = (position * self.ranks + self._rank) * self.images_per_batch
            indices = self._evaluated[first : first + self.images_per_batch]
            if left_out:
                indices = indices[~np.isin(indices, left_out)]
            if len(indices):
                yield BatchKey(epoch, TEST_VIEWS, indices, position)

    def _training_batches(self, images: ImageSet, epoch: int, start: int) -> Iterator[BatchKey]:
        size = self.images_per_batch
        substitutes = self._substitutes(images, epoch) if images.bad else None
        batches_per_block = max(1, _BLOCK // size)
        for begin in range(start, len(self), batches_per_block):
            block = np.arange(begin, min(begin + batches_per_block, len(self)))
            first = (block * self.ranks + self._rank) * size
            # An epoch that is filled up continues with its own start.
            places = (first[:, None] + np.arange(size)).ravel() % len(images)
            order = permuted(self._seed, epoch, len(images), places)
            if substitutes is not None:
                order = _replaced(order, *substitutes)
            for position, indices in zip(block.tolist(), order.reshape(-1, size), strict=True):
                yield BatchKey(epoch, TRAIN_VIEWS, indices, position)

    def _substitutes(self, images: ImageSet, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """[bad]: the bad images in ascending order; [bad]: the image that replaces each.

        Drawn from all images, good and bad: an image that becomes unreadable changes only its own
        place and the places where it was the substitute, no matter when it is found.
        """
        count, bad = len(images), np.sort(np.array(list(images.bad), np.int64))
        drawn = uniforms(self._seed, epoch, SUBSTITUTES, bad, 1, DRAWS)[:, 0]
        candidates = (drawn * count).astype(np.int64)
        is_good = ~np.isin(candidates, bad)
        chosen = candidates[np.arange(len(bad)), is_good.argmax(axis=1)]
        for row in np.flatnonzero(~is_good.any(axis=1)).tolist():
            nearest = int(candidates[row, -1])
            while nearest in images.bad:
                nearest = (nearest + 1) % count
            chosen[row] = nearest
        return bad, chosen


def _replaced(order: np.ndarray, bad: np.ndarray, substitutes: np.ndarray) -> np.ndarray:
    """bad: [M] ascending -> the order with each bad image replaced by its substitute."""
    place = np.minimum(np.searchsorted(bad, order), len(bad) - 1)
    return np.where(bad[place] == order, substitutes[place], order)


def good_indices(images: ImageSet) -> np.ndarray:
    """[N] int64: the images that are not bad, in order."""
    return np.delete(np.arange(len(images)), list(images.bad))


def _training_steps(images: ImageSet, per_step: int, fill_last: bool) -> int:
    steps, rest = divmod(len(images), per_step)
    if fill_last:
        steps += rest > 0
    if steps == 0:
        raise DataError(
            f"{images.name}: {len(images)} images do not fill one optimizer step of {per_step} "
            "(--batch-size / --views); use a smaller --batch-size, or --last-batch fill"
        )
    return steps
