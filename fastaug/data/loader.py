"""The base of all loaders: iteration, recovery from bad images, and the state for a resume."""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from functools import cached_property, partial
from itertools import chain
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
from fastaug.settings import fixed_settings, flag, plain, typed
from fastaug.views.batch import ViewBatch
from fastaug.views.config import ViewConfig
from fastaug.views.philox import TEST_VIEWS, TRAIN_VIEWS
from fastaug.views.randaugment import table_fingerprint
from fastaug.views.resizing import growing_epochs, view_of_epoch

log = logging.getLogger("fastaug")
CPU = torch.device("cpu")
_GROWING = "epochs of growing views"


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
        epochs: int = 0,
    ) -> None:
        """epochs: of the training. Views grow over them (--initial-size), and up to the last one,
        batches of the next epoch are prefetched while an epoch ends."""
        self.images = images
        """The image set, with all bad images found so far."""
        self.epoch = 0
        self.position = 0
        """Number of batches yielded in this epoch."""
        self._data, self._view, self._seed, self._train = data, view, seed, train
        self._device, self._epochs = device, epochs
        self._view_of_epoch = partial(view_of_epoch, view, epochs=epochs)
        self._prefetched: _Pass | None = None
        """The pass of the last epoch, which has begun with the next one."""
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

    @property
    def view_size(self) -> int:
        """Side of the views in this epoch, in pixels."""
        return self._view_of_epoch(self.epoch).size

    @property
    def engine_name(self) -> str:
        """What makes the views."""
        return "reference"

    def set_epoch(self, epoch: int) -> None:
        """Start at the beginning of an epoch."""
        self._move_to(epoch, 0)

    def _move_to(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self._check_prefetched()

    def _check_prefetched(self) -> None:
        """Drop the prefetched pass unless it continues here."""
        if self._prefetched is not None and not self._prefetched.continues(self):
            self._drop_prefetched()

    def _drop_prefetched(self) -> None:
        if self._prefetched is not None:
            self._prefetched.close()
            self._prefetched = None

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
        self._drop_prefetched()
        try:
            return torch.cat([batch.views for batch in self._pass(keys)])
        except Exception:
            self._discard()
            raise

    def __iter__(self) -> Iterator[ViewBatch]:
        """The rest of the epoch. After a recoverable error, a new pass continues at the same
        batch."""
        epoch, failures = self.epoch, Counter[tuple[int, int]]()
        self._check_prefetched()
        current, self._prefetched = self._prefetched or self._new_pass(), None
        try:
            while True:
                try:
                    if (key := current.make_next()) is None:
                        break
                except Exception as error:
                    current.close()
                    self._discard()
                    self._recover(error, failures)
                    current = self._new_pass()
                    continue
                self._advance(key)
                yield current.take()
                if key.position + 1 == len(self):
                    if current.continues(self):
                        self._prefetched = current
                    break
        finally:
            if self._prefetched is not current:
                current.close()
        if self.epoch == epoch:  # the last batches of an evaluation had bad images only
            self.set_epoch(epoch + 1)

    def _new_pass(self) -> _Pass:
        return _Pass(self, max(self._epochs, self.epoch + 1))

    def _recover(self, error: Exception, failures: Counter[tuple[int, int]]) -> None:
        """Prepare for a new pass after a recoverable error; raise others. failures: by place."""
        if isinstance(error, BadImagesError):
            # From here on, batches are as if these images had been known from the start.
            self.images = quarantine(self.images, error, self._data.max_bad)
            return
        if not isinstance(error, RetryError):
            raise error
        place = self.epoch, self.position
        failures[place] += 1
        if failures[place] > error.max_retries:
            raise DataError(
                f"{error}, {failures[place]} times in a row at the same batch"
            ) from error
        log.warning("%s; restarting the loader at the same batch", error)

    def _pass(self, keys: Iterable[BatchKey]) -> Iterator[ViewBatch]:
        """The batches of the keys, in order; raises BadImagesError or RetryError. The iterator must
        not refer to the loader."""
        raise NotImplementedError

    def _discard(self) -> None:
        """Called after an error of a pass: discard what cannot be used again."""

    def _advance(self, key: BatchKey) -> None:
        self.epoch, self.position = key.epoch, key.position + 1
        if self.position == len(self):
            self.epoch, self.position = key.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with exactly the batch that would have come next."""
        state = {"--initial-size": 0, _GROWING: 0} | state  # states of earlier versions have none
        if state.keys() != self.state_dict().keys():
            raise CheckpointError("the loader's state was written by another version of fastaug")
        differing = [
            f"{name} {typed(state[name])} (here: {typed(here)})"
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
        if state["position"] >= len(self):
            raise CheckpointError(
                f"the loader's state is at batch {state['position']} of an epoch of {len(self)}"
            )
        self._move_to(state["epoch"], state["position"])

    @cached_property  # the trainer reads the state after every step
    def _identity(self) -> dict[str, Any]:
        """What the batches and their views depend on."""
        settings = dict(fixed_settings(self._view)) | {"last_batch": self._data.last_batch}
        uses_table = self._view.augment == "randaugment" and not self._view.uses_dali_policy
        return {
            "--seed": self._seed,
            "version of the image order": ORDER_VERSION,
            **{flag(name): plain(value) for name, value in settings.items()},
            _GROWING: growing_epochs(self._view, self._epochs),
            "RandAugment table": table_fingerprint() if uses_table else None,
            "images per batch over all ranks": self._sampler.images_per_batch * self._sampler.ranks,
            "number of images": len(self.images),
            "data fingerprint": self.images.fingerprint,
        }


class _Pass:
    """Batches in the making, from the loader's position to the end of an epoch.

    Does not refer to the loader, which keeps it: both would live until a garbage collection.
    """

    def __init__(self, loader: ViewLoader, end: int) -> None:
        """end: the epoch after the last one."""
        self._images, self._end, self._process = loader.images, end, os.getpid()
        self._keys: deque[BatchKey] = deque()
        """Keys of the batches that are being made."""
        self._made: list[ViewBatch] = []
        self.key: BatchKey | None = None
        """Key of the last batch that was made."""
        later = map(partial(loader._sampler.batches, loader.images), range(loader.epoch + 1, end))
        keys = chain(loader.batches(), chain.from_iterable(later))
        self._batches = loader._pass(_recorded(keys, self._keys))

    def make_next(self) -> BatchKey | None:
        """Make the next batch; None if there is none."""
        if (batch := next(self._batches, None)) is None:
            assert not self._keys, "batches are missing"
            return None
        self._made.append(batch)
        self.key = self._keys.popleft()
        return self.key

    def take(self) -> ViewBatch:
        """The batch that was made. The pass does not keep it."""
        return self._made.pop()

    def continues(self, loader: ViewLoader) -> bool:
        """Whether the loader is at the start of an epoch with which this pass continues."""
        is_next = self.key is not None and loader.epoch == self.key.epoch + 1 < self._end
        is_same = loader.images is self._images and os.getpid() == self._process
        return is_next and is_same and loader.position == 0

    def close(self) -> None:
        """End all of its work."""
        if os.getpid() != self._process:
            _of_parent.append(self._batches)
        elif isinstance(self._batches, Generator):
            self._batches.close()


_of_parent: list[Iterator[ViewBatch]] = []
"""Passes that a forked child has inherited. Ending them would wait for threads and processes that
the child does not have."""


def _recorded(keys: Iterable[BatchKey], record: deque[BatchKey]) -> Iterator[BatchKey]:
    for key in keys:
        record.append(key)
        yield key
