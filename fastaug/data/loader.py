"""The base of all loaders: iteration, recovery from bad images, and the state for a resume."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastaug.data.config import DataConfig
from fastaug.data.image_set import ImageSet
from fastaug.data.permutation import VERSION as ORDER_VERSION
from fastaug.data.retry import BadImagesError, RetryError, quarantine
from fastaug.data.sampler import BatchKey, BatchSampler
from fastaug.errors import CheckpointError, DataError
from fastaug.settings import fixed_settings, flag
from fastaug.views.batch import ViewBatch
from fastaug.views.config import ViewConfig
from fastaug.views.philox import TEST_VIEWS, TRAIN_VIEWS
from fastaug.views.randaugment import table_fingerprint

log = logging.getLogger("fastaug")
CPU = torch.device("cpu")


class ViewLoader:
    """An iterable of ViewBatch on the device. One pass yields the rest of the current epoch.

    A subclass makes the batches (`_pass`). Batches and views depend only on (seed, epoch,
    position), so a checkpoint needs nothing else.
    """

    def __init__(
        self,
        images: ImageSet,
        data: DataConfig,
        view: ViewConfig,
        *,
        seed: int,
        train: bool,
        images_per_batch: int,
        device: torch.device = CPU,
        batches_per_step: int = 1,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.images = images
        """The image set, with all bad images found so far."""
        self.epoch = 0
        self.position = 0
        """Number of batches yielded in this epoch."""
        self._data, self._view, self._seed, self._train = data, view, seed, train
        self._device = device
        self._sampler = BatchSampler(
            images,
            seed=seed,
            train=train,
            images_per_batch=images_per_batch,
            batches_per_step=batches_per_step,
            fill_last=data.last_batch == "fill",
            rank=rank,
            ranks=ranks,
        )

    def __len__(self) -> int:
        """Number of batches in an epoch; the same in every epoch."""
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Start at the beginning of an epoch."""
        self.epoch, self.position = epoch, 0

    def batches(self) -> Iterator[BatchKey]:
        """The remaining batches of this rank in the epoch."""
        return self._sampler.batches(self.images, self.epoch, self.position)

    def make_views(self, epoch: int, indices: np.ndarray) -> Tensor:
        """indices: [B] -> [B, K, 3, H, W]: the views of these images in an epoch. Not while batches
        are iterated over."""
        purpose = TRAIN_VIEWS if self._train else TEST_VIEWS
        most = self._sampler.images_per_batch
        parts = [indices[start : start + most] for start in range(0, len(indices), most)]
        keys = [BatchKey(epoch, purpose, part, i) for i, part in enumerate(parts)]
        return torch.cat([batch.views for batch in self._pass(keys)])

    def __iter__(self) -> Iterator[ViewBatch]:
        """The rest of the epoch. After a recoverable error, a new pass continues at the same
        batch."""
        epoch = self.epoch
        failed_at, failures = -1, 0
        while True:
            keys = list(self.batches())
            try:
                for batch, key in zip(self._pass(keys), keys, strict=True):
                    self._advance(key)
                    yield batch
                break
            except BadImagesError as found:
                # From here on, batches are as if these images had been known from the start.
                self.images = quarantine(self.images, found, self._data.max_bad)
            except RetryError as error:
                failures = failures + 1 if self.position == failed_at else 1
                failed_at = self.position
                if failures > error.max_retries:
                    raise DataError(
                        f"{error}, {failures} times in a row at the same batch"
                    ) from error
                log.warning("%s; restarting the loader at the same batch", error)
        if self.epoch == epoch:  # the last batches of an evaluation had bad images only
            self.set_epoch(epoch + 1)

    def _pass(self, keys: list[BatchKey]) -> Iterator[ViewBatch]:
        """The batches of the keys, in order; raises BadImagesError or RetryError."""
        raise NotImplementedError

    def _advance(self, key: BatchKey) -> None:
        self.position = key.position + 1
        if self.position == len(self):
            self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with exactly the batch that would have come next."""
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
                advice = "; restore the removed files (empty files will do)"
            raise CheckpointError(
                "the loader's state belongs to other data or settings; it has "
                + ", ".join(differing)
                + advice
            )
        self.epoch, self.position = state["epoch"], state["position"]

    @cached_property  # the trainer reads the state after every step
    def _identity(self) -> dict[str, Any]:
        """What the batches and their views depend on."""
        settings = dict(fixed_settings(self._view)) | {"last_batch": self._data.last_batch}
        plain = {n: list(v) if isinstance(v, tuple) else v for n, v in settings.items()}
        uses_table = self._view.augment == "randaugment" and not self._view.uses_dali_policy
        return {
            "--seed": self._seed,
            "version of the image order": ORDER_VERSION,
            **{flag(name): value for name, value in plain.items()},
            "RandAugment table": table_fingerprint() if uses_table else None,
            "images per batch over all ranks": self._sampler.images_per_batch * self._sampler.ranks,
            "number of images": len(self.images),
            "data fingerprint": self.images.fingerprint,
        }
