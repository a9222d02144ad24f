"""Which images make up which batch: the part of a loader that does not touch an image."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fastaug.config import TrainConfig, flag
from fastaug.data.images import ImageSet
from fastaug.data.stream import SUBSTITUTES, TEST_VIEWS, TRAIN_VIEWS, permutation, uniforms
from fastaug.errors import CheckpointError, DataError

# What the batches and their views depend on, besides the images.
_IDENTITY = (
    *("seed", "views", "size", "augment", "crop", "crop_area", "crop_sampling"),
    *("interpolation", "antialias"),
    *("randaugment_policy", "randaugment_layers", "randaugment_magnitude"),
    *("normalise", "views_dtype", "last_batch"),
)


class BatchKey(NamedTuple):
    """All that a batch of views follows from, besides the images and the config."""

    epoch: int
    purpose: int
    indices: np.ndarray
    """[B] int64, places in the data set."""


class Schedule:
    """What every loader is built on. One pass hands out what is left of the current epoch.

    The order of the images depends on (seed, epoch); a batch of all ranks is a run of it, so the
    ranks together see what one would see. A training epoch has whole optimiser steps alone, as
    many on every rank and in every epoch. A bad image is replaced by another one, drawn anew in
    every epoch: no other image changes its place, so a run whose image has gone bad can go on.
    An evaluation has every good image once, in order.
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
        self.config = config
        self.epoch = 0
        self.position = 0
        """Batches of this epoch that were handed out."""
        self._train = train
        self._per_batch = images_per_batch
        self._rank, self._ranks = rank, ranks
        self._good = np.setdiff1d(np.arange(len(images)), list(images.bad))
        self._length = self._training_length() if train else self._evaluation_length()

    def _training_length(self) -> int:
        per_step = self._per_batch * self._ranks * self.config.accumulate
        steps, rest = divmod(len(self.images), per_step)
        if self.config.last_batch == "fill":
            steps += rest > 0
        if steps == 0:
            raise DataError(
                f"{self.images.name}: {len(self.images)} images are less than one optimiser step "
                f"of {per_step} (--batch-size / --views); use a smaller --batch-size, "
                "or --last-batch fill"
            )
        return steps * self.config.accumulate

    def _evaluation_length(self) -> int:
        """Batches of this rank: a rank may have one less than another."""
        batches = -(-len(self._good) // self._per_batch)
        return len(range(self._rank, batches, self._ranks))

    def __len__(self) -> int:
        """Batches in an epoch; the same in every epoch."""
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Start at the beginning of an epoch."""
        self.epoch, self.position = epoch, 0

    def batches(self) -> Iterator[BatchKey]:
        """The batches of this rank that are left in the epoch."""
        purpose = TRAIN_VIEWS if self._train else TEST_VIEWS
        epoch, order = self.epoch, self._order()
        for position in range(self.position, len(self)):
            start = (position * self._ranks + self._rank) * self._per_batch
            yield BatchKey(epoch, purpose, order[start : start + self._per_batch])

    def _order(self) -> np.ndarray:
        """The images in the order in which all ranks together see them in this epoch."""
        if not self._train:
            return self._good
        seed, count = self.config.seed, len(self.images)
        order = permutation(seed, self.epoch, count)
        if bad := list(self.images.bad):
            drawn = uniforms(seed, self.epoch, SUBSTITUTES, np.array(bad), 1, 1)[:, 0, 0]
            substitutes = np.arange(count)
            substitutes[bad] = self._good[(drawn * len(self._good)).astype(np.int64)]
            order = substitutes[order]
        return np.resize(order, len(self) * self._ranks * self._per_batch)

    def _handed_out(self) -> None:
        """A batch leaves the loader."""
        self.position += 1
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
        settings = self.config.to_dict()
        return {
            **{flag(name): settings[name] for name in _IDENTITY},
            "images per batch over all ranks": self._per_batch * self._ranks,
            "number of images": len(self.images),
            "data fingerprint": self.images.fingerprint,
        }
