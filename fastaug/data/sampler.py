"""Which images make up which batch: the part of a loader that does not touch an image."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fastaug.config import TrainConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.retry import BadImagesError, RetryError, quarantine
from fastaug.errors import CheckpointError, DataError
from fastaug.settings import flag
from fastaug.views.batch import ViewBatch
from fastaug.views.philox import SUBSTITUTES, TEST_VIEWS, TRAIN_VIEWS, permutation, uniforms

log = logging.getLogger("fastaug")

DRAWS = 16
"""Substitutes that are drawn for a bad image: the first good one is taken. At --max-bad's 1% the
second is needed once in a hundred times."""

# What the batches and their views depend on, besides the images.
_IDENTITY = (
    *("seed", "views", "size", "augment", "crop", "crop_area", "crop_sampling"),
    *("interpolation", "antialias"),
    *("randaugment_policy", "randaugment_layers", "randaugment_magnitude"),
    *("normalize", "views_dtype", "last_batch"),
)


class BatchKey(NamedTuple):
    """All that a batch of views follows from, besides the images and the config."""

    epoch: int
    purpose: int
    indices: np.ndarray
    """[B] int64, places in the data set."""
    position: int = 0
    """Batches of the epoch before it, of this rank."""


class Schedule:
    """What every loader is built on. One pass hands out what is left of the current epoch.

    The order of the images depends on (seed, epoch); a batch of all ranks is a run of it, so the
    ranks together see what one would see. A training epoch has whole optimizer steps alone, as
    many on every rank and in every epoch. A bad image is replaced by another one, drawn anew in
    every epoch: no other image changes its place, so a run whose image has gone bad can go on.
    An evaluation has every good image once, in order; what has gone bad since it was built is
    missing from its batch, and no other image changes its place or rank for it.
    """

    def __init__(
        self,
        images: ImageSet,
        config: TrainConfig,
        *,
        train: bool,
        images_per_batch: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.images = images
        """With the bad ones, those that were found on the way too."""
        self.config = config
        self.epoch = 0
        self.position = 0
        """Batches of this epoch that were handed out."""
        self._train = train
        self._per_batch = images_per_batch
        self._rank, self._ranks = rank, ranks
        self._evaluated = self._good()
        self._length = self._training_length() if train else self._evaluation_length()

    def _training_length(self) -> int:
        per_step = self._per_batch * self._ranks * self.config.optim.accumulate
        steps, rest = divmod(len(self.images), per_step)
        if self.config.data.last_batch == "fill":
            steps += rest > 0
        if steps == 0:
            raise DataError(
                f"{self.images.name}: {len(self.images)} images are less than one optimizer step "
                f"of {per_step} (--batch-size / --views); use a smaller --batch-size, "
                "or --last-batch fill"
            )
        return steps * self.config.optim.accumulate

    def _evaluation_length(self) -> int:
        """Batches of this rank: a rank may have one less than another."""
        batches = -(-len(self._evaluated) // self._per_batch)
        return len(range(self._rank, batches, self._ranks))

    def __len__(self) -> int:
        """Batches in an epoch; the same in every epoch."""
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Start at the beginning of an epoch."""
        self.epoch, self.position = epoch, 0

    def __iter__(self) -> Iterator[ViewBatch]:
        """What is left of the epoch. It starts again where it is when something has gone wrong."""
        epoch = self.epoch
        stopped_at, times = -1, 0
        while True:
            keys = list(self.batches())
            try:
                for batch, key in zip(self._pass(keys), keys, strict=True):
                    self._handed_out(key)
                    yield batch
                break
            except BadImagesError as found:
                self.quarantine(found)
            except RetryError as error:
                times = times + 1 if self.position == stopped_at else 1
                stopped_at = self.position
                if times > error.times:
                    raise DataError(f"{error}, {times} times in a row at the same batch") from error
                log.warning("%s; the loader starts again with the same batch", error)
        if self.epoch == epoch:  # the last batches of an evaluation had bad images alone
            self.set_epoch(epoch + 1)

    def _pass(self, keys: list[BatchKey]) -> Iterator[ViewBatch]:
        """The batches of the keys, in order; raises BadImagesError or RetryError."""
        raise NotImplementedError

    def quarantine(self, found: BadImagesError) -> None:
        """From here on the batches are those of a run that has known of these images before."""
        self.images = quarantine(self.images, found, self.config.data.max_bad)

    def batches(self) -> Iterator[BatchKey]:
        """The batches of this rank that are left in the epoch; none is empty."""
        purpose = TRAIN_VIEWS if self._train else TEST_VIEWS
        epoch, order = self.epoch, self._order()
        bad = [] if self._train else list(self.images.bad)
        for position in range(self.position, len(self)):
            start = (position * self._ranks + self._rank) * self._per_batch
            indices = order[start : start + self._per_batch]
            if bad:
                indices = indices[~np.isin(indices, bad)]
            if len(indices):
                yield BatchKey(epoch, purpose, indices, position)

    def _good(self) -> np.ndarray:
        return np.setdiff1d(np.arange(len(self.images)), list(self.images.bad))

    def _order(self) -> np.ndarray:
        """The images in the order in which all ranks together see them in this epoch."""
        if not self._train:
            return self._evaluated
        order = permutation(self.config.run.seed, self.epoch, len(self.images))
        if self.images.bad:
            order = self._substitutes()[order]
        return np.resize(order, len(self) * self._ranks * self._per_batch)

    def _substitutes(self) -> np.ndarray:
        """[images]: each one itself, or what stands for it in this epoch.

        Drawn from all images, good and bad: one that goes bad changes its own place and those
        that it stood in for, whenever that is found.
        """
        count, bad = len(self.images), np.array(list(self.images.bad))
        drawn = uniforms(self.config.run.seed, self.epoch, SUBSTITUTES, bad, 1, DRAWS)[:, 0]
        candidates = (drawn * count).astype(np.int64)
        is_good = ~np.isin(candidates, bad)
        first = candidates[np.arange(len(bad)), is_good.argmax(axis=1)]
        good = self._good()
        nearest = good[np.searchsorted(good, candidates[:, -1]) % len(good)]  # where all are bad
        substitutes = np.arange(count)
        substitutes[bad] = np.where(is_good.any(axis=1), first, nearest)
        return substitutes

    def _handed_out(self, key: BatchKey) -> None:
        """A batch leaves the loader."""
        self.position = key.position + 1
        if self.position == len(self):
            self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the very batch that would have come next."""
        if state.keys() != self.state_dict().keys():
            raise CheckpointError("the loader's state was written by another version of fastaug")
        differing = [
            f"{name} {state[name]} (here: {here})"
            for name, here in self._identity.items()
            if state[name] != here
        ]
        if differing:
            advice = ""
            if state["number of images"] > len(self.images):
                advice = "; put back what was removed (an empty file is left out, and counts)"
            raise CheckpointError(
                "the loader's state belongs to other data or settings; it has "
                + ", ".join(differing)
                + advice
            )
        self.epoch, self.position = state["epoch"], state["position"]

    @cached_property  # the trainer takes the state after every step
    def _identity(self) -> dict[str, Any]:
        settings = self.config.to_flat()
        return {
            **{flag(name): settings[name] for name in _IDENTITY},
            "images per batch over all ranks": self._per_batch * self._ranks,
            "number of images": len(self.images),
            "data fingerprint": self.images.fingerprint,
        }
